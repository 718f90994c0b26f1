#ifndef MUSTER_COORDINATOR_WEB_HISTOGRAM_H_
#define MUSTER_COORDINATOR_WEB_HISTOGRAM_H_

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <vector>

#include "absl/time/time.h"

namespace muster::coordinator {

// Durations counted in buckets of 1, 2, 5, 10, ... from 10 us to 50 s, and above. Thread-safe and
// wait-free.
class DurationHistogram {
 public:
  static constexpr int kBounds = 21;

  void Observe(absl::Duration duration) {
    const int64_t ns = absl::ToInt64Nanoseconds(duration);
    int bucket = 0;
    for (int64_t bound = 10'000; bucket < kBounds && ns > bound; ++bucket) {
      bound = (bucket % 3 == 1) ? bound / 2 * 5 : bound * 2;
    }
    counts_[bucket].fetch_add(1, std::memory_order_relaxed);
    sum_ns_.fetch_add(ns > 0 ? static_cast<uint64_t>(ns) : 0, std::memory_order_relaxed);
  }

  // Upper bounds in seconds, the same for all.
  static std::vector<double> BoundsInSeconds() {
    std::vector<double> bounds;
    int64_t bound = 10'000;
    for (int i = 0; i < kBounds; ++i) {
      bounds.push_back(static_cast<double>(bound) / 1e9);
      bound = (i % 3 == 1) ? bound / 2 * 5 : bound * 2;
    }
    return bounds;
  }
  std::vector<uint64_t> Counts() const {
    std::vector<uint64_t> counts;
    for (const auto& count : counts_) counts.push_back(count.load(std::memory_order_relaxed));
    return counts;
  }
  double SumSeconds() const {
    return static_cast<double>(sum_ns_.load(std::memory_order_relaxed)) / 1e9;
  }

 private:
  std::atomic<uint64_t> counts_[kBounds + 1] = {};
  std::atomic<uint64_t> sum_ns_{0};
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_WEB_HISTOGRAM_H_
