#ifndef MUSTER_WORKER_COLLECTIVE_ORDERED_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_ORDERED_COMM_H_

#include <memory>

#include "worker/collective/comm.h"
#include "worker/collective/comm_queue.h"

namespace muster {

// Wraps `inner`, whose collectives also run on `queue`: a collective called outside the queue's
// bodies comes after everything that was submitted before, and runs in its caller's thread, on its
// stream. So the collectives of both are one sequence, in the order of the program. Throws an error
// of submitted work that was not thrown yet. process_group() is inner's: calls that bypass the Comm
// must Drain() first.
std::unique_ptr<Comm> MakeOrderedComm(std::unique_ptr<Comm> inner,
                                      std::shared_ptr<CommQueue> queue);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_ORDERED_COMM_H_
