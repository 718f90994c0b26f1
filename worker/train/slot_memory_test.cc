#include "worker/train/slot_memory.h"

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(SlotToReuse, MemoryThatFitsAndNobodyElseHas_IsUsedAgain) {
  const at::Tensor parameter = at::zeros({4, 3}), source = at::full({4, 3}, 2.0);
  const at::Tensor slot = at::zeros({4, 3});
  EXPECT_TRUE(SlotToReuse(slot, 1, parameter, source).is_same(slot));
  {
    const at::Tensor held = slot;
    EXPECT_FALSE(SlotToReuse(slot, 1, parameter, source).defined());
    EXPECT_TRUE(SlotToReuse(slot, 2, parameter, source).is_same(slot));
  }
  {
    const at::Tensor view = slot.narrow(0, 0, 2);
    EXPECT_FALSE(SlotToReuse(slot, 1, parameter, source).defined());
  }
  EXPECT_TRUE(SlotToReuse(slot, 1, parameter, source).defined());
}

TEST(SlotToReuse, OtherShapeTypeOrLayout_IsNot) {
  const at::Tensor parameter = at::zeros({4, 3}), source = at::zeros({4, 3});
  EXPECT_FALSE(SlotToReuse(at::Tensor(), 1, parameter, source).defined());
  EXPECT_FALSE(SlotToReuse(at::zeros({3, 4}), 1, parameter, source).defined());
  EXPECT_FALSE(SlotToReuse(at::zeros({4, 3}, at::kDouble), 1, parameter, source).defined());
  EXPECT_FALSE(SlotToReuse(at::zeros({3, 4}).t(), 1, parameter, source).defined());
  EXPECT_FALSE(SlotToReuse(at::zeros({4, 3}), 1, parameter, at::zeros({4, 2})).defined());
}

TEST(NewSlot, LargeOrSmall_LiesAsTheParameter) {
  for (const int64_t rows : {2, 3000}) {
    const at::Tensor parameter = at::zeros({rows, 1000}).t();
    const at::Tensor slot = NewSlot(parameter);
    EXPECT_EQ(slot.sizes(), parameter.sizes());
    EXPECT_EQ(slot.strides(), parameter.strides());
    EXPECT_FALSE(slot.requires_grad());
    slot.fill_(1);
    EXPECT_EQ(slot.sum().item<double>(), 1000.0 * rows);
  }
}

}  // namespace
}  // namespace muster
