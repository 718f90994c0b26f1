#ifndef MUSTER_WORKER_CHECKPOINT_MEMORY_RANGES_H_
#define MUSTER_WORKER_CHECKPOINT_MEMORY_RANGES_H_

#include <cstdint>
#include <map>

#include "ATen/core/Tensor.h"

namespace muster {

// The memory of tensors that several threads read or write, in no order. A copy whose tensors
// overlap it has to wait for them: of two values for one place the later one wins, as with copy_().
// Not thread-safe.
class MemoryRanges {
 public:
  // Whether the tensor has memory in common with one that was added. From its first element to its
  // last one: gaps between its rows count as its own. False for a tensor without memory.
  bool Overlap(const at::Tensor& tensor) const;
  void Add(const at::Tensor& tensor);
  void Clear() { ends_.clear(); }

 private:
  std::map<uintptr_t, uintptr_t> ends_;  // of disjoint ranges, by where they begin
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MEMORY_RANGES_H_
