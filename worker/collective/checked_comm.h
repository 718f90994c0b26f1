#ifndef MUSTER_WORKER_COLLECTIVE_CHECKED_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_CHECKED_COMM_H_

#include <memory>

#include "worker/collective/comm.h"

namespace muster {

// Wraps `inner` for debug mode (MUSTER_DEBUG=1): before each collective all ranks exchange the
// operation, its sequence number, shape, dtype and call site (see call_site.h). If any of them
// except the call site differs, every rank throws the same c10::Error, which groups the ranks by
// what they called and from which line, and nothing is sent. A call site that differs while all
// else agrees is legal (rank 0 may gather from another branch) and logged once as a warning.
//
// Costs one more round per collective. process_group() is inner's: calls that bypass the Comm are
// not checked.
std::unique_ptr<Comm> MakeCheckedComm(std::unique_ptr<Comm> inner);

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_CHECKED_COMM_H_
