#ifndef MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_
#define MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_

#include <functional>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "client/jobs/job_client.h"
#include "client/jobs/job_types.h"

namespace muster::client {

// What FollowLog reads a job and its log with.
struct LogSource {
  // Blocks until its argument returns false or the job has ended. Calls it with the job as it is.
  std::function<absl::StatusOr<Job>(const std::function<bool(const Job&)>&)> watch;
  // May wait for the first byte.
  std::function<absl::StatusOr<LogChunk>(const LogOptions&)> read;
  // How long calls may fail, one after the other, with UNAVAILABLE or DEADLINE_EXCEEDED.
  absl::Duration patience;
  // Waits so long before the next of them; false: the caller gives up.
  std::function<bool(absl::Duration)> pause;
};

// The number of the last attempt that has begun; 0: none has. For coordinators of the version
// before, whose job.attempts runs ahead after a restore from a copy.
int LastBegun(const Job& job);

// Client::follow_log and its like. A node that is away is waited for while the attempt runs there;
// if the attempt is over, its log goes on with the next one. Returns the errors of the calls.
absl::Status FollowLog(LogOptions options, const LogSource& source,
                       const std::function<bool(const LogChunk&)>& chunk);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_JOBS_FOLLOW_LOG_H_
