#ifndef MUSTER_WORKER_CHECKPOINT_UNFINISHED_SAVES_H_
#define MUSTER_WORKER_CHECKPOINT_UNFINISHED_SAVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/checkpoint/staging_folder.h"

namespace muster {

// A save that is being written, or that its writer has left; not a checkpoint yet.
struct UnfinishedSave {
  std::string path;        // its folder, DIR.tmp-...
  std::string checkpoint;  // DIR, the name that it is to get
  FolderWriter writer = FolderWriter::kUnknown;
  // All of it is written, and the registry has sealed it: only its name is missing. If its writer
  // is gone, a load without a directory renames it if the name is that of a numbered checkpoint and
  // no newer checkpoint has it, or if the job's coordinator knows it; so do the next save in the
  // folder and `muster checkpoints prune`, if no other checkpoint has the name.
  bool sealed = false;
  // All of it is written, and only the registry knows whether it is sealed: no save removes it.
  bool asked = false;
  uint64_t bytes = 0;  // its size on the disk; room is reserved before it is written
  absl::Time changed;  // the last write to any of its files, by the clock of the file system
};

// Returns the unfinished saves of the checkpoints in `root`, in the order of their names: of
// numbered ones, and of those that programs have named, if they are locked or have a manifest or
// record. Changes nothing, and does not interfere with a save. Empty if there is no such folder.
// Errors: those of ListDirectory.
absl::StatusOr<std::vector<UnfinishedSave>> UnfinishedSavesIn(const std::string& root);

// Returns the unfinished saves of the checkpoint `dir`; for a symbolic link to a folder, those of
// that folder. None if this process may not list the folder that contains `dir`.
absl::StatusOr<std::vector<UnfinishedSave>> UnfinishedSavesOf(const std::string& dir);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_UNFINISHED_SAVES_H_
