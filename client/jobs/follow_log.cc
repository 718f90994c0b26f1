#include "client/jobs/follow_log.h"

#include <optional>
#include <utility>

#include "base/backoff.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "rpc/status.h"

namespace muster::client {
namespace {

constexpr absl::Duration kFirstPause = absl::Milliseconds(50);
constexpr absl::Duration kLastPause = absl::Seconds(2);

// Returns the attempt that follows attempt `last`; 0: none has begun. A coordinator that was
// restored from a copy skips many numbers, and job.attempts runs ahead.
int Following(const Job& job, int last) {
  for (const Attempt& attempt : job.history) {
    if (attempt.number > last) return attempt.number;
  }
  return job.history.empty() && job.attempts > last ? last + 1 : 0;
}

// Whether the attempt is known to have the rank.
bool HasRank(const Job& job, int attempt, int rank) {
  for (const Attempt& one : job.history) {
    if (one.number != attempt) continue;
    for (const Placement& placement : one.placements) rank -= placement.processes;
    return rank < 0;
  }
  return false;
}

class LogFollower {
 public:
  LogFollower(LogOptions options, const LogSource& source)
      : options_(std::move(options)), one_attempt_(options_.attempt != 0), source_(source) {
    Answered();
  }

  absl::Status Run(const std::function<bool(const LogChunk&)>& chunk) {
    if (!one_attempt_) {
      // A job that waits for its first attempt has no log yet.
      MUSTER_ASSIGN_OR_RETURN(const Job begun,
                              source_.watch([](const Job& now) { return now.attempts == 0; }));
      if (begun.attempts == 0) return absl::OkStatus();
      options_.attempt = LastBegun(begun);
    }
    while (true) {
      const absl::StatusOr<LogChunk> part = source_.read(options_);
      if (part.ok()) {
        Answered();
        has_read_ = true;
        if (!part->data.empty() && !chunk(*part)) return absl::OkStatus();
        options_.offset = part->next_offset;
        options_.since = absl::InfiniteDuration();
        if (!part->ended) continue;
        if (one_attempt_) return absl::OkStatus();
      } else {
        MUSTER_ASSIGN_OR_RETURN(const bool over, IsOver(part.status()));
        if (!over) continue;
      }
      MUSTER_ASSIGN_OR_RETURN(const bool goes_on, GoOn());
      if (!goes_on) return absl::OkStatus();
    }
  }

 private:
  void Answered() {
    give_up_.reset();
    backoff_.emplace(kFirstPause, kLastPause);
  }

  // Returns whether a call that failed with `status` may be repeated; if so, waits first.
  bool Again(const absl::Status& status, bool must_be_there = false) {
    if (!absl::IsUnavailable(status) && !absl::IsDeadlineExceeded(status) &&
        !(must_be_there && absl::IsNotFound(status))) {
      return false;
    }
    const absl::Time now = Clock::Real().Now();
    if (!give_up_.has_value()) give_up_ = now + source_.patience;
    const absl::Duration pause = backoff_->Next(RandomShare(), rpc::RetryAfter(status));
    return now + pause < *give_up_ && source_.pause(pause);
  }

  // Called after the log could not be read: returns true if its attempt is over and the rest of its
  // log cannot be read, false to read again. Errors: those that end everything.
  absl::StatusOr<bool> IsOver(const absl::Status& status) {
    const absl::StatusOr<Job> job = source_.watch([](const Job&) { return false; });
    if (!job.ok()) {
      if (Again(job.status())) return false;
      return job.status();
    }
    bool over = Following(*job, options_.attempt) != 0;
    // The node of a job that has ended may be gone for good, but not one that has just answered.
    const bool ended = HasEnded(job->state);
    if (!over && (!ended || has_read_)) {
      // A node that cannot read the log also returns NOT_FOUND; once the job has ended, that
      // counts.
      const bool has_rank = HasRank(*job, options_.attempt, options_.rank);
      if (Again(status, has_rank && !ended)) return false;
      if (ended) return status;
      const bool waits = job->state == JobState::kQueued || job->state == JobState::kSuspended;
      // The attempt has no such rank, because it is smaller than the previous one. Or it has ended,
      // and its node has lost the log or does not come back.
      over = absl::IsNotFound(status) ? has_read_ && (waits || !has_rank)
                                      : absl::IsUnavailable(status) && waits;
    }
    if (!over || one_attempt_) return status;
    MUSTER_LOG(Warning) << "rank " << options_.rank << " has no more output of attempt "
                        << options_.attempt << " here: " << status.message()
                        << "; that of the next attempt follows";
    return true;
  }

  // Waits for the next attempt. Returns false if there is none, and the job has ended.
  absl::StatusOr<bool> GoOn() {
    const int last = options_.attempt;
    Answered();
    while (true) {
      const absl::StatusOr<Job> next =
          source_.watch([last](const Job& now) { return Following(now, last) == 0; });
      if (!next.ok()) {
        if (Again(next.status())) continue;
        return next.status();
      }
      Answered();
      int following = Following(*next, last);
      if (following == 0) return false;
      if (following > last + 1) {
        // Changes carry only the last attempt, and some may be skipped, so there may be other
        // attempts.
        const absl::StatusOr<Job> whole = source_.watch([](const Job&) { return false; });
        if (!whole.ok()) {
          if (Again(whole.status())) continue;
          return whole.status();
        }
        if (const int first = Following(*whole, last); first != 0) following = first;
      }
      options_.attempt = following;
      options_.offset = 0;
      return true;
    }
  }

  LogOptions options_;
  const bool one_attempt_;
  const LogSource& source_;
  bool has_read_ = false;              // any chunk
  std::optional<absl::Time> give_up_;  // while calls fail
  std::optional<Backoff> backoff_;
};

}  // namespace

int LastBegun(const Job& job) {
  return job.history.empty() ? job.attempts : job.history.back().number;
}

absl::Status FollowLog(LogOptions options, const LogSource& source,
                       const std::function<bool(const LogChunk&)>& chunk) {
  return LogFollower(std::move(options), source).Run(chunk);
}

}  // namespace muster::client
