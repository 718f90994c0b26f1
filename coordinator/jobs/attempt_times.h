#ifndef MUSTER_COORDINATOR_JOBS_ATTEMPT_TIMES_H_
#define MUSTER_COORDINATOR_JOBS_ATTEMPT_TIMES_H_

#include <cstdint>

#include "absl/time/time.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::coordinator {

// The stages of an attempt, in the order of v1::AttemptTimes.
enum class AttemptStage {
  kPlaced,
  kSealed,
  kRestored,
  kStepped,
  kFailed,
  kDetected,
  kDecided,
  kFenced,
};

// Returns the latest of `times` in Unix milliseconds; 0 if there is none.
int64_t LatestOf(const v1::AttemptTimes& times);

struct StageNews {
  AttemptStage stage;
  absl::Time at;           // reports of past times may be wrong, or infinite: limited by NoteStage
  absl::Time now;          // the time on the coordinator's clock
  int64_t not_before = 0;  // the latest time of the attempt before, in Unix milliseconds
  bool as_told = false;    // a mutant: `at` is not limited
};

// Records that an attempt has reached a stage. Returns whether `times` has changed. Pure.
//
// `times` stays in order: `at` is limited by the stages before and after, and by `now`. If the
// clock shows less than a recorded time, it was set back; then the time is unknown, and nothing is
// recorded. The first report of each stage counts, except:
// - kSealed: the last report before the state is loaded. An attempt that continues after a failure
//   without being stopped has not failed.
// - kFailed: the earliest time. It may be reported after kDetected and kDecided, because a node
//   reports its processes only when none of them is left.
bool NoteStage(const StageNews& news, v1::AttemptTimes* times);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_ATTEMPT_TIMES_H_
