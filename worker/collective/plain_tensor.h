#ifndef MUSTER_WORKER_COLLECTIVE_PLAIN_TENSOR_H_
#define MUSTER_WORKER_COLLECTIVE_PLAIN_TENSOR_H_

#include "ATen/core/Tensor.h"

namespace muster {

// Returns `tensor` with its elements contiguous in memory and with their plain values, for code
// that sends their bytes. conj() and imag(conj()) return views whose memory has to be conjugated or
// negated when it is read, and contiguous() does not change that. Detached; shares memory if
// nothing has to be converted.
inline at::Tensor PlainTensor(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_PLAIN_TENSOR_H_
