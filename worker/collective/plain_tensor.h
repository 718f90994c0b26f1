#ifndef MUSTER_WORKER_COLLECTIVE_PLAIN_TENSOR_H_
#define MUSTER_WORKER_COLLECTIVE_PLAIN_TENSOR_H_

#include "ATen/core/Tensor.h"

namespace muster {

// `tensor` with its elements in memory one after the other and as they are, for code that sends
// their bytes: conj() and imag(conj()) are views of memory that reading has to conjugate or negate,
// and contiguous() keeps them so. Detached; the same memory where that is so already.
inline at::Tensor PlainTensor(const at::Tensor& tensor) {
  return tensor.detach().resolve_conj().resolve_neg().contiguous();
}

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_PLAIN_TENSOR_H_
