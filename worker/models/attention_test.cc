#include "worker/models/attention.h"

#include <gtest/gtest.h>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"

namespace muster::models {
namespace {

at::Tensor Padding(std::vector<int64_t> mask) {
  return PaddingMask(at::tensor(mask, c10::kLong).unsqueeze(0));
}

TEST(PaddingMask, NoPadding_IsUndefined) {
  EXPECT_FALSE(PaddingMask({}).defined());
  EXPECT_FALSE(Padding({1, 1, 1}).defined());
  EXPECT_TRUE(Padding({0, 1, 1}).defined());
}

TEST(CausalMask, NoPaddingAndNoWindow_NeedsNoMask) {
  EXPECT_TRUE(CausalMask({}, 4, 4, 0, c10::kCPU).is_causal);
  EXPECT_TRUE(CausalMask({}, 4, 4, 4, c10::kCPU).is_causal);
  const AttentionMask one = CausalMask({}, 1, 9, 0, c10::kCPU);
  EXPECT_FALSE(one.is_causal || one.mask.defined());
}

TEST(CausalMask, Window_SeesTheLastPositionsItselfIncluded) {
  const at::Tensor mask = CausalMask({}, 2, 5, 3, c10::kCPU).mask;
  const at::Tensor want =
      at::tensor({0, 1, 1, 1, 0, 0, 0, 1, 1, 1}, c10::kLong).to(c10::kBool).view({1, 1, 2, 5});
  EXPECT_TRUE(at::equal(mask, want));
}

TEST(CausalMask, LeftPadding_IsSeenByItselfAlone) {
  const at::Tensor mask = CausalMask(Padding({0, 1, 1}), 3, 3, 0, c10::kCPU).mask;
  const at::Tensor want = at::tensor({1, 0, 0, 0, 1, 0, 0, 1, 1}, c10::kLong).to(c10::kBool);
  EXPECT_TRUE(at::equal(mask.flatten(), want));
}

// As in transformers, the output of a padded position on the right is well-defined.
TEST(CausalMask, RightPadding_SeesWhatIsBeforeIt) {
  const at::Tensor mask = CausalMask(Padding({1, 1, 0}), 3, 3, 0, c10::kCPU).mask;
  const at::Tensor want = at::tensor({1, 0, 0, 1, 1, 0, 1, 1, 0}, c10::kLong).to(c10::kBool);
  EXPECT_TRUE(at::equal(mask.flatten(), want));
  // The window contains only padding.
  const at::Tensor far = CausalMask(Padding({1, 0, 0}), 3, 3, 2, c10::kCPU).mask;
  EXPECT_TRUE(
      at::equal(far.flatten(), at::tensor({1, 0, 0, 1, 0, 0, 0, 0, 1}, c10::kLong).to(c10::kBool)));
}

TEST(PackedTexts, PositionsThatBeginAgain_BeginAText) {
  EXPECT_FALSE(PackedTexts(at::arange(3, c10::kLong).unsqueeze(0)).defined());
  EXPECT_FALSE(PackedTexts(at::tensor({5, 6, 9}, c10::kLong).unsqueeze(1)).defined());
  const at::Tensor positions = at::tensor({0, 1, 0, 1, 2, 5, 2, 3, 4, 5, 6, 7}, c10::kLong);
  EXPECT_TRUE(at::equal(PackedTexts(positions.view({2, 6})).flatten(),
                        at::tensor({0, 0, 1, 1, 1, 2, 0, 0, 0, 0, 0, 0}, c10::kLong)));
}

TEST(CausalMask, PackedTexts_SeeThemselvesAlone) {
  const at::Tensor texts = at::tensor({0, 0, 1}, c10::kLong).unsqueeze(0);
  const at::Tensor mask = CausalMask({}, 3, 3, 0, c10::kCPU, texts).mask;
  const at::Tensor want = at::tensor({1, 0, 0, 1, 1, 0, 0, 0, 1}, c10::kLong).to(c10::kBool);
  EXPECT_TRUE(at::equal(mask.flatten(), want));
}

TEST(BidirectionalMask, RowOfPaddingAlone_IsNotNan) {
  const AttentionMask mask = BidirectionalMask(Padding({0, 0}));
  const at::Tensor x = at::randn({1, 2, 2, 4});
  EXPECT_FALSE(Attend(x, x, x, mask, 0).isnan().any().item<bool>());
}

// Grouped queries are equivalent to repeated keys, with and without a mask and gradients.
TEST(Attend, GroupedQueries_AreRepeatedKeys) {
  const at::Tensor q = at::randn({2, 6, 5, 4});
  for (const bool has_gradients : {false, true}) {
    for (const AttentionMask& mask :
         {AttentionMask{.is_causal = true}, CausalMask({}, 5, 5, 2, c10::kCPU)}) {
      const at::Tensor k = at::randn({2, 2, 5, 4}).requires_grad_(has_gradients);
      const at::Tensor v = at::randn({2, 2, 5, 4}).requires_grad_(has_gradients);
      const at::Tensor want =
          Attend(q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), mask, 0);
      const at::Tensor got = Attend(q, k, v, mask, 0);
      EXPECT_EQ(got.sizes(), at::IntArrayRef({2, 5, 24}));
      EXPECT_TRUE(at::allclose(got, want, 1e-5, 1e-6));
    }
  }
}

}  // namespace
}  // namespace muster::models
