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
  // `read` can read one in parts (OpenCheckpointOnNodes).
  bool in_parts = false;
};

// Collective. Opens the checkpoint on every rank (OpenCheckpointOnNodes) and calls `read`,
// collective too, which reads what it needs of it, changes nothing, and returns the same on every
// rank. Without a directory damaged ones are passed over, and the registry learns of them; where
// nodes have disks of their own, all nodes verify their files first, of a named one too. What is
// read without its name stays so while `read` runs (HoldInPlace).
//
// Errors, the same on every rank: those of opening, such as NOT_FOUND if there is none; of `read`;
// UNAVAILABLE if what is found or was named moves or is replaced in each of kCheckpointSearches
// searches, or there is nothing any more where something was.
absl::StatusOr<StateReader> OpenAndReadCheckpoint(
    Comm& comm, const WantedCheckpoint& wanted,
    absl::FunctionRef<absl::Status(StateReader& reader)> read);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_CHECKPOINT_SEARCH_H_
