#ifndef MUSTER_AGENT_ATTEMPT_STATE_H_
#define MUSTER_AGENT_ATTEMPT_STATE_H_

#include <functional>
#include <optional>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "agent/job_coordination.h"
#include "base/mutex.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// What an agent's blocking calls, late answers and directives share: whether the launch is
// cancelled, and whether and how the attempt has ended. Answers are kept under the same lock,
// because a call waits for whichever of these comes first. Thread-safe; callbacks are called
// without the lock.
class AttemptState {
 public:
  // The reasons, apart from its timeout, for which a wait returns early: kEnded includes
  // kCancelled.
  enum class Until { kAnswered, kCancelled, kEnded };

  // The place for the answer to one operation.
  class Answer {
    friend class AttemptState;
    std::optional<v1::OpResult> result_;  // guarded by the lock of the AttemptState
  };

  // An attempt begins. `on_ended` is called at most once, if it ends.
  void Begin(std::function<void(AttemptEnd)> on_ended);
  // Ends the attempt; the first end counts. Calls `on_ended` unless that has happened.
  void End(AttemptEnd end);
  // Makes waits with kEnded return, without a cause, and without a call of `on_ended`.
  void Interrupt();
  // From now on `on_ended` is not called, except by an End that has already begun.
  void ForgetListener();
  // Returns how the attempt has ended, with an empty `why` after Interrupt; nullopt: it has not.
  std::optional<AttemptEnd> ended() const;

  // The launch is stopped. Final.
  void Cancel();
  bool cancelled() const;

  void Deliver(const v1::OpResult& result, Answer* answer);
  // Blocks until the answer has come, and takes it. Errors: CANCELLED and ABORTED depending on
  // `until`; DEADLINE_EXCEEDED.
  absl::StatusOr<v1::OpResult> Await(Answer* answer, absl::Time deadline, Until until);
  // Blocks for `time` between two looks at something, or for less.
  void Pause(absl::Duration time, Until until);

 private:
  mutable Mutex mu_;
  CondVar changed_;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
  bool ended_ ABSL_GUARDED_BY(mu_) = false;
  AttemptEnd how_ ABSL_GUARDED_BY(mu_);
  std::function<void(AttemptEnd)> on_ended_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ATTEMPT_STATE_H_
