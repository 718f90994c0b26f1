#include "base/backoff.h"

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(Backoff, Waits_AreBetweenHalfAndAllOfASpanThatDoubles) {
  Backoff low(absl::Milliseconds(50), absl::Milliseconds(150));
  Backoff high(absl::Milliseconds(50), absl::Milliseconds(150));
  for (const int span : {50, 100, 150, 150}) {
    EXPECT_EQ(low.Next(0), absl::Milliseconds(span) / 2);
    EXPECT_EQ(high.Next(1), absl::Milliseconds(span));
  }
}

TEST(Backoff, RetryAfter_IsWaitedForBefore) {
  Backoff backoff(absl::Milliseconds(50), absl::Seconds(2));
  EXPECT_EQ(backoff.Next(0, absl::Seconds(3)), absl::Milliseconds(3025));
  EXPECT_EQ(backoff.Next(1, absl::Seconds(3)), absl::Milliseconds(3100));
}

TEST(RandomShare, IsAShareAndNotAlwaysTheSame) {
  const double first = RandomShare();
  bool differs = false;
  for (int i = 0; i < 100; ++i) {
    const double share = RandomShare();
    EXPECT_GE(share, 0);
    EXPECT_LE(share, 1);
    differs |= share != first;
  }
  EXPECT_TRUE(differs);
}

}  // namespace
}  // namespace muster
