#include "coordinator/checkpoint/coverage.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>
#include <string>
#include <vector>

namespace muster::coordinator {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using Numbers = std::vector<int64_t>;

v1::TensorSlice Slice(const std::string& tensor, const Numbers& shape, const Numbers& offset,
                      const Numbers& extent) {
  v1::TensorSlice slice;
  slice.set_tensor(tensor);
  slice.set_dtype("F32");
  for (const int64_t n : shape) slice.add_global_shape(n);
  for (const int64_t n : offset) slice.add_offset(n);
  for (const int64_t n : extent) slice.add_extent(n);
  return slice;
}

TEST(Coverage, RowsColumnsBlocksAndFlatRanges_AreComplete) {
  Coverage coverage;
  for (int i = 0; i < 4; ++i) {
    const std::string file = "r" + std::to_string(i);
    EXPECT_EQ(coverage.Add(Slice("rows", {8, 3}, {2 * i, 0}, {2, 3}), file), std::nullopt);
    EXPECT_EQ(coverage.Add(Slice("columns", {3, 8}, {0, 2 * i}, {3, 2}), file), std::nullopt);
    EXPECT_EQ(coverage.Add(Slice("blocks", {4, 6}, {i / 2 * 2, i % 2 * 3}, {2, 3}), file),
              std::nullopt);
    EXPECT_EQ(coverage.Add(Slice("flat", {10}, {i * 3}, {std::min(3, 10 - i * 3)}), file),
              std::nullopt);
  }
  EXPECT_EQ(coverage.Add(Slice("scalar", {}, {}, {}), "r0"), std::nullopt);
  EXPECT_EQ(coverage.Add(Slice("empty", {0, 5}, {0, 0}, {0, 5}), "r0"), std::nullopt);
  EXPECT_EQ(coverage.FirstProblem(), "");
  EXPECT_EQ(coverage.tensors(), 6u);
}

TEST(Coverage, GapAndOverlap_AreNamed) {
  Coverage gap;
  gap.Add(Slice("w", {4, 8}, {0, 0}, {2, 8}), "a");
  gap.Add(Slice("w", {4, 8}, {3, 0}, {1, 8}), "b");
  EXPECT_EQ(gap.FirstProblem(), "tensor \"w\" of [4, 8]: the files have 24 of its 32 elements");

  Coverage overlap;
  // The sizes add up: only the comparison finds the error.
  overlap.Add(Slice("w", {4, 8}, {0, 0}, {2, 8}), "a");
  overlap.Add(Slice("w", {4, 8}, {1, 0}, {2, 8}), "b");
  EXPECT_THAT(
      overlap.FirstProblem(),
      AllOf(HasSubstr("files \"a\" (offset [0, 0], extent [2, 8]) and \"b\" (offset [1, 0]"),
            HasSubstr("both have some of it")));

  Coverage twice;
  twice.Add(Slice("scalar", {}, {}, {}), "a");
  twice.Add(Slice("scalar", {}, {}, {}), "b");
  EXPECT_THAT(twice.FirstProblem(), HasSubstr("both have some of it"));
}

TEST(Coverage, SeveralProblems_TheFirstNameIsToldWhateverTheOrder) {
  Coverage coverage;
  for (const char* name : {"z", "b", "m"}) coverage.Add(Slice(name, {4}, {0}, {3}), "a");
  EXPECT_THAT(coverage.FirstProblem(), HasSubstr("\"b\""));
}

TEST(Coverage, SliceThatIsWrong_IsRefusedAndNothingIsKept) {
  Coverage coverage;
  const auto message = [&](const v1::TensorSlice& slice) {
    const auto error = coverage.Add(slice, "f");
    return error.has_value() ? error->message() : "";
  };
  EXPECT_THAT(message(Slice("", {1}, {0}, {1})), HasSubstr("1 to 1024 bytes"));
  EXPECT_THAT(message(Slice("w", {4}, {2}, {3})), HasSubstr("leave the shape [4]"));
  EXPECT_THAT(message(Slice("w", {4}, {-1}, {3})), HasSubstr("leave the shape"));
  EXPECT_THAT(message(Slice("w", {4}, {INT64_MAX}, {INT64_MAX})), HasSubstr("leave the shape"));
  EXPECT_THAT(message(Slice("w", {4, 4}, {0}, {4})), HasSubstr("needs 2 of each"));
  EXPECT_THAT(message(Slice("w", {INT64_MAX, 4}, {0, 0}, {1, 1})), HasSubstr("2^63"));
  EXPECT_THAT(message(Slice("w", Numbers(9, 1), Numbers(9, 0), Numbers(9, 1))),
              HasSubstr("9 dimensions"));
  EXPECT_EQ(coverage.tensors(), 0u);
  EXPECT_EQ(message(Slice("w", {4}, {0}, {4})), "");
  EXPECT_THAT(message(Slice("w", {5}, {0}, {5})),
              AllOf(HasSubstr("of [5] here"), HasSubstr("of [4] in file \"f\"")));
  EXPECT_EQ(coverage.FirstProblem(), "");
}

// Divides boxes at random, in one to four dimensions; then one part is lost, moved or doubled.
TEST(Coverage, RandomDivisions_AreCompleteUntilOneIsChanged) {
  std::mt19937_64 random(20261122);
  const auto below = [&](int64_t n) { return static_cast<int64_t>(random() % n); };
  for (int round = 0; round < 2000; ++round) {
    const int rank = 1 + below(4);
    Numbers shape(rank);
    for (int64_t& n : shape) n = 1 + below(9);
    std::vector<std::pair<Numbers, Numbers>> boxes = {{Numbers(rank, 0), shape}};
    for (int cut = below(12); cut > 0; --cut) {
      const size_t which = below(boxes.size());
      const int dim = below(rank);
      auto& [offset, extent] = boxes[which];
      if (extent[dim] < 2) continue;
      const int64_t first = 1 + below(extent[dim] - 1);
      auto second = boxes[which];
      second.first[dim] += first;
      second.second[dim] -= first;
      boxes[which].second[dim] = first;
      boxes.push_back(second);
    }
    std::shuffle(boxes.begin(), boxes.end(), random);
    Coverage whole, changed;
    for (size_t i = 0; i < boxes.size(); ++i) {
      ASSERT_EQ(whole.Add(Slice("w", shape, boxes[i].first, boxes[i].second), "f"), std::nullopt);
    }
    ASSERT_EQ(whole.FirstProblem(), "") << "round " << round;
    const size_t victim = below(boxes.size());
    const int what = below(3);
    for (size_t i = 0; i < boxes.size(); ++i) {
      auto [offset, extent] = boxes[i];
      if (i == victim && what == 0) continue;
      if (i == victim && what == 1) {
        const int dim = below(rank);
        if (offset[dim] + extent[dim] < shape[dim]) {
          ++offset[dim];
        } else if (offset[dim] > 0) {
          --offset[dim];
        } else {
          --extent[dim];
        }
      }
      changed.Add(Slice("w", shape, offset, extent), "f");
      if (i == victim && what == 2) changed.Add(Slice("w", shape, offset, extent), "g");
    }
    // A tensor that was never named is not missed here: another rule says who must report it.
    if (changed.tensors() == 0) continue;
    ASSERT_NE(changed.FirstProblem(), "") << "round " << round;
  }
}

TEST(Coverage, ColumnsOfThousandsOfRanks_AreCompared) {
  Coverage coverage;
  constexpr int kRanks = 20000;
  for (int i = 0; i < kRanks; ++i) {
    coverage.Add(Slice("w", {64, kRanks}, {0, i}, {64, 1}), "f");
  }
  EXPECT_EQ(coverage.FirstProblem(), "");
}

TEST(Coverage, SlicesThatMeetEverywhere_AreGivenUp) {
  Coverage coverage;
  // In each dimension all boxes begin at few places.
  for (int i = 0; i < 40 * 40 * 40; ++i) {
    coverage.Add(Slice("w", {40, 40, 40}, {i / 1600, i / 40 % 40, i % 40}, {1, 1, 1}), "f");
  }
  EXPECT_THAT(coverage.FirstProblem(), HasSubstr("too many comparisons"));
}

}  // namespace
}  // namespace muster::coordinator
