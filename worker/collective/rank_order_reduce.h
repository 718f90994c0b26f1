#ifndef MUSTER_WORKER_COLLECTIVE_RANK_ORDER_REDUCE_H_
#define MUSTER_WORKER_COLLECTIVE_RANK_ORDER_REDUCE_H_

#include <vector>

#include "worker/collective/comm.h"

namespace muster {

// Returns the reduction of `inputs` from left to right as a new contiguous tensor, so that equal
// inputs give equal bits wherever it is computed. Requires at least one input; all have the same
// shape, dtype and device. Sums of bool are "any"; complex numbers are reduced by parts; half and
// bfloat16 are added, and divided for a mean, in float and rounded once, as by ReduceArrays.
at::Tensor ReduceInRankOrder(const std::vector<at::Tensor>& inputs, ReduceOp op);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_RANK_ORDER_REDUCE_H_
