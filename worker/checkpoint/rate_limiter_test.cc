#include "worker/checkpoint/rate_limiter.h"

#include <gtest/gtest.h>

#include "base/fake_clock.h"

namespace muster {
namespace {

TEST(RateLimiterTest, NoLimit_NobodyWaits) {
  RateLimiter limiter(0);
  EXPECT_EQ(limiter.Reserve(int64_t{1} << 40), absl::ZeroDuration());
  EXPECT_EQ(limiter.Reserve(int64_t{1} << 40), absl::ZeroDuration());
}

TEST(RateLimiterTest, CallersInARow_WaitForThoseBeforeThem) {
  FakeClock clock;
  RateLimiter limiter(1000, clock);
  EXPECT_EQ(limiter.Reserve(500), absl::ZeroDuration());
  EXPECT_EQ(limiter.Reserve(1000), absl::Milliseconds(500));
  clock.Advance(absl::Milliseconds(500));
  EXPECT_EQ(limiter.Reserve(1), absl::Seconds(1));
}

TEST(RateLimiterTest, TimeWithoutCalls_IsNotSavedUp) {
  FakeClock clock;
  RateLimiter limiter(1000, clock);
  EXPECT_EQ(limiter.Reserve(1000), absl::ZeroDuration());
  clock.Advance(absl::Hours(1));
  EXPECT_EQ(limiter.Reserve(1000), absl::ZeroDuration());
  EXPECT_EQ(limiter.Reserve(1000), absl::Seconds(1));
}

}  // namespace
}  // namespace muster
