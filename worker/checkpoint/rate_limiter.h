#ifndef MUSTER_WORKER_CHECKPOINT_RATE_LIMITER_H_
#define MUSTER_WORKER_CHECKPOINT_RATE_LIMITER_H_

#include <cstdint>

#include "absl/base/thread_annotations.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace muster {

// Spreads bytes over time, so that writing in the background leaves disk bandwidth to others.
// Thread-safe.
class RateLimiter {
 public:
  // `bytes_per_second`: 0 for no limit.
  explicit RateLimiter(int64_t bytes_per_second, const Clock& clock = Clock::Real());

  // Reserves `bytes` and returns how long the caller waits before it moves them. Does not block.
  // Callers are served in the order of their calls; idle time does not accumulate.
  absl::Duration Reserve(int64_t bytes);
  // Waits for `duration`, or until the limit is lifted.
  void Wait(absl::Duration duration);
  // Lifts or restores the limit. While it is lifted, no caller waits, because something waits for
  // the bytes.
  void Lift(bool lifted);

 private:
  const int64_t bytes_per_second_;
  const Clock& clock_;
  Mutex mu_;
  CondVar changed_;
  bool lifted_ ABSL_GUARDED_BY(mu_) = false;
  absl::Time next_ ABSL_GUARDED_BY(mu_) = absl::InfinitePast();
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_RATE_LIMITER_H_
