#ifndef MUSTER_WORKER_CHECKPOINT_FOREIGN_STATE_H_
#define MUSTER_WORKER_CHECKPOINT_FOREIGN_STATE_H_

#include <string>

#include "absl/status/status.h"
#include "worker/checkpoint/folder.h"

namespace muster {

// What lies where a load looks for a checkpoint and finds none. All block on the disk; what cannot
// be read counts as absent.

// The name of an entry of `dir` that Accelerate's save_state() writes and Muster's does not, such
// as "optimizer.bin" or "random_states_0.pkl"; empty: there is none.
std::string FileOfAccelerate(const std::string& dir);

// For a load of `dir` or, if that is empty, of the newest checkpoint in `folder`, which has found
// no checkpoint. FAILED_PRECONDITION if a state of Accelerate's is there instead (in `folder`: and
// no numbered folder holds a manifest), which names it and says how to get its weights.
absl::Status CheckNoStateOfAccelerate(const std::string& dir, const CheckpointFolder& folder);

// Whether `dir` is something other than an empty folder: a save refuses to put a checkpoint there.
bool IsOccupied(const std::string& dir);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FOREIGN_STATE_H_
