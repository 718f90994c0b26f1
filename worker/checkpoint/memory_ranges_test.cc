#include "worker/checkpoint/memory_ranges.h"

#include <gtest/gtest.h>

#include "ATen/ops/empty.h"
#include "ATen/ops/zeros.h"

namespace muster {
namespace {

TEST(MemoryRanges, TensorsThatShareAByte_Overlap) {
  const at::Tensor all = at::zeros({100});
  MemoryRanges ranges;
  EXPECT_FALSE(ranges.Overlap(all));
  ranges.Add(all.narrow(0, 10, 10));
  ranges.Add(all.narrow(0, 50, 10));
  EXPECT_TRUE(ranges.Overlap(all));
  EXPECT_TRUE(ranges.Overlap(all.narrow(0, 19, 1)));
  EXPECT_TRUE(ranges.Overlap(all.narrow(0, 12, 2)));
  EXPECT_TRUE(ranges.Overlap(all.narrow(0, 0, 11)));
  EXPECT_FALSE(ranges.Overlap(all.narrow(0, 0, 10)));
  EXPECT_FALSE(ranges.Overlap(all.narrow(0, 20, 30)));
  EXPECT_FALSE(ranges.Overlap(all.narrow(0, 60, 40)));
  ranges.Clear();
  EXPECT_FALSE(ranges.Overlap(all));
}

TEST(MemoryRanges, RangesThatOverlap_AreOne) {
  const at::Tensor all = at::zeros({100});
  MemoryRanges ranges;
  // The second one begins before the first and ends within it; the third one holds both.
  for (const auto& [begin, count] : {std::pair{30, 10}, {20, 15}, {10, 50}, {15, 2}}) {
    ranges.Add(all.narrow(0, begin, count));
  }
  for (int i = 0; i < 100; ++i) {
    EXPECT_EQ(ranges.Overlap(all.narrow(0, i, 1)), i >= 10 && i < 60) << i;
  }
}

TEST(MemoryRanges, StridedTensor_ReachesToItsLastElement) {
  const at::Tensor all = at::zeros({4, 10});
  MemoryRanges ranges;
  ranges.Add(all.slice(1, 0, 1));  // a column: up to the beginning of the last row
  EXPECT_TRUE(ranges.Overlap(all.select(0, 2)));
  EXPECT_TRUE(ranges.Overlap(all.select(0, 3)));
  EXPECT_FALSE(ranges.Overlap(all.select(0, 3).narrow(0, 1, 9)));
}

TEST(MemoryRanges, TensorsWithoutMemory_OverlapNothing) {
  MemoryRanges ranges;
  const at::Tensor none = at::empty({0}), meta = at::empty({3}, at::kMeta);
  for (const at::Tensor& tensor : {none, meta, at::Tensor()}) {
    ranges.Add(tensor);
    EXPECT_FALSE(ranges.Overlap(tensor));
  }
  EXPECT_FALSE(ranges.Overlap(at::zeros({3})));
}

}  // namespace
}  // namespace muster
