#ifndef MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_
#define MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "client/jobs/job_client.h"
#include "client/jobs/job_types.h"

namespace muster::client {

// Client::follow_log and its like, from calls that watch a job and read its log. `watch` blocks
// until its argument returns false or the job has ended; `read` may wait for the first byte.
// Returns their errors.
absl::Status FollowLog(
    LogOptions options,
    const std::function<absl::StatusOr<Job>(const std::function<bool(const Job&)>&)>& watch,
    const std::function<absl::StatusOr<LogChunk>(const LogOptions&)>& read,
    const std::function<bool(const LogChunk&)>& chunk);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_
