#ifndef MUSTER_WORKER_BIGMODEL_DIVIDED_MODEL_H_
#define MUSTER_WORKER_BIGMODEL_DIVIDED_MODEL_H_

#include <cstdint>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster {

// A model whose weights are on several GPUs. It runs unchanged, although modules of LibTorch do not
// move their inputs, because operators do, one level below. Weights carry a dispatch key above
// autograd, and so does every result of an operator that took a tensor with the key, so that its
// boxed fallback sees all operators of a pass, also a residual sum without weights. If the tensors
// of an operator are on several GPUs, it runs
//   - else where its largest weight is;
//   - else where the weight was that the thread used last, if one of the tensors is there: hidden
//     states move along with the weights, and a residual sum does not move them back;
//   - else where the largest tensor is.
// The other tensors are copied there first, above autograd: gradients flow back through the copy.
// Tensors on the host and tensors that only give a view stay where they are, and so do the lists of
// operators that take one tensor of each list at a time (_foreach_). Two GPUs' current streams are
// ordered by LibTorch's own copy; the host waits for nothing.
//
// A tensor that several operators take on another GPU, a mask or a hidden state, is copied once for
// all of them until the thread moves to the weights of another GPU, or uses a weight again, so each
// pass copies it again. Operators that write it in between are noticed by its version; writes that
// do not change the version are not (data_ptr(), .data(), .variable_data(), a replayed graph). If
// it was created under c10::InferenceMode, or if gradients flow through it, each operator copies
// it. At most kSharedCopies and kSharedCopyBytes are kept.
//
// An operator with such a tensor costs a microsecond or two more. Others, and models on one device,
// pay nothing. Thread-safe.
class DividedModel {
 public:
  // Registers the fallback. This is the only step of the constructor that can fail for another
  // reason than a lack of memory: call it before changes that cannot be undone.
  static void Register();

  // `parameters`, `buffers`: the tensors of a module on the devices where operators find them.
  // Those without memory of their own (sparse ones) move, and do not count as weights.
  DividedModel(const std::vector<at::Tensor>& parameters, const std::vector<at::Tensor>& buffers);
  // Frees the shared copies. The model's tensors, and results of operators on them, still move.
  ~DividedModel();
  DividedModel(const DividedModel&) = delete;
  DividedModel& operator=(const DividedModel&) = delete;

 private:
  DividedModel();

  std::vector<const void*> storages_;
};

constexpr size_t kSharedCopies = 32;
constexpr uint64_t kSharedCopyBytes = uint64_t{256} << 20;

// Whether operators that take `tensor` bring their tensors to one device.
bool MovesOperators(const at::Tensor& tensor);

// Counts since the process began.
struct DeviceCrossings {
  uint64_t copies = 0;
  uint64_t copied_bytes = 0;
  uint64_t shared = 0;  // copies that were there already
};
DeviceCrossings CrossingsSoFar();

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_DIVIDED_MODEL_H_
