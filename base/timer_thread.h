#ifndef MUSTER_BASE_TIMER_THREAD_H_
#define MUSTER_BASE_TIMER_THREAD_H_

#include <functional>
#include <thread>

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace muster {

// A thread that calls `tick` when it is due. Thread-safe.
class TimerThread {
 public:
  // `tick` returns when to call it next (by `clock`); InfiniteFuture: only when woken.
  explicit TimerThread(std::function<absl::Time()> tick, const Clock* clock = &Clock::Real());
  ~TimerThread();
  TimerThread(const TimerThread&) = delete;
  TimerThread& operator=(const TimerThread&) = delete;

  // Calls `tick` for the first time, on the thread. Call it once.
  void Start();
  // Waits for a running call of `tick`; afterwards it is no longer called. Repeatable; the
  // destructor does it, too. Do not call it from `tick`.
  void Stop();
  // Has the thread call `tick` now, again if it runs at this moment. Does not block. Does nothing
  // when stopped.
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

}  // namespace muster

#endif  // MUSTER_BASE_TIMER_THREAD_H_
