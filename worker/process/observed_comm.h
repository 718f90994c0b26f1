#ifndef MUSTER_WORKER_PROCESS_OBSERVED_COMM_H_
#define MUSTER_WORKER_PROCESS_OBSERVED_COMM_H_

#include <memory>

#include "worker/process/comm.h"
#include "worker/process/progress_board.h"

namespace muster {

// `inner`, each of whose collectives stands on `board` while it goes on. process_group() is
// inner's: what goes past the Comm is not seen.
std::unique_ptr<Comm> MakeObservedComm(std::unique_ptr<Comm> inner,
                                       std::shared_ptr<ProgressBoard> board);

}  // namespace muster

#endif  // MUSTER_WORKER_PROCESS_OBSERVED_COMM_H_
