#ifndef MUSTER_COORDINATOR_JOBS_ATTEMPT_OUTCOME_H_
#define MUSTER_COORDINATOR_JOBS_ATTEMPT_OUTCOME_H_

#include <string>
#include <vector>

#include "absl/time/time.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/node.pb.h"

namespace muster::coordinator {

// Determines how an attempt has ended from the ends of its parts, and what follows (docs/jobs.md,
// "What follows an end"). All functions are pure.

// The number of attempts in a row that nodes could not start after which the job fails.
inline constexpr int kMaxNodeFailures = 16;
// The delay before the attempt that follows one that a node could not start.
inline constexpr absl::Duration kNodeFailureDelay = absl::Seconds(5);
// An attempt that has run for this long ends the series of failures that lengthens the restart
// delay.
inline constexpr absl::Duration kSettled = absl::Minutes(10);
// A node that has run an attempt for this long was able to start it.
inline constexpr absl::Duration kStarted = absl::Minutes(1);

// Returns whether the end `end` of a part replaces `former` as the cause of the attempt's end
// (UNSPECIFIED: there is none yet). The first cause stays, except that
// - an echo (PEER_FAILED) is replaced by the failure it echoes, but never by the report of a runner
//   that it was stopped: otherwise the cause would be lost, and no restart counted;
// - a user error counts after another failure too, since no retry helps.
bool IsBetterCause(v1::EndClass former, v1::EndClass end);

// What a node's report of an end means.
struct ReportedEnd {
  v1::AttemptEnd end;
  // Something other than the coordinator ended the runner before the attempt had run for long.
  // Without a delay, a program that ends its own runner would start many times a second, and these
  // restarts are not counted.
  bool given_up_early = false;
};
// Interprets a node's report of an end. `end`: the end in the report, checked. `attempt`: the
// attempt before the report. `running`: the node has already reported that the attempt runs there.
// `counted`: the report repeats a failure for which a restart within the attempt was counted.
ReportedEnd Understand(const v1::AttemptReport& report, v1::AttemptEnd end,
                       const v1::JobAttempt& attempt, bool running, bool counted);

// Return when the attempt started on the reporting node, and when it ended there or lost the
// processes that the node asks to start again. Both are times of the coordinator's clock, which
// shows `now`; the node's clock contributes only durations. Neither is before the attempt was
// placed, nor in the future.
absl::Time StartedAt(const v1::AttemptReport& report, const v1::JobAttempt& attempt,
                     absl::Time now);
absl::Time EndedAt(const v1::AttemptReport& report, const v1::JobAttempt& attempt, absl::Time now);

// Returns whether max_restarts allows another restart.
bool HasRestartLeft(const v1::JobRecord& record);
// Returns the delay before the restart that follows attempt `last` of the history, after `restarts`
// counted ones. The delay doubles with each of the directly preceding failures whose attempts did
// not run for long.
absl::Duration RestartDelay(const v1::JobRecord& record, int last, int restarts);
// Returns the delay of the restart in place with which the current stretch of the attempt has
// begun. It is computed from the record, because a node may ask a coordinator that has started
// since.
absl::Duration DelayInPlace(const v1::JobRecord& record);
// Returns when a queued job may start if an earlier coordinator began its delay. Computed from the
// record; at most the whole delay from now on.
absl::Time DelayEnds(const v1::JobRecord& record, absl::Time now);

struct EndedAttempt {
  // The job, whose current attempt is over on all nodes.
  const v1::JobRecord& record;
  // The attempts directly before this one that nodes could not start.
  int node_failures = 0;
  bool given_up_early = false;                    // as in ReportedEnd
  std::vector<std::string> could_not_start = {};  // nodes, besides that of the attempt's end
  // Deliberate faults, see JobsMutants.
  bool retries_user_errors = false;
  bool forgets_class_limits = false;
  bool restarts_hangs_for_free = false;
};
struct AttemptOutcome {
  v1::EndClass end_class = v1::END_CLASS_UNSPECIFIED;
  v1::JobState state = v1::JOB_STATE_UNSPECIFIED;  // QUEUED: another attempt follows
  std::string why = "";                            // the reason for `state`
  // Set if `state` is QUEUED:
  absl::Duration delay = absl::ZeroDuration();
  bool counts_restart = false;          // against max_restarts
  bool counts_class = false;            // against the limit of its end class, if there is one
  std::vector<std::string> avoid = {};  // nodes to avoid
};
AttemptOutcome OutcomeOf(const EndedAttempt& ended);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_ATTEMPT_OUTCOME_H_
