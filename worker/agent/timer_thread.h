#ifndef MUSTER_WORKER_AGENT_TIMER_THREAD_H_
#define MUSTER_WORKER_AGENT_TIMER_THREAD_H_

#include <functional>
#include <thread>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace muster::agent {

// A thread that calls `tick` when it is due. Thread-safe.
class TimerThread {
 public:
  // `tick` returns when to be called next (by `clock`); InfiniteFuture: when woken. It is called
  // once at the start.
  explicit TimerThread(std::function<absl::Time()> tick, const Clock* clock = &Clock::Real());
  // Waits for a call of `tick` that runs.
  ~TimerThread();
  TimerThread(const TimerThread&) = delete;
  TimerThread& operator=(const TimerThread&) = delete;

  // Calls `tick` now, also if it runs at this moment. Does not block.
  void Wake();

 private:
  void Loop();

  const std::function<absl::Time()> tick_;
  const Clock* const clock_;
  Mutex mu_;
  CondVar changed_;
  bool wanted_ ABSL_GUARDED_BY(mu_) = true;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;
};

}  // namespace muster::agent

#endif  // MUSTER_WORKER_AGENT_TIMER_THREAD_H_
