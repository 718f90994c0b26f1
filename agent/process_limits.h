#ifndef MUSTER_AGENT_PROCESS_LIMITS_H_
#define MUSTER_AGENT_PROCESS_LIMITS_H_

#include "absl/status/status.h"

namespace muster::agent {

// Checks the limits of this process against the needs of an agent with this many workers, with or
// without an embedded coordinator. Without descriptors or threads gRPC aborts, or waits forever.
// Errors: RESOURCE_EXHAUSTED naming the limit.

// Checks open files. Raises the soft limit to the hard one.
absl::Status EnsureDescriptors(int workers);
// Checks threads and processes: tries whether there is room, which takes a millisecond. A user's
// limits include processes that already run, so the numbers alone do not decide; and threads need
// address space for their stacks.
absl::Status EnsureThreads(int workers);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_PROCESS_LIMITS_H_
