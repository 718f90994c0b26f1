#ifndef MUSTER_AGENT_END_WATCH_H_
#define MUSTER_AGENT_END_WATCH_H_

#include <cstdint>
#include <memory>

#include "absl/time/time.h"
#include "agent/attempt_state.h"
#include "agent/op_sender.h"
#include "base/mutex.h"
#include "base/timer_thread.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// Ends the attempt when another agent has written the key "end", or when the coordinator says that
// the generation has ended: an operation waits for the key at the coordinator, and is submitted
// again as long as the attempt runs. Answers that come after Stop have no effect, even after this
// object is gone. Start and Stop are called on one thread.
class EndWatch {
 public:
  // `sender`: borrowed. `elastic`: see EndOfRefused.
  EndWatch(std::shared_ptr<AttemptState> attempt, OpSender* sender, bool elastic);
  ~EndWatch();
  EndWatch(const EndWatch&) = delete;
  EndWatch& operator=(const EndWatch&) = delete;

  // An attempt has begun. `wait`: waits for its key.
  void Start(v1::Op wait);
  // Ends the watch, if there is one. Does not block.
  void Stop();

 private:
  // Late answers share it.
  struct State {
    Mutex mu;
    v1::Op wait ABSL_GUARDED_BY(mu);
    uint64_t op_id ABSL_GUARDED_BY(mu) = 0;  // of the latest operation that was submitted; 0: none
    absl::Time wait_at ABSL_GUARDED_BY(mu) = absl::InfiniteFuture();  // when to submit it (again)
    uint64_t watch ABSL_GUARDED_BY(mu) = 0;                           // counts the watches
    bool generation_gone ABSL_GUARDED_BY(mu) = false;                 // as an answer reported
  };

  // The tick of the timer: submits the operation when it is due.
  absl::Time Tick();
  static void Answered(State* state, AttemptState* attempt, TimerThread* timer, uint64_t watch,
                       bool elastic, const v1::OpResult& result);

  const std::shared_ptr<AttemptState> attempt_;
  OpSender* const sender_;
  const bool elastic_;
  const std::shared_ptr<State> state_ = std::make_shared<State>();
  // Late answers wake it without effect.
  const std::shared_ptr<TimerThread> timer_ =
      std::make_shared<TimerThread>([this] { return Tick(); });
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_END_WATCH_H_
