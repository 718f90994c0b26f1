#ifndef MUSTER_WORKER_CHECKPOINT_MEMORY_RANGES_H_
#define MUSTER_WORKER_CHECKPOINT_MEMORY_RANGES_H_

#include <cstdint>
#include <map>

#include "ATen/core/Tensor.h"

namespace muster {

// The memory of tensors that several threads read or write, in no order. A copy whose tensors
// overlap it has to wait for them, because the later of two values for one place must win, as with
// copy_(). Not thread-safe.
class MemoryRanges {
 public:
  // Whether the tensor shares memory with one that was added. A tensor's memory reaches from its
  // first to its last element, including gaps between its rows. False for a tensor without memory.
  bool Overlap(const at::Tensor& tensor) const;
  void Add(const at::Tensor& tensor);
  void Clear() { ends_.clear(); }

 private:
  std::map<uintptr_t, uintptr_t> ends_;  // ends of disjoint ranges, by their beginnings
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MEMORY_RANGES_H_
