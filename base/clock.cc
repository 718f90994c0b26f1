#include "base/clock.h"

#include <chrono>

#include "absl/time/clock.h"

namespace muster {
namespace {

class RealClock final : public Clock {
 public:
  absl::Time Now() const override {
    return wall_origin_ + absl::FromChrono(std::chrono::steady_clock::now() - steady_origin_);
  }
  absl::Time WallNow() const override { return absl::Now(); }

 private:
  const std::chrono::steady_clock::time_point steady_origin_ = std::chrono::steady_clock::now();
  const absl::Time wall_origin_ = absl::Now();
};

}  // namespace

const Clock& Clock::Real() {
  static const RealClock* const clock = new RealClock;
  return *clock;
}

}  // namespace muster
