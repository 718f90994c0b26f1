#include "base/timer_thread.h"

#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(TimerThread, Start_TicksOnceAndThenWhenWoken) {
  Mutex mu;
  CondVar changed;
  int ticks = 0;
  const auto wait_for = [&](int count) {
    MutexLock lock(&mu);
    while (ticks < count) changed.Wait(&mu);
  };
  TimerThread timer([&] {
    MutexLock lock(&mu);
    ++ticks;
    changed.SignalAll();
    return absl::InfiniteFuture();
  });
  timer.Start();
  wait_for(1);
  timer.Wake();
  wait_for(2);
  timer.Stop();
  timer.Wake();
  MutexLock lock(&mu);
  EXPECT_EQ(ticks, 2);
}

TEST(TimerThread, DueTime_TicksByItself) {
  Notification third;
  int ticks = 0;
  TimerThread timer([&] {
    if (++ticks == 3) third.Notify();
    return ticks < 3 ? Clock::Real().Now() + absl::Milliseconds(1) : absl::InfiniteFuture();
  });
  timer.Start();
  third.WaitForNotification();
}

TEST(TimerThread, WakeInsideTick_TicksAgain) {
  Notification second;
  TimerThread* self = nullptr;
  int ticks = 0;
  TimerThread timer([&] {
    if (++ticks == 1) self->Wake();
    if (ticks == 2) second.Notify();
    return absl::InfiniteFuture();
  });
  self = &timer;
  timer.Start();
  second.WaitForNotification();
}

}  // namespace
}  // namespace muster
