#include "base/timer_thread.h"

#include <utility>

namespace muster {

TimerThread::TimerThread(std::function<absl::Time()> tick, const Clock* clock)
    : tick_(std::move(tick)), clock_(clock) {}

TimerThread::~TimerThread() { Stop(); }

void TimerThread::Start() {
  thread_ = std::thread([this] { Loop(); });
}

void TimerThread::Stop() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    changed_.SignalAll();
  }
  if (thread_.joinable()) thread_.join();
}

void TimerThread::Wake() {
  MutexLock lock(&mu_);
  if (wanted_) return;
  wanted_ = true;
  changed_.SignalAll();
}

void TimerThread::Loop() {
  absl::Time next = absl::InfinitePast();
  while (true) {
    {
      MutexLock lock(&mu_);
      while (!stop_ && !wanted_) {
        const absl::Duration left = next - clock_->Now();
        if (left <= absl::ZeroDuration()) break;
        changed_.WaitWithTimeout(&mu_, left);
      }
      if (stop_) return;
      wanted_ = false;
    }
    next = tick_();
  }
}

}  // namespace muster
