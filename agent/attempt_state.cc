#include "agent/attempt_state.h"

#include <utility>

#include "base/clock.h"

namespace muster::agent {

void AttemptState::Begin(std::function<void(AttemptEnd)> on_ended) {
  MutexLock lock(&mu_);
  ended_ = false;
  how_ = AttemptEnd();
  on_ended_ = std::move(on_ended);
}

void AttemptState::End(AttemptEnd end) {
  std::function<void(AttemptEnd)> told;
  {
    MutexLock lock(&mu_);
    if (!ended_) how_ = end;
    ended_ = true;
    told.swap(on_ended_);
    changed_.SignalAll();
  }
  if (told) told(std::move(end));
}

void AttemptState::Interrupt() {
  MutexLock lock(&mu_);
  ended_ = true;
  changed_.SignalAll();
}

void AttemptState::ForgetListener() {
  MutexLock lock(&mu_);
  on_ended_ = nullptr;
}

std::optional<AttemptEnd> AttemptState::ended() const {
  MutexLock lock(&mu_);
  if (!ended_) return std::nullopt;
  return how_;
}

void AttemptState::Cancel() {
  MutexLock lock(&mu_);
  cancelled_ = true;
  changed_.SignalAll();
}

bool AttemptState::cancelled() const {
  MutexLock lock(&mu_);
  return cancelled_;
}

void AttemptState::Deliver(const v1::OpResult& result, Answer* answer) {
  MutexLock lock(&mu_);
  answer->result_ = result;
  changed_.SignalAll();
}

absl::StatusOr<v1::OpResult> AttemptState::Await(Answer* answer, absl::Time deadline, Until until) {
  MutexLock lock(&mu_);
  while (!answer->result_.has_value()) {
    if (cancelled_ && until != Until::kAnswered) return absl::CancelledError("stopped");
    if (ended_ && until == Until::kEnded) return absl::AbortedError("the attempt has ended");
    const absl::Duration left = deadline - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) return absl::DeadlineExceededError("no answer");
    changed_.WaitWithTimeout(&mu_, left);
  }
  return *std::move(answer->result_);
}

void AttemptState::Pause(absl::Duration time, Until until) {
  MutexLock lock(&mu_);
  if (cancelled_ && until != Until::kAnswered) return;
  if (ended_ && until == Until::kEnded) return;
  changed_.WaitWithTimeout(&mu_, time);
}

}  // namespace muster::agent
