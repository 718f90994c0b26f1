#ifndef MUSTER_BASE_PEAK_GROWTH_H_
#define MUSTER_BASE_PEAK_GROWTH_H_

#include <sys/resource.h>

#include <cstdint>
#include <limits>

namespace muster {

// Measures by how much the peak memory of the process grows, for tests of code that reads bytes
// that others wrote. The address sanitizer keeps freed memory: with it, nothing is measured.
class PeakGrowth {
 public:
  bool IsAtMost(int64_t bytes) const { return Peak() - before_ <= bytes; }

 private:
  static int64_t Peak() {
#ifdef __SANITIZE_ADDRESS__
    return 0;
#else
    rusage usage = {};
    return getrusage(RUSAGE_SELF, &usage) == 0 ? int64_t{usage.ru_maxrss} * 1024
                                               : std::numeric_limits<int64_t>::max();
#endif
  }

  const int64_t before_ = Peak();
};

}  // namespace muster

#endif  // MUSTER_BASE_PEAK_GROWTH_H_
