#ifndef MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_
#define MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_

#include <atomic>
#include <cstdint>
#include <unordered_set>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster {

// Counts how often Muster's own code has changed certain weights. Versions of tensors do not tell:
// LibTorch's fused kernels of optimizers leave them alone. The functions below may be called in any
// thread. A tensor with the storage of a weight (a view, detach(), data()) counts as that weight,
// one that has its memory by address alone (from_blob()) does not. The weights outlive the watch.
class WeightWatch {
 public:
  explicit WeightWatch(const std::vector<at::Tensor>& weights);
  ~WeightWatch();
  WeightWatch(const WeightWatch&) = delete;
  WeightWatch& operator=(const WeightWatch&) = delete;

  // Since construction. Another number once one of the weights has been changed.
  uint64_t changes() const { return changes_; }

 private:
  friend void NoteWeightChange();
  friend void NoteWeightChange(const std::vector<at::Tensor>& weights);

  const std::unordered_set<const void*> memory_;  // their StorageImpl
  std::atomic<uint64_t> changes_{0};
};

// To be called when any weights of the process may have been changed. Inside an autocast scope that
// began earlier, LibTorch would continue to use its low-precision copies of the old ones.
void NoteWeightChange();
// The same when no others than these may have been.
void NoteWeightChange(const std::vector<at::Tensor>& weights);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_
