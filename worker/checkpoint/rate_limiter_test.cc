#include "worker/checkpoint/rate_limiter.h"

#include <gtest/gtest.h>

#include <thread>

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

TEST(RateLimiterTest, Lifted_NobodyWaitsAndNothingIsOwedAfter) {
  FakeClock clock;
  RateLimiter limiter(1000, clock);
  EXPECT_EQ(limiter.Reserve(1000), absl::ZeroDuration());
  limiter.Lift(true);
  EXPECT_EQ(limiter.Reserve(1'000'000), absl::ZeroDuration());
  EXPECT_EQ(limiter.Reserve(1'000'000), absl::ZeroDuration());
  limiter.Lift(false);
  EXPECT_EQ(limiter.Reserve(1000), absl::Seconds(1));
  EXPECT_EQ(limiter.Reserve(1000), absl::Seconds(2));
}

TEST(RateLimiterTest, WhoWaitsAlready_GoesOnWhenTheLimitIsLifted) {
  RateLimiter limiter(1);
  std::thread lifter([&] { limiter.Lift(true); });
  limiter.Wait(absl::Hours(24));
  lifter.join();
}

}  // namespace
}  // namespace muster
