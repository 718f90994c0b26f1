#include "worker/train/tensor_ranges.h"

#include <atomic>
#include <utility>
#include <vector>

#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"
#include "worker/parallel/paged_storage.h"

namespace muster {
namespace {

// Expects that each tensor of `sizes` is in exactly one range; returns the number of ranges.
int ExpectCovered(const std::vector<int64_t>& sizes) {
  std::vector<at::Tensor> tensors;
  for (const int64_t size : sizes) tensors.push_back(at::zeros({size}));
  std::vector<std::atomic<int>> seen(sizes.size());
  std::atomic<int> ranges{0};
  ForTensorRanges(tensors, /*gradients=*/{}, [&](int64_t begin, int64_t end) {
    ++ranges;
    EXPECT_FALSE(at::GradMode::is_enabled());
    for (int64_t i = begin; i < end; ++i) ++seen[i];
  });
  for (const auto& count : seen) EXPECT_EQ(count, 1);
  return ranges;
}

TEST(ForTensorRanges, EveryTensor_IsInOneRange) {
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  EXPECT_EQ(ExpectCovered({}), 1);
  EXPECT_EQ(ExpectCovered({5}), 1);
  EXPECT_EQ(ExpectCovered({1 << 20, 7, 7}), 1);  // begins with a large tensor: not divided
  EXPECT_EQ(ExpectCovered(std::vector<int64_t>(30, 64)), 1);  // short
  EXPECT_EQ(ExpectCovered(std::vector<int64_t>(30, 8192)), 3);
  EXPECT_LE(ExpectCovered({30000, 30000, 30000, 30000, 30000, 1, 1}), 3);
  EXPECT_LE(ExpectCovered({1, 1, 30000, 30000, 30000, 30000, 30000}), 3);
  at::set_num_threads(1);
  EXPECT_EQ(ExpectCovered(std::vector<int64_t>(30, 8192)), 1);
  at::set_num_threads(threads);
}

TEST(ForTensorRanges, Gradients_OfOnePageAreInOneRange) {
  class Present : public Page {
    void Require(bool, const char*) override {}
  };
  Present page;
  const at::Tensor first = at::zeros({8}), second = at::zeros({8});
  const PageRegistration registered_first(first, &page), registered_second(second, &page);
  const std::vector<at::Tensor> gradients = {PagedView(first, {4}, {1}, 0),
                                             PagedView(first, {4}, {1}, 4),
                                             PagedView(second, {8}, {1}, 0), at::zeros({4})};
  const std::vector<at::Tensor> tensors = {at::zeros({4}), at::zeros({4}), at::zeros({8}),
                                           at::zeros({4})};
  std::vector<std::pair<int64_t, int64_t>> ranges;
  ForTensorRanges(tensors, gradients,
                  [&](int64_t begin, int64_t end) { ranges.emplace_back(begin, end); });
  EXPECT_EQ(ranges, (std::vector<std::pair<int64_t, int64_t>>{{0, 2}, {2, 3}, {3, 4}}));
}

TEST(OneThread, Scope_RestoresTheThreads) {
  const int threads = at::get_num_threads();
  at::set_num_threads(3);
  {
    OneThread one_thread;
    EXPECT_EQ(at::get_num_threads(), 1);
  }
  EXPECT_EQ(at::get_num_threads(), 3);
  at::set_num_threads(threads);
}

}  // namespace
}  // namespace muster
