#ifndef MUSTER_WORKER_COLLECTIVE_ORDERED_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_ORDERED_COMM_H_

#include <memory>

#include "worker/collective/comm.h"
#include "worker/collective/comm_thread.h"

namespace muster {

// `inner`, whose collectives also run on `thread`: one that another thread calls waits until all
// that was submitted before is done, and then runs in its caller's thread. So the collectives of
// both are one sequence, in the order of the program. Throws the error of submitted work that
// nobody has seen yet. process_group() is inner's: calls that bypass the Comm must Drain() first.
std::unique_ptr<Comm> MakeOrderedComm(std::unique_ptr<Comm> inner,
                                      std::shared_ptr<CommThread> thread);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_ORDERED_COMM_H_
