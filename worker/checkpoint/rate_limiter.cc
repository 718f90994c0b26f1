#include "worker/checkpoint/rate_limiter.h"

#include <algorithm>

namespace muster {

RateLimiter::RateLimiter(int64_t bytes_per_second, const Clock& clock)
    : bytes_per_second_(bytes_per_second), clock_(clock) {}

absl::Duration RateLimiter::Reserve(int64_t bytes) {
  if (bytes_per_second_ <= 0) return absl::ZeroDuration();
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  if (lifted_) return absl::ZeroDuration();
  const absl::Time start = std::max(now, next_);
  next_ = start + absl::Seconds(static_cast<double>(bytes) / bytes_per_second_);
  return start - now;
}

void RateLimiter::Wait(absl::Duration duration) {
  const absl::Time end = clock_.Now() + duration;
  MutexLock lock(&mu_);
  while (!lifted_) {
    const absl::Duration left = end - clock_.Now();
    if (left <= absl::ZeroDuration()) return;
    changed_.WaitWithTimeout(&mu_, left);
  }
}

void RateLimiter::Lift(bool lifted) {
  MutexLock lock(&mu_);
  lifted_ = lifted;
  changed_.SignalAll();
}

}  // namespace muster
