#include "coordinator/jobs/attempt_outcome.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "proto/failure_policy.h"
#include "proto/job_limits.h"

namespace muster::coordinator {
namespace {

const v1::JobAttempt& Last(const v1::JobRecord& record) {
  return record.history(record.history_size() - 1);
}

// Returns `at`, limited to the time from the placement of the attempt to `now`.
absl::Time Within(absl::Time at, const v1::JobAttempt& attempt, absl::Time now) {
  return std::min(std::max(at, absl::FromUnixMillis(attempt.times().placed_unix_ms())), now);
}

// Returns whether only an order of the coordinator explains such an end. A runner that ended this
// way has no cause to report.
bool IsOrdered(v1::EndClass end_class) {
  switch (end_class) {
    case v1::END_CLASS_CANCELLED:
    case v1::END_CLASS_SUSPENDED:
    case v1::END_CLASS_PREEMPTED:
    case v1::END_CLASS_RESIZED:
    case v1::END_CLASS_TIME_LIMIT:
      return true;
    default:
      return false;
  }
}

}  // namespace

bool IsBetterCause(v1::EndClass former, v1::EndClass end) {
  if (end == v1::END_CLASS_UNSPECIFIED || end == v1::END_CLASS_SUCCEEDED) return false;
  if (former == v1::END_CLASS_UNSPECIFIED) return true;
  if (end == v1::END_CLASS_USER_ERROR) return CountsAsRestart(former);
  return former == v1::END_CLASS_PEER_FAILED && end != v1::END_CLASS_PEER_FAILED && !IsOrdered(end);
}

ReportedEnd Understand(const v1::AttemptReport& report, v1::AttemptEnd end,
                       const v1::JobAttempt& attempt, bool running, bool counted) {
  ReportedEnd reported{.end = std::move(end)};
  if (counted) {
    const std::string node = reported.end.node();
    reported.end = v1::AttemptEnd();
    reported.end.set_end_class(v1::END_CLASS_CANCELLED);
    reported.end.set_why(absl::StrCat("its runner was stopped when restart ", report.restart(),
                                      " within the attempt was about to begin"));
    reported.end.set_node(node);
    reported.end.set_rank(-1);
  }
  const bool ran = running && FromProto(report.ran_for()) >= kStarted;
  // CANCELLED without an order: something else stopped the runner, for example a shutdown of the
  // machine. NODE_FAILED after it ran: the node was able to start the attempt.
  if ((reported.end.end_class() == v1::END_CLASS_CANCELLED && !attempt.stop()) ||
      (reported.end.end_class() == v1::END_CLASS_NODE_FAILED && ran)) {
    reported.end.set_end_class(v1::END_CLASS_NODE_LOST);
    reported.given_up_early = !ran && !counted;
  }
  return reported;
}

absl::Time StartedAt(const v1::AttemptReport& report, const v1::JobAttempt& attempt,
                     absl::Time now) {
  return Within(now - FromProto(report.ran_for()), attempt, now);
}

absl::Time EndedAt(const v1::AttemptReport& report, const v1::JobAttempt& attempt, absl::Time now) {
  // An attempt that never started has no duration.
  if (report.started_unix_ms() == 0 || report.ended_unix_ms() == 0) return now;
  const absl::Duration ran =
      absl::FromUnixMillis(report.ended_unix_ms()) - absl::FromUnixMillis(report.started_unix_ms());
  return Within(now - FromProto(report.ran_for()) + std::max(ran, absl::ZeroDuration()), attempt,
                now);
}

bool HasRestartLeft(const v1::JobRecord& record) {
  return record.restarts() < record.spec().max_restarts();
}

absl::Duration RestartDelay(const v1::JobRecord& record, int last, int restarts) {
  const auto doubled = [&record](int times) {
    return std::min(FromProto(record.spec().restart_delay()) * (1 << times), kMaxRestartDelay);
  };
  int early = 0;
  for (int i = last; i >= 0; --i) {
    const v1::JobAttempt& attempt = record.history(i);
    // Records of older coordinators have times of the nodes' clocks, which may be wrong.
    const absl::Duration ran = attempt.started_unix_ms() == 0
                                   ? absl::ZeroDuration()
                                   : absl::FromUnixMillis(attempt.ended_unix_ms()) -
                                         absl::FromUnixMillis(attempt.started_unix_ms());
    if (ran >= kSettled) return doubled(std::min(early, restarts));
    // The last attempt does not count: it is the reason for the delay itself.
    if (i < last && CountsAsRestart(attempt.end().end_class())) ++early;
  }
  // The history has only the end of a longer series.
  return doubled(std::min(restarts, 20));
}

absl::Duration DelayInPlace(const v1::JobRecord& record) {
  return RestartDelay(record, record.history_size() - 2, std::max(0, record.restarts() - 1));
}

absl::Time DelayEnds(const v1::JobRecord& record, absl::Time now) {
  if (record.history_size() == 0) return absl::InfinitePast();
  const int last = record.history_size() - 1;
  const v1::JobAttempt& attempt = record.history(last);
  absl::Duration delay;
  if (attempt.end().end_class() == v1::END_CLASS_NODE_FAILED) {
    delay = kNodeFailureDelay;
  } else if (record.restarts() > 0 && CountsAsRestart(attempt.end().end_class())) {
    delay = RestartDelay(record, last, record.restarts() - 1);
  } else {
    return absl::InfinitePast();
  }
  return std::min(absl::FromUnixMillis(attempt.times().fenced_unix_ms()), now) + delay;
}

AttemptOutcome OutcomeOf(const EndedAttempt& ended) {
  const v1::JobRecord& record = ended.record;
  const v1::JobAttempt& attempt = Last(record);
  const bool succeeded = std::all_of(attempt.placements().begin(), attempt.placements().end(),
                                     [](const v1::Placement& placement) {
                                       return placement.end_class() == v1::END_CLASS_SUCCEEDED;
                                     });
  const std::string& why = attempt.end().why();
  AttemptOutcome outcome;
  outcome.end_class = succeeded ? v1::END_CLASS_SUCCEEDED : attempt.end().end_class();
  const auto ends = [&outcome](v1::JobState state, std::string because) {
    outcome.state = state;
    outcome.why = std::move(because);
    return outcome;
  };
  const v1::EndClass end_class = outcome.end_class;
  if (succeeded) return ends(v1::JOB_STATE_SUCCEEDED, "all processes have succeeded");
  if (record.wanted() == v1::JOB_ACTION_CANCEL) return ends(v1::JOB_STATE_CANCELLED, why);
  if (!MayRetry(end_class) && !ended.retries_user_errors) return ends(v1::JOB_STATE_FAILED, why);
  if (record.wanted() == v1::JOB_ACTION_SUSPEND) return ends(v1::JOB_STATE_SUSPENDED, why);
  const bool counts = CountsAsRestart(end_class) &&
                      !(ended.restarts_hangs_for_free && end_class == v1::END_CLASS_HANG);
  const std::string over =
      ended.forgets_class_limits
          ? ""
          : WhyOverLimit(record.spec().class_limits(), record.class_restarts(), end_class);
  if (counts && !HasRestartLeft(record)) {
    return ends(v1::JOB_STATE_FAILED,
                record.restarts() == 0 ? why
                                       : absl::StrCat(why, "; it was restarted ", record.restarts(),
                                                      record.restarts() == 1 ? " time" : " times"));
  }
  if (!over.empty()) return ends(v1::JOB_STATE_FAILED, absl::StrCat(why, "; ", over));
  outcome.counts_class = true;
  if (counts) {
    outcome.counts_restart = true;
    outcome.delay = RestartDelay(record, record.history_size() - 1, record.restarts());
    return ends(v1::JOB_STATE_QUEUED, absl::StrCat("restart ", record.restarts() + 1, " of ",
                                                   record.spec().max_restarts(), " after: ", why));
  }
  if (end_class == v1::END_CLASS_NODE_FAILED) {
    if (ended.node_failures + 1 >= kMaxNodeFailures) {
      return ends(v1::JOB_STATE_FAILED,
                  absl::StrCat(why, "; ", kMaxNodeFailures, " attempts in a row could not start"));
    }
    outcome.delay = kNodeFailureDelay;
    outcome.avoid = ended.could_not_start;
    outcome.avoid.insert(outcome.avoid.begin(), attempt.end().node());
  } else if (end_class == v1::END_CLASS_NODE_LOST && ended.given_up_early) {
    outcome.delay = kNodeFailureDelay;
  }
  return ends(v1::JOB_STATE_QUEUED, absl::StrCat("another start after: ", why));
}

}  // namespace muster::coordinator
