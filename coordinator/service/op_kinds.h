#ifndef MUSTER_COORDINATOR_SERVICE_OP_KINDS_H_
#define MUSTER_COORDINATOR_SERVICE_OP_KINDS_H_

#include <cstddef>

#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// What the service must know of an operation before the core sees it.

// It changes nothing, whatever its fields are.
bool OnlyReads(const v1::Op& op);
// If it is answered without an error, it may have changed something that lasts.
bool MayChange(const v1::Op& op);
// Its answer may wait for another caller's operation.
bool MayBeHeld(const v1::Op& op);
// How many bytes it counts for while it waits, if its message has `bytes`.
size_t HeldBytes(const v1::Op& op, size_t bytes);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_OP_KINDS_H_
