#ifndef MUSTER_COORDINATOR_JOBS_ATTEMPT_OUTCOME_H_
#define MUSTER_COORDINATOR_JOBS_ATTEMPT_OUTCOME_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/node.pb.h"

namespace muster::coordinator {

// What the ends of an attempt's parts make of it, and what follows (docs/jobs.md, "What follows an
// end"). All functions are pure.

// Attempts in a row that nodes could not start, until the job fails.
inline constexpr int kMaxNodeFailures = 16;
// Before the attempt after one that a node could not start.
inline constexpr absl::Duration kNodeFailureDelay = absl::Seconds(5);
// The restart after an attempt that has run for so long has nothing to do with the failures before.
inline constexpr absl::Duration kSettled = absl::Minutes(10);
// A node that has run an attempt for so long was able to start it.
inline constexpr absl::Duration kStarted = absl::Minutes(1);

// Whether the end of a part is what its attempt has ended by, in place of the former one
// (UNSPECIFIED: none so far). The first cause stays, except that
// - an echo (PEER_FAILED) gives way to what it is an echo of, and never to the word of a runner
//   that it was stopped: nobody else would have the cause then, and no restart be counted;
// - a user error counts after another failure too, since no retry helps.
bool IsBetterCause(v1::EndClass former, v1::EndClass end);

// What a node's report of an end means.
struct ReportedEnd {
  v1::AttemptEnd end;
  // The runner was ended by something else than the coordinator, before the attempt had run for
  // long. Without a pause, a program that ends its own runner would start again and again, many
  // times a second, and nothing counts that.
  bool given_up_early = false;
};
// `end`: of the report, checked. `attempt`: before it. `running`: the node has said before that it
// runs there. `counted`: the report is of a failure after which the attempt was to go on.
ReportedEnd Understand(const v1::AttemptReport& report, v1::AttemptEnd end,
                       const v1::JobAttempt& attempt, bool running, bool counted);

// When the attempt started on the node of the report, and when it ended there, or lost what it asks
// to start again: by the coordinator's clock, which is `now`. The node's clock says only how long
// it ran. Neither is before the attempt was placed, nor in the future.
absl::Time StartedAt(const v1::AttemptReport& report, const v1::JobAttempt& attempt,
                     absl::Time now);
absl::Time EndedAt(const v1::AttemptReport& report, const v1::JobAttempt& attempt, absl::Time now);

// Whether max_restarts leaves one more.
bool HasRestartLeft(const v1::JobRecord& record);
// The delay before the restart that follows attempt `last` of the history, after `restarts` that
// counted. It is doubled once for each of the failures right before, which did not let an attempt
// run for long.
absl::Duration RestartDelay(const v1::JobRecord& record, int last, int restarts);
// Of the restart in place with which the current stretch of the attempt has begun. A node may ask
// for it from a coordinator that was started since, so it follows from the record.
absl::Duration DelayInPlace(const v1::JobRecord& record);
// When a queued job may start, of which a former coordinator has begun the delay: it follows from
// the record, and is no longer than the whole delay from now on.
absl::Time DelayEnds(const v1::JobRecord& record, absl::Time now);

struct EndedAttempt {
  // Its current attempt is over on all nodes.
  const v1::JobRecord& record;
  // Attempts right before this one that nodes could not start.
  int node_failures = 0;
  bool given_up_early = false;                    // as ReportedEnd
  std::vector<std::string> could_not_start = {};  // nodes, beside that of its end
  // Mutants.
  bool retries_user_errors = false;
  bool forgets_class_limits = false;
  bool restarts_hangs_for_free = false;
};
struct AttemptOutcome {
  v1::EndClass end_class = v1::END_CLASS_UNSPECIFIED;
  v1::JobState state = v1::JOB_STATE_UNSPECIFIED;  // QUEUED: another attempt follows
  std::string why = "";                            // of the state
  // With QUEUED:
  absl::Duration delay = absl::ZeroDuration();
  bool counts_restart = false;  // against max_restarts
  bool counts_class = false;    // against the limit of the class of its end, if there is one
  std::vector<std::string> avoid = {};  // nodes
};
AttemptOutcome OutcomeOf(const EndedAttempt& ended);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_ATTEMPT_OUTCOME_H_
