#ifndef MUSTER_WORKER_CHECKPOINT_STAGED_SAVE_H_
#define MUSTER_WORKER_CHECKPOINT_STAGED_SAVE_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/node_group.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/seal_chain.h"
#include "worker/collective/comm.h"

namespace muster {

class Disposal;

// One checkpoint that all ranks are writing: a staging folder on each disk, and the steps that turn
// them into one checkpoint. With one shared file system rank 0 has the only folder. With a disk in
// every node, each node's leader has one, which gets the files of that node's ranks and the
// manifest of all files.
//
// The nodes publish in two phases: first every folder is whole and durable under its temporary
// name, then every leader moves it into its place, and only when all have done so do they remove
// what it replaced. After a crash in between, SettleNodes() finishes or undoes the step.
//
// Not thread-safe. Destroyed without Publish(), it removes the staging folders.
class StagedSave {
 public:
  // Collective. `dir` may differ between nodes. `groups`: from FindNodeGroups(), or
  // NodeGroups::Shared(). `replaces`: as in Staging::Create. `folder_mu`, if not null, is held
  // while this process changes folders, and never during a collective. `disposal`, if not null, is
  // waited for, because the disk has room for only one checkpoint more, and because the folders
  // that it removes must not be mistaken for those of a dead writer. Errors, the same on every
  // rank: those of Staging::Create on a leader.
  static absl::StatusOr<StagedSave> Begin(Comm& comm, const std::string& dir, NodeGroups groups,
                                          bool replaces, Disposal* disposal,
                                          Mutex* folder_mu = nullptr);

  StagedSave(StagedSave&&) = default;
  StagedSave& operator=(StagedSave&&) = delete;

  // The staging folder of this rank's disk.
  const std::string& path() const { return path_; }
  const NodeGroups& groups() const { return groups_; }

  // Whether the staging folder exists for this rank.
  absl::Status CheckVisible() const;

  // Collective. Makes the staged files of all ranks a checkpoint on every disk, and removes older
  // ones. `written`: whether this rank has written its files, which are `mine`. Fills in the fields
  // of `publication` that this object knows. The registrar is used for one file system only: with a
  // disk in every node the folders alone count. Errors, the same on every rank: the first, with its
  // rank.
  absl::Status Publish(Comm& comm, Publication publication, const absl::Status& written,
                       const std::vector<ManifestFile>& mine);

 private:
  StagedSave(NodeGroups groups, Mutex* folder_mu) : groups_(std::move(groups)), mu_(folder_mu) {}

  // Publishes on several disks.
  absl::Status PublishOnNodes(Comm& comm, const Publication& publication,
                              std::vector<ManifestFile> files);
  ChainEnd PreviousOnNodes(Comm& comm, const std::string& path) const;
  // Writes the same record on every disk after the publication, and not earlier because a node that
  // has only a part under a temporary name must not look sealed. The checkpoint exists even without
  // the record.
  void SealOnNodes(Comm& comm, const Publication& publication,
                   const std::vector<ManifestFile>& files, const ChainEnd& previous);

  NodeGroups groups_;
  Mutex* mu_;
  std::optional<Staging> staging_;  // on leaders only
  std::string path_;
};

// Checks, before anything is written, whether a save on these disks can be what `options` ask for.
// The same on every rank. Errors: FAILED_PRECONDITION.
absl::Status CheckPublishable(const NodeGroups& groups, const PublishOptions& options);

// Collective; does nothing on one shared file system. After a crash between the phases of a
// publication, some nodes have the new checkpoint at `dir` and others still the former one: puts
// the checkpoint that all nodes have, the later one if there are two, into its place everywhere.
// Changes nothing if there is none; OpenCheckpointOnNodes() then says what is missing.
absl::Status SettleNodes(Comm& comm, const std::string& dir, const NodeGroups& groups);

// Collective. Removes the oldest numbered checkpoints on every node, so that `keep` (>= 1) are left
// of those that every node has. Also removes incomplete ones that are older than those. Keeps those
// whose step is a multiple of `keep_every` (0: none). `disposal`: as for RemoveCheckpoint.
absl::Status RotateOnNodes(Comm& comm, const CheckpointFolder& folder, const NodeGroups& groups,
                           int keep, int64_t keep_every = 0, Mutex* folder_mu = nullptr,
                           Disposal* disposal = nullptr);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_STAGED_SAVE_H_
