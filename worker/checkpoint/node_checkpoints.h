#ifndef MUSTER_WORKER_CHECKPOINT_NODE_CHECKPOINTS_H_
#define MUSTER_WORKER_CHECKPOINT_NODE_CHECKPOINTS_H_

#include <string>

#include "absl/status/statusor.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/comm.h"

namespace muster {

// Collective. Like OpenCheckpoint, for nodes with separate disks. Opens `dir` or, if that is empty,
// the newest numbered checkpoint of `folder` of which some node has each file. Nodes that lack
// files fetch them from those that have them, so that on return every node has the whole
// checkpoint. The fetched files go through the communicator in pieces of 8 MiB and are checked
// against the manifest; a crash in between leaves the previous files.
//
// `in_parts`: for ranks that read parts of the files. Nothing is fetched then, and no folder
// changes: the reader is one in parts (StateReader::InParts), unless every node has all files.
//
// Existing files are not read here, because the reader checks everything that it reads. For the
// folders in `damaged`, where it found damage, all nodes read all files and replace damaged ones
// with copies from other nodes; with `in_parts`, they get the parts that they need from other
// nodes.
//
// `registrar`, `damaged` and `tried`: as for OpenCheckpoint, which is used if all nodes turn out to
// share one file system.
//
// Errors, the same on every rank: NOT_FOUND if no node has such a checkpoint; DATA_LOSS naming the
// files that no node has and the node that wrote them; without `dir`, ABORTED if other processes
// remove the checkpoint that is found on some node; those of writing, with the rank.
absl::StatusOr<StateReader> OpenCheckpointOnNodes(
    Comm& comm, const std::string& dir, const CheckpointFolder& folder, const NodeGroups& groups,
    CheckpointRegistrar* registrar = nullptr, const std::vector<std::string>& damaged = {},
    std::string* tried = nullptr, bool in_parts = false);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_NODE_CHECKPOINTS_H_
