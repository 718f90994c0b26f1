#ifndef MUSTER_COORDINATOR_ANSWER_H_
#define MUSTER_COORDINATOR_ANSWER_H_

#include <cstdint>

#include "rpc/session/answer.h"

namespace muster::coordinator {

// The server's name for one call that the core may hold open. Never reused while the process lives.
using CallId = uint64_t;

// An answer of the core.
using rpc::Answer;

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_ANSWER_H_
