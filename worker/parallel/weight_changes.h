#ifndef MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_
#define MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster {

// Counts how often Muster's own code has changed certain weights. Versions of tensors do not tell:
// LibTorch's fused kernels and `.data()` leave them alone. The functions below may be called in any
// thread. A tensor with the storage of a weight (a view, detach(), data()) counts as that weight,
// one that has its memory by address alone (from_blob()) does not. The weights outlive the watch.
class WeightWatch {
 public:
  explicit WeightWatch(const std::vector<at::Tensor>& weights);
  ~WeightWatch();
  WeightWatch(const WeightWatch&) = delete;
  WeightWatch& operator=(const WeightWatch&) = delete;

  // Since construction. Another number once this weight has been changed, or one that has the same
  // storage.
  uint64_t changes(const at::Tensor& weight) const;

 private:
  friend void NoteWeightChange();
  friend void NoteWeightChange(const std::vector<at::Tensor>& weights);

  std::unordered_map<const void*, std::atomic<uint64_t>> changes_;  // by their StorageImpl
};

// To be called when any weights of the process may have been changed. Inside an autocast scope that
// began earlier, LibTorch would continue to use its low-precision copies of the old ones.
void NoteWeightChange();
// The same when no others than these may have been.
void NoteWeightChange(const std::vector<at::Tensor>& weights);
// The same after an optimizer's step on these, which their versions then show: LibTorch throws
// where a backward pass comes to a graph that has the values before ("modified by an inplace
// operation").
void NoteStep(const std::vector<at::Tensor>& weights);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_
