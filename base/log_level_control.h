#ifndef MUSTER_BASE_LOG_LEVEL_CONTROL_H_
#define MUSTER_BASE_LOG_LEVEL_CONTROL_H_

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/timer_thread.h"

namespace muster {

// The log level of this process, which may be set for a limited time: then the previous level
// returns automatically, at the latest when this object is destroyed. Thread-safe; only the
// destructor blocks.
class LogLevelControl {
 public:
  struct State {
    LogLevel level;  // in force
    LogLevel next;   // after `left`
    absl::Duration left = absl::InfiniteDuration();
  };

  explicit LogLevelControl(const Clock* clock = &Clock::Real());
  ~LogLevelControl();
  LogLevelControl(const LogLevelControl&) = delete;
  LogLevelControl& operator=(const LogLevelControl&) = delete;

  State Get() const;
  // `span`: infinite for a level that stays until the next call. A level with a limited time
  // replaces an earlier one with a limited time, but not the level that returns after it.
  State Set(LogLevel level, absl::Duration span);
  // Restores the previous level if that is due; returns when to be called again. Called by its own
  // thread.
  absl::Time Tick();

 private:
  State GetLocked() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Clock& clock_;
  mutable Mutex mu_;
  absl::Time until_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  LogLevel before_ ABSL_GUARDED_BY(mu_) = LogLevel::kInfo;  // returns at until_, if that is finite
  bool started_ ABSL_GUARDED_BY(mu_) = false;  // the thread; most processes never need it
  TimerThread timer_;                          // last: it uses the rest
};

}  // namespace muster

#endif  // MUSTER_BASE_LOG_LEVEL_CONTROL_H_
