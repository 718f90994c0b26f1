#ifndef MUSTER_WORKER_TRAIN_SLOT_LAYOUT_H_
#define MUSTER_WORKER_TRAIN_SLOT_LAYOUT_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "ATen/ops/zeros_like.h"

namespace muster {

// LibTorch's fused kernels walk over a parameter, its gradient and its state by one index into
// memory, whatever their strides. So all of them must be dense and have the same layout.

// Whether one index finds the same element in both tensors, which have the same shape.
inline bool SameLayout(const at::Tensor& a, const at::Tensor& b) {
  if (a.strides() == b.strides()) return true;
  for (int64_t d = 0; d < a.dim(); ++d) {
    if (a.size(d) > 1 && a.stride(d) != b.stride(d)) return false;
  }
  return true;
}

// Whether a fused kernel can take this parameter.
inline bool IsDense(const at::Tensor& parameter) {
  return parameter.layout() == at::kStrided && parameter.is_non_overlapping_and_dense();
}

// Whether `slot`, a tensor of state, can be passed to a kernel with the dense `parameter`.
inline bool Fits(const at::Tensor& slot, const at::Tensor& parameter) {
  return slot.defined() && slot.scalar_type() == parameter.scalar_type() &&
         slot.device() == parameter.device() && SameLayout(slot, parameter);
}

// Returns the values of `slot` (zeros, if it is undefined) as a tensor that fits: a parameter may
// have moved to another device, dtype or memory format since its last step.
inline at::Tensor Refit(const at::Tensor& slot, const at::Tensor& parameter) {
  at::Tensor fitting = at::zeros_like(parameter).detach();
  if (slot.defined()) fitting.copy_(slot);
  return fitting;
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_SLOT_LAYOUT_H_
