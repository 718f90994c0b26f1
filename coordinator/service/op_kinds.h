#ifndef MUSTER_COORDINATOR_SERVICE_OP_KINDS_H_
#define MUSTER_COORDINATOR_SERVICE_OP_KINDS_H_

#include <cstddef>

#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// The facts about an operation that the service needs before the core sees it.

// Returns whether `op` changes nothing, whatever its fields are.
bool OnlyReads(const v1::Op& op);
// Returns whether `op`, if answered without an error, may have changed something that lasts.
bool MayChange(const v1::Op& op);
// Returns whether the answer may wait for another caller's operation.
bool MayBeHeld(const v1::Op& op);
// Returns how many bytes `op` counts for while it waits, if its message has `bytes`.
size_t HeldBytes(const v1::Op& op, size_t bytes);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_OP_KINDS_H_
