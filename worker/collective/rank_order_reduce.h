#ifndef MUSTER_WORKER_COLLECTIVE_RANK_ORDER_REDUCE_H_
#define MUSTER_WORKER_COLLECTIVE_RANK_ORDER_REDUCE_H_

#include <vector>

#include "worker/collective/comm.h"

namespace muster {

// The reduction of `inputs` taken from left to right, so that equal inputs give equal bits wherever
// it is computed. A new contiguous tensor. Same shape, dtype and device everywhere, at least one
// input; sums of bool are "any", complex numbers are reduced by parts, and half and bfloat16 are
// added, and divided for a mean, in float and rounded once, as by ReduceArrays.
at::Tensor ReduceInRankOrder(const std::vector<at::Tensor>& inputs, ReduceOp op);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_RANK_ORDER_REDUCE_H_
