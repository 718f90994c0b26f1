#include "client/jobs/follow_log.h"

#include "base/status_macros.h"

namespace muster::client {

absl::Status FollowLog(
    LogOptions options,
    const std::function<absl::StatusOr<Job>(const std::function<bool(const Job&)>&)>& watch,
    const std::function<absl::StatusOr<LogChunk>(const LogOptions&)>& read,
    const std::function<bool(const LogChunk&)>& chunk) {
  const bool one_attempt = options.attempt != 0;
  if (!one_attempt) {
    // A job that waits for its first attempt has no log yet.
    MUSTER_ASSIGN_OR_RETURN(const Job begun,
                            watch([](const Job& now) { return now.attempts == 0; }));
    if (begun.attempts == 0) return absl::OkStatus();
    options.attempt = begun.attempts;
  }
  while (true) {
    MUSTER_ASSIGN_OR_RETURN(const LogChunk part, read(options));
    if (!part.data.empty() && !chunk(part)) return absl::OkStatus();
    options.offset = part.next_offset;
    options.since = absl::InfiniteDuration();
    if (!part.ended) continue;
    if (one_attempt) return absl::OkStatus();
    const int last = options.attempt;
    MUSTER_ASSIGN_OR_RETURN(const Job next,
                            watch([last](const Job& now) { return now.attempts <= last; }));
    if (next.attempts <= last) return absl::OkStatus();
    options.attempt = last + 1;
    options.offset = 0;
  }
}

}  // namespace muster::client
