#ifndef MUSTER_BASE_FAKE_CLOCK_H_
#define MUSTER_BASE_FAKE_CLOCK_H_

#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"

namespace muster {

// A clock that only the test advances. Thread-safe.
class FakeClock final : public Clock {
 public:
  explicit FakeClock(absl::Time start = absl::FromUnixSeconds(1'700'000'000)) : now_(start) {}

  absl::Time Now() const override {
    MutexLock lock(&mu_);
    return now_;
  }
  absl::Time WallNow() const override { return Now(); }

  void Advance(absl::Duration by) {
    MutexLock lock(&mu_);
    now_ += by;
  }

 private:
  mutable Mutex mu_;
  absl::Time now_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster

#endif  // MUSTER_BASE_FAKE_CLOCK_H_
