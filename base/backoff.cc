#include "base/backoff.h"

#include <algorithm>
#include <random>

namespace muster {

absl::Duration Backoff::Next(double share, absl::Duration retry_after) {
  const absl::Duration span = span_;
  span_ = std::min(span_ * 2, last_);
  return retry_after + span * (0.5 + share / 2);
}

double RandomShare() {
  thread_local std::minstd_rand random{std::random_device()()};
  return std::uniform_real_distribution<double>(0, 1)(random);
}

}  // namespace muster
