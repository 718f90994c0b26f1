#ifndef MUSTER_WORKER_MODELS_FEW_ROWS_LINEAR_H_
#define MUSTER_WORKER_MODELS_FEW_ROWS_LINEAR_H_

#include "ATen/core/Tensor.h"
#include "worker/models/few_rows.h"

namespace muster::models {

// A linear layer on the few rows of a generation step. Its time is that of reading the weights
// once; MKL's matrix-vector product, which at::linear uses on a CPU, uses one thread for it and
// reads short rows at half of the memory's rate (bench/README.md, "Generation").

// Returns at::linear(x, weight, bias) for x [..., in], weight [out, in]. With at most kFewRows rows
// on a CPU, in float32 or bfloat16 and without gradients or autocast, uses a kernel that sums in
// float32, in an order that depends neither on the number of threads nor on the order of rows.
at::Tensor LinearOf(const at::Tensor& x, const at::Tensor& weight, const at::Tensor& bias);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_FEW_ROWS_LINEAR_H_
