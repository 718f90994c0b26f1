#ifndef MUSTER_WORKER_CHECKPOINT_UNFINISHED_SAVES_H_
#define MUSTER_WORKER_CHECKPOINT_UNFINISHED_SAVES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "worker/checkpoint/staging_folder.h"

namespace muster {

// A save that is being written, or that its writer has left: no checkpoint yet.
struct UnfinishedSave {
  std::string path;        // its folder, DIR.tmp-...
  std::string checkpoint;  // what it is to be called, DIR
  FolderWriter writer = FolderWriter::kUnknown;
  // All of it is written, and the registry has sealed it: only its name is missing. If its writer
  // is gone it gets it from a load without a directory, where the name is that of a numbered
  // checkpoint and no newer one has it, or the job's coordinator knows it; and from the next save
  // in the folder, and from `muster checkpoints prune`, where no other one has it.
  bool sealed = false;
  // All of it is written, and only the registry knows whether it has sealed it: no save removes it.
  bool asked = false;
  uint64_t bytes = 0;  // that it takes on the disk; room is reserved before it is written
  absl::Time changed;  // when something in it was last written, by the clock of the file system
};

// Those of the checkpoints in `root`, in the order of their names: of numbered ones, and of those
// that programs have named, as far as they are locked or have a manifest or record. They change
// nothing and take no part in the save. Empty if there is no such folder. Errors: those of
// ListDirectory.
absl::StatusOr<std::vector<UnfinishedSave>> UnfinishedSavesIn(const std::string& root);

// Those of the checkpoint `dir`. Of a symbolic link to a folder: those of that folder. None where
// this process may not list the folder that `dir` is in.
absl::StatusOr<std::vector<UnfinishedSave>> UnfinishedSavesOf(const std::string& dir);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_UNFINISHED_SAVES_H_
