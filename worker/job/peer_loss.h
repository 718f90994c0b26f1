#ifndef MUSTER_WORKER_JOB_PEER_LOSS_H_
#define MUSTER_WORKER_JOB_PEER_LOSS_H_

#include "absl/status/status.h"

namespace muster {

// Whether `error` of this process may only be a consequence of another one's end: a collective that
// was lost, or a call that the coordinator refuses because the generation is over. Pure.
bool IsLossOfPeer(const absl::Status& error);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_PEER_LOSS_H_
