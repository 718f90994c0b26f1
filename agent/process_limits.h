#ifndef MUSTER_AGENT_PROCESS_LIMITS_H_
#define MUSTER_AGENT_PROCESS_LIMITS_H_

#include "absl/status/status.h"

namespace muster::agent {

// Whether this process may have what the agent of a node with so many workers needs, with or
// without a coordinator beside it. Without descriptors or threads gRPC aborts, or waits for ever.
// Errors: RESOURCE_EXHAUSTED naming the limit.

// Open files. Raises the soft limit to the hard one.
absl::Status EnsureDescriptors(int workers);
// Threads and processes: tries whether there is room, which takes a millisecond. Limits of a user
// count what runs already, so no number tells; and threads need room for their stacks.
absl::Status EnsureThreads(int workers);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_PROCESS_LIMITS_H_
