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

// The latest time of `times`, in Unix milliseconds; 0: there is none.
int64_t LatestOf(const v1::AttemptTimes& times);

struct StageNews {
  AttemptStage stage;
  absl::Time at;           // what is said of the past may be wrong, or infinite: it is limited
  absl::Time now;          // by the coordinator's clock
  int64_t not_before = 0;  // Unix milliseconds: of the attempt before
  bool as_told = false;    // a mutant: `at` is not limited
};

// Notes that an attempt has reached a stage. Returns whether `times` has changed. Pure.
//
// `times` stays in order: `at` is limited by the stages before and after, and by `now`. A clock
// that shows less than what is noted already has gone back: then the time is not known, and nothing
// is noted. Each stage counts once, except:
// - kSealed: the last one before the state is loaded. An attempt that goes on after a failure
//   without being stopped has not failed.
// - kFailed: the earliest. It may come after kDetected and kDecided, since a node reports its
//   processes when nothing of them is left.
bool NoteStage(const StageNews& news, v1::AttemptTimes* times);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_ATTEMPT_TIMES_H_
