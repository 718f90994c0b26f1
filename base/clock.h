#ifndef MUSTER_BASE_CLOCK_H_
#define MUSTER_BASE_CLOCK_H_

#include "absl/time/time.h"

namespace muster {

// A source of the time. Thread-safe. Cores never hold a clock: they take `now`.
class Clock {
 public:
  virtual ~Clock() = default;

  // Monotonic time: never goes back, unrelated to the calendar except that it starts at the wall
  // time of process start. Use it for leases, deadlines and periods.
  virtual absl::Time Now() const = 0;

  // Calendar time, for reports only. May jump.
  virtual absl::Time WallNow() const = 0;

  // The machine's clock. Never destroyed.
  static const Clock& Real();
};

}  // namespace muster

#endif  // MUSTER_BASE_CLOCK_H_
