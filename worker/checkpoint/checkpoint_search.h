#ifndef MUSTER_WORKER_CHECKPOINT_CHECKPOINT_SEARCH_H_
#define MUSTER_WORKER_CHECKPOINT_CHECKPOINT_SEARCH_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/comm.h"

namespace muster {

// A load finds, opens and reads a checkpoint while other processes may rename or remove
// checkpoints. If the checkpoint has moved meanwhile, the load searches again, this many times in
// all.
inline constexpr int kCheckpointSearches = 3;

struct WantedCheckpoint {
  std::string dir;  // empty: the newest of `folder`
  CheckpointFolder folder;
  NodeGroups groups;                         // see GroupsOf()
  CheckpointRegistrar* registrar = nullptr;  // borrowed; may be null
  // Whether `read` can read a checkpoint in parts (OpenCheckpointOnNodes).
  bool in_parts = false;
};

// Collective. Opens the checkpoint on every rank (OpenCheckpointOnNodes) and calls `read`, also a
// collective, which reads what it needs, changes nothing, and returns the same on every rank. If no
// directory is named, damaged checkpoints are skipped and reported to the registry; where nodes
// have disks of their own, all nodes verify their files first, also those of a named checkpoint. A
// checkpoint that is read before it has its name does not move while `read` runs (HoldInPlace).
//
// Errors, the same on every rank: those of opening, such as NOT_FOUND if there is none; those of
// `read`; UNAVAILABLE if the checkpoint that is found or named moves or is replaced in each of
// kCheckpointSearches searches, or has disappeared.
absl::StatusOr<StateReader> OpenAndReadCheckpoint(
    Comm& comm, const WantedCheckpoint& wanted,
    absl::FunctionRef<absl::Status(StateReader& reader)> read);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_CHECKPOINT_SEARCH_H_
