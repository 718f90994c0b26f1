#include "base/log_level_control.h"

#include <algorithm>
#include <utility>

namespace muster {

LogLevelControl::LogLevelControl(const Clock* clock)
    : clock_(*clock), timer_([this] { return Tick(); }, clock) {}

LogLevelControl::~LogLevelControl() {
  timer_.Stop();
  MutexLock lock(&mu_);
  if (until_ != absl::InfiniteFuture()) SetLogLevel(before_);
}

LogLevelControl::State LogLevelControl::Get() const {
  MutexLock lock(&mu_);
  return GetLocked();
}

LogLevelControl::State LogLevelControl::GetLocked() const {
  const LogLevel level = GetLogLevel();
  if (until_ == absl::InfiniteFuture()) return {.level = level, .next = level};
  return {.level = level,
          .next = before_,
          .left = std::max(absl::ZeroDuration(), until_ - clock_.Now())};
}

LogLevelControl::State LogLevelControl::Set(LogLevel level, absl::Duration span) {
  MutexLock lock(&mu_);
  if (span != absl::InfiniteDuration() && until_ == absl::InfiniteFuture()) {
    before_ = GetLogLevel();
  }
  until_ = span == absl::InfiniteDuration() ? absl::InfiniteFuture() : clock_.Now() + span;
  SetLogLevel(level);
  if (until_ != absl::InfiniteFuture() && !std::exchange(started_, true)) timer_.Start();
  timer_.Wake();
  return GetLocked();
}

absl::Time LogLevelControl::Tick() {
  MutexLock lock(&mu_);
  if (until_ > clock_.Now()) return until_;
  until_ = absl::InfiniteFuture();
  SetLogLevel(before_);
  return until_;
}

}  // namespace muster
