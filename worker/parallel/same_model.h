#ifndef MUSTER_WORKER_PARALLEL_SAME_MODEL_H_
#define MUSTER_WORKER_PARALLEL_SAME_MODEL_H_

#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"

namespace muster {

// (collective) Throws the same c10::Error on every rank, naming rank and parameter, if their models
// differ in count, name, shape, dtype, requires_grad or layout of gradients. One name and one mark
// in `sparse` for each parameter.
void VerifySameModel(Comm& comm, const std::vector<at::Tensor>& parameters,
                     const std::vector<std::string>& names, const std::vector<bool>& sparse);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SAME_MODEL_H_
