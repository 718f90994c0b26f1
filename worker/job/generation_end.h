#ifndef MUSTER_WORKER_JOB_GENERATION_END_H_
#define MUSTER_WORKER_JOB_GENERATION_END_H_

#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/job/coordinator_client.h"

namespace muster {

// Waits until the generation in which `client` has a seat is over; returns the reason. A process
// that loses a connection notices the end earlier than the coordinator. Errors: DEADLINE_EXCEEDED
// if it still runs after `timeout`; errors of the coordinator that say that this process has no
// part in it.
absl::StatusOr<std::string> AwaitGenerationEnd(CoordinatorClient& client, absl::Duration timeout);

}  // namespace muster

#endif  // MUSTER_WORKER_JOB_GENERATION_END_H_
