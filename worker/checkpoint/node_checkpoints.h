#ifndef MUSTER_WORKER_CHECKPOINT_NODE_CHECKPOINTS_H_
#define MUSTER_WORKER_CHECKPOINT_NODE_CHECKPOINTS_H_

#include <string>

#include "absl/status/statusor.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/comm.h"

namespace muster {

// Collective. As OpenCheckpoint, where every node has a disk of its own. Takes `dir`, or, if it is
// empty, the newest numbered checkpoint of `folder` of which every file is there on some node.
// Nodes that lack files fetch them from those that have them, so that on return every node has the
// whole checkpoint. The fetched files go through the communicator in pieces of 8 MiB and are
// checked against the manifest; a crash in between leaves what was there.
//
// `in_parts`: for ranks that read parts of the files. Nothing is fetched then, and no folder
// changes: the reader is one in parts (StateReader::InParts), unless every node has all files.
//
// Files that are there are not read: the reader checks what it reads. Of the folders `damaged`, in
// which it found damage, all nodes read all files, and replace damaged ones by copies of other
// nodes; in parts, they take what they need of these from other nodes.
//
// `registrar`, `damaged` and `tried` as in OpenCheckpoint, where all nodes turn out to share one
// file system.
//
// Errors, the same on every rank: NOT_FOUND if no node has such a checkpoint; DATA_LOSS naming the
// files that no node has and the node that wrote them; without `dir` ABORTED if other processes
// remove what is found on some node; those of writing, with the rank.
absl::StatusOr<StateReader> OpenCheckpointOnNodes(
    Comm& comm, const std::string& dir, const CheckpointFolder& folder, const NodeGroups& groups,
    CheckpointRegistrar* registrar = nullptr, const std::vector<std::string>& damaged = {},
    std::string* tried = nullptr, bool in_parts = false);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_NODE_CHECKPOINTS_H_
