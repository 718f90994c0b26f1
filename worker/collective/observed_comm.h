#ifndef MUSTER_WORKER_COLLECTIVE_OBSERVED_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_OBSERVED_COMM_H_

#include <memory>

#include "worker/collective/collective_error.h"
#include "worker/collective/comm.h"
#include "worker/collective/progress_board.h"

namespace muster {

// Wraps `inner` and shows each of its collectives on `board` while it runs. process_group() is
// inner's: code that uses it, such as the gradient exchange, reports to board() itself. A
// collective that is lost (a peer that did not arrive in time, a connection that broke) throws a
// c10::DistBackendError with the text of `explain`.
std::unique_ptr<Comm> MakeObservedComm(std::unique_ptr<Comm> inner,
                                       std::shared_ptr<ProgressBoard> board,
                                       CollectiveExplainer explain = nullptr);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_OBSERVED_COMM_H_
