#include "base/clock.h"

#include <gtest/gtest.h>

#include <thread>

#include "absl/time/clock.h"
#include "base/fake_clock.h"
#include "base/mutex.h"

namespace muster {
namespace {

TEST(RealClock, Now_NeverGoesBackAndStartsNearTheCalendar) {
  const Clock& clock = Clock::Real();
  absl::Time last = clock.Now();
  EXPECT_LT(absl::AbsDuration(last - absl::Now()), absl::Minutes(1));
  for (int i = 0; i < 1000; ++i) {
    const absl::Time now = clock.Now();
    EXPECT_GE(now, last);
    last = now;
  }
  EXPECT_LT(absl::AbsDuration(clock.WallNow() - absl::Now()), absl::Minutes(1));
}

TEST(FakeClock, Now_MovesOnlyWhenTold) {
  FakeClock clock(absl::FromUnixSeconds(100));
  EXPECT_EQ(clock.Now(), absl::FromUnixSeconds(100));
  clock.Advance(absl::Milliseconds(1500));
  EXPECT_EQ(clock.Now(), absl::FromUnixMillis(101'500));
  EXPECT_EQ(clock.WallNow(), clock.Now());
}

TEST(Notification, Notify_WakesEveryWaiter) {
  Notification ready;
  EXPECT_FALSE(ready.HasBeenNotified());
  EXPECT_FALSE(ready.WaitForNotificationWithTimeout(absl::ZeroDuration()));
  EXPECT_FALSE(ready.WaitForNotificationWithTimeout(absl::Milliseconds(1)));
  std::thread one([&ready] { ready.WaitForNotification(); });
  std::thread two(
      [&ready] { EXPECT_TRUE(ready.WaitForNotificationWithTimeout(absl::InfiniteDuration())); });
  ready.Notify();
  one.join();
  two.join();
  EXPECT_TRUE(ready.HasBeenNotified());
}

TEST(CondVar, WaitWithTimeout_SaysWhetherTimePassed) {
  Mutex mu;
  CondVar changed;
  bool done = false;
  {
    MutexLock lock(&mu);
    EXPECT_TRUE(changed.WaitWithTimeout(&mu, absl::Milliseconds(1)));
  }
  std::thread other([&] {
    MutexLock lock(&mu);
    done = true;
    changed.SignalAll();
  });
  {
    MutexLock lock(&mu);
    while (!done) EXPECT_FALSE(changed.WaitWithTimeout(&mu, absl::InfiniteDuration()));
  }
  other.join();
}

}  // namespace
}  // namespace muster
