#ifndef MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_
#define MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/jobs/job_client.h"
#include "client/jobs/job_types.h"

namespace muster::client {

// The functions with which FollowLog reads a job and its log.
struct LogSource {
  // Calls its argument with the job as it is; blocks until the argument returns false or the job
  // has ended.
  std::function<absl::StatusOr<Job>(const std::function<bool(const Job&)>&)> watch;
  // May wait for the first byte.
  std::function<absl::StatusOr<LogChunk>(const LogOptions&)> read;
  // How long consecutive calls may fail with UNAVAILABLE or DEADLINE_EXCEEDED.
  absl::Duration patience;
  // Waits this long before the next call; returns false if the caller gives up.
  std::function<bool(absl::Duration)> pause;
};

// Returns the number of the last attempt that has begun; 0: none has. For coordinators of the
// previous version, whose job.attempts runs ahead after a restore from a copy.
int LastBegun(const Job& job);

// Implements Client::follow_log and its counterparts. While an attempt runs on a node that is away,
// waits for the node; if the attempt is over, continues with the log of the next one. Returns the
// errors of the calls.
absl::Status FollowLog(LogOptions options, const LogSource& source,
                       const std::function<bool(const LogChunk&)>& chunk);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_
