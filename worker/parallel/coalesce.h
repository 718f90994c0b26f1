#ifndef MUSTER_WORKER_PARALLEL_COALESCE_H_
#define MUSTER_WORKER_PARALLEL_COALESCE_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"

namespace muster {

// One collective for each device and dtype among many tensors, instead of one for each tensor.
// Collectives: every rank calls them with tensors of the same shapes and dtypes in the same order.
// Tensors are changed in place. kMean averages integers by dividing the sum and truncating.
void AllReduceCoalesced(Comm& comm, const std::vector<at::Tensor>& tensors, ReduceOp op);
void BroadcastCoalesced(Comm& comm, const std::vector<at::Tensor>& tensors, int root);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_COALESCE_H_
