#include "worker/bigmodel/arena.h"

#include <algorithm>

namespace muster {

std::optional<uint64_t> Arena::Take(uint64_t bytes) {
  if (bytes > bytes_) return std::nullopt;
  const uint64_t size = std::max((bytes + kUnit - 1) / kUnit, uint64_t{1}) * kUnit;
  uint64_t gap = 0;
  for (const auto& [offset, taken] : blocks_) {
    if (offset - gap >= size) break;
    gap = offset + taken;
  }
  if (gap > bytes_ || bytes_ - gap < size) return std::nullopt;
  blocks_.emplace(gap, size);
  taken_ += size;
  return gap;
}

void Arena::Give(uint64_t offset) {
  const auto block = blocks_.find(offset);
  if (block == blocks_.end()) return;
  taken_ -= block->second;
  blocks_.erase(block);
}

}  // namespace muster
