#include "worker/checkpoint/memory_ranges.h"

#include <algorithm>
#include <iterator>
#include <utility>

namespace muster {
namespace {

// Returns where the memory begins and ends; equal for a tensor without memory.
std::pair<uintptr_t, uintptr_t> RangeOf(const at::Tensor& tensor) {
  if (!tensor.defined() || tensor.layout() != at::kStrided || tensor.numel() == 0 ||
      tensor.storage().data() == nullptr) {
    return {0, 0};
  }
  int64_t last = 0;
  for (int64_t d = 0; d < tensor.dim(); ++d) last += (tensor.size(d) - 1) * tensor.stride(d);
  const auto begin = reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  return {begin, begin + static_cast<uintptr_t>(last + 1) * tensor.element_size()};
}

}  // namespace

bool MemoryRanges::Overlap(const at::Tensor& tensor) const {
  const auto [begin, end] = RangeOf(tensor);
  const auto after = ends_.lower_bound(end);
  return begin != end && after != ends_.begin() && std::prev(after)->second > begin;
}

void MemoryRanges::Add(const at::Tensor& tensor) {
  auto [begin, end] = RangeOf(tensor);
  if (begin == end) return;
  // Join the ranges that it overlaps or touches.
  auto after = ends_.upper_bound(end);
  while (after != ends_.begin() && std::prev(after)->second >= begin) {
    const auto joined = std::prev(after);
    begin = std::min(begin, joined->first);
    end = std::max(end, joined->second);
    after = ends_.erase(joined);
  }
  ends_.emplace(begin, end);
}

}  // namespace muster
