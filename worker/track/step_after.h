#ifndef MUSTER_WORKER_TRACK_STEP_AFTER_H_
#define MUSTER_WORKER_TRACK_STEP_AFTER_H_

#include <cstdint>
#include <limits>

namespace muster {

// Returns the step of an entry without one that follows an entry of `step`. The largest step is
// followed by itself.
inline int64_t StepAfter(int64_t step) {
  return step < std::numeric_limits<int64_t>::max() ? step + 1 : step;
}

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_STEP_AFTER_H_
