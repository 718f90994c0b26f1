#ifndef MUSTER_AGENT_FAKE_JOB_COORDINATION_H_
#define MUSTER_AGENT_FAKE_JOB_COORDINATION_H_

#include <algorithm>
#include <functional>
#include <optional>
#include <utility>
#include <vector>

#include "agent/job_coordination.h"
#include "base/mutex.h"

namespace muster::agent {

// A job of one node without a coordinator, or of several nodes of which the test plays the others.
// Thread-safe.
class FakeJobCoordination final : public JobCoordination {
 public:
  explicit FakeJobCoordination(Meeting meeting = {}) : meeting_(std::move(meeting)) {}

  absl::StatusOr<Meeting> Meet(int attempt, const RestartCounts& counted) override {
    MutexLock lock(&mu_);
    on_ended_ = nullptr;  // from the previous attempt
    attempts_.push_back(attempt);
    if (!meet_error_.ok()) return meet_error_;
    Meeting meeting = meeting_;
    meeting.attempt = std::max(meeting.attempt, attempt);
    meeting.counted.TakeLarger(counted);
    return meeting;
  }
  void Watch(std::function<void(AttemptEnd)> on_ended) override {
    MutexLock lock(&mu_);
    on_ended_ = std::move(on_ended);
    changed_.SignalAll();
  }
  void ReportEnd(const WorkerEnd& end) override {
    MutexLock lock(&mu_);
    ends_.push_back(end);
  }
  AttemptEnd Fail(const AttemptEnd& end) override {
    MutexLock lock(&mu_);
    failures_.push_back(end);
    return first_.value_or(end);
  }
  absl::Status Finish() override {
    MutexLock lock(&mu_);
    ++finished_;
    changed_.SignalAll();
    while (hold_finish_ && !cancelled_) changed_.Wait(&mu_);
    return cancelled_ ? absl::CancelledError("cancelled") : finish_status_;
  }
  void Cancel() override {
    MutexLock lock(&mu_);
    cancelled_ = true;
    changed_.SignalAll();
  }

  // Plays another node that ends the attempt.
  void EndElsewhere(AttemptEnd end) {
    std::function<void(AttemptEnd)> on_ended;
    {
      MutexLock lock(&mu_);
      // Like the real one, which knows nothing of an attempt before it is watched.
      while (on_ended_ == nullptr) changed_.Wait(&mu_);
      on_ended = std::exchange(on_ended_, nullptr);
    }
    on_ended(std::move(end));
  }
  // Takes effect with the next attempt.
  void SetMeeting(Meeting meeting) {
    MutexLock lock(&mu_);
    meeting_ = std::move(meeting);
  }
  void FailMeet(absl::Status status) {
    MutexLock lock(&mu_);
    meet_error_ = std::move(status);
  }
  // Another node has failed earlier, which is not known here yet.
  void FailsElsewhereFirst(AttemptEnd end) {
    MutexLock lock(&mu_);
    first_ = std::move(end);
  }
  void HoldFinish() {
    MutexLock lock(&mu_);
    hold_finish_ = true;
  }
  void ReleaseFinish(absl::Status status) {
    MutexLock lock(&mu_);
    finish_status_ = std::move(status);
    hold_finish_ = false;
    changed_.SignalAll();
  }
  void WaitForFinish() {
    MutexLock lock(&mu_);
    while (finished_ == 0) changed_.Wait(&mu_);
  }

  std::vector<int> attempts() const {
    MutexLock lock(&mu_);
    return attempts_;
  }
  std::vector<WorkerEnd> ends() const {
    MutexLock lock(&mu_);
    return ends_;
  }
  std::vector<AttemptEnd> failures() const {
    MutexLock lock(&mu_);
    return failures_;
  }

 private:
  mutable Mutex mu_;
  CondVar changed_;
  Meeting meeting_ ABSL_GUARDED_BY(mu_);
  std::function<void(AttemptEnd)> on_ended_ ABSL_GUARDED_BY(mu_);
  std::vector<int> attempts_ ABSL_GUARDED_BY(mu_);
  std::vector<WorkerEnd> ends_ ABSL_GUARDED_BY(mu_);
  std::vector<AttemptEnd> failures_ ABSL_GUARDED_BY(mu_);
  std::optional<AttemptEnd> first_ ABSL_GUARDED_BY(mu_);
  absl::Status meet_error_ ABSL_GUARDED_BY(mu_);
  absl::Status finish_status_ ABSL_GUARDED_BY(mu_);
  int finished_ ABSL_GUARDED_BY(mu_) = 0;
  bool hold_finish_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAKE_JOB_COORDINATION_H_
