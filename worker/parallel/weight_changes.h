#ifndef MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_
#define MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_

#include <atomic>
#include <cstdint>
#include <unordered_map>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster {

// Counts how often Muster's own code has changed certain weights. Versions of tensors do not show
// it: LibTorch's fused kernels and `.data()` leave them alone. The functions below may be called in
// any thread. A tensor with the storage of a weight (a view, detach(), data()) counts as that
// weight; one that has its memory only by address (from_blob()) does not. The weights must outlive
// the watch.
class WeightWatch {
 public:
  explicit WeightWatch(const std::vector<at::Tensor>& weights);
  ~WeightWatch();
  WeightWatch(const WeightWatch&) = delete;
  WeightWatch& operator=(const WeightWatch&) = delete;

  // A count since construction, which increases when this weight, or a tensor with the same
  // storage, has been changed.
  uint64_t changes(const at::Tensor& weight) const;

 private:
  friend void NoteWeightChange();
  friend void NoteWeightChange(const std::vector<at::Tensor>& weights);

  std::unordered_map<const void*, std::atomic<uint64_t>> changes_;  // by their StorageImpl
};

// Call it when any weights of the process may have been changed. Inside an autocast scope that
// began earlier, LibTorch would otherwise continue to use its low-precision copies of the old ones.
void NoteWeightChange();
// The same if only these weights may have been changed.
void NoteWeightChange(const std::vector<at::Tensor>& weights);
// The same after an optimizer's step on these weights. It increases their versions, so that
// LibTorch throws if a backward pass comes to a graph with the old values ("modified by an inplace
// operation").
void NoteStep(const std::vector<at::Tensor>& weights);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_WEIGHT_CHANGES_H_
