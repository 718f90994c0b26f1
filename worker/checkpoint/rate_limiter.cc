#include "worker/checkpoint/rate_limiter.h"

#include <algorithm>

namespace muster {

RateLimiter::RateLimiter(int64_t bytes_per_second, const Clock& clock)
    : bytes_per_second_(bytes_per_second), clock_(clock) {}

absl::Duration RateLimiter::Reserve(int64_t bytes) {
  if (bytes_per_second_ <= 0 || lifted_.load(std::memory_order_relaxed)) {
    return absl::ZeroDuration();
  }
  const absl::Time now = clock_.Now();
  MutexLock lock(&mu_);
  const absl::Time start = std::max(now, next_);
  next_ = start + absl::Seconds(static_cast<double>(bytes) / bytes_per_second_);
  return start - now;
}

}  // namespace muster
