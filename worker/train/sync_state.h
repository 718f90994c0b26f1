#ifndef MUSTER_WORKER_TRAIN_SYNC_STATE_H_
#define MUSTER_WORKER_TRAIN_SYNC_STATE_H_

#include "worker/collective/comm.h"
#include "worker/train/optimizer_handle.h"
#include "worker/train/plain_state.h"

namespace muster {

// Returns the state of rank `root` on every rank. A collective.
PlainState BroadcastPlainState(Comm& comm, const PlainState& state, int root);

// Replaces the state of `optimizer` on every rank by that of rank `root`: tensors (also those that
// a rank does not have yet) and hyper-parameters. The optimizers must be of one kind over the same
// parameters. A collective.
void BroadcastOptimizerState(Comm& comm, OptimizerHandle& optimizer, int root);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_SYNC_STATE_H_
