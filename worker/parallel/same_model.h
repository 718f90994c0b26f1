#ifndef MUSTER_WORKER_PARALLEL_SAME_MODEL_H_
#define MUSTER_WORKER_PARALLEL_SAME_MODEL_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"

namespace muster {

// (collective) Throws the same c10::Error on every rank, naming rank and parameter, if their models
// differ in count, name, shape, dtype, requires_grad, layout of gradients or, for dense gradients,
// in GradientStrides() of a dimension larger than 1. `names` and `sparse` have one entry for each
// parameter. `frozen_too`: the strides of parameters that require no gradient count as well, since
// the ranks exchange their values by place in memory.
void VerifySameModel(Comm& comm, const std::vector<at::Tensor>& parameters,
                     const std::vector<std::string>& names, const std::vector<bool>& sparse,
                     bool frozen_too);

// Returns the strides of a strided parameter's gradient in what the ranks exchange, element by
// element of memory: its own or, if it has holes, contiguous ones.
std::vector<int64_t> GradientStrides(const at::Tensor& parameter);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SAME_MODEL_H_
