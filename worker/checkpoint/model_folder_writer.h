#ifndef MUSTER_WORKER_CHECKPOINT_MODEL_FOLDER_WRITER_H_
#define MUSTER_WORKER_CHECKPOINT_MODEL_FOLDER_WRITER_H_

#include <cstdint>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/owned_fd.h"
#include "worker/checkpoint/safetensors_format.h"
#include "worker/checkpoint/shard_plan.h"

namespace muster {

// Returns ALREADY_EXISTS if the folder is a checkpoint: its manifest has the size and the digest of
// each of its files, and no reader would accept files that replace them.
absl::Status CheckNoCheckpoint(const std::string& folder);

// Writes a model into a folder as Hugging Face's save_model does, without torch and tensor by
// tensor in any order: model.safetensors, or shards with model.safetensors.index.json; metadata
// {"format": "pt"}. Other files in the folder stay; the shards and index of an earlier model are
// removed.
//
// The parent folders are synced before the folder is written to (MakeLastingFolder).
//
// Files are written and synced under a hidden folder first and moved in by Finish(); a crash during
// the moves leaves no index rather than one that mixes two models. Without Finish() nothing
// changes, but Begin() removes the hidden folders of writers that were killed. Blocks on the disk.
// Not thread-safe.
class ModelFolderWriter {
 public:
  // `tensors`: names, types and shapes, in the order in which shards are filled; their ranges are
  // ignored. Errors: those of CheckNoCheckpoint, LayOutSafetensors and PlanShards;
  // FAILED_PRECONDITION if `folder` is a file; those of the disk.
  static absl::StatusOr<std::unique_ptr<ModelFolderWriter>> Begin(
      const std::string& folder, const std::vector<SafetensorsEntry>& tensors,
      int64_t max_shard_bytes);
  ~ModelFolderWriter();
  ModelFolderWriter(const ModelFolderWriter&) = delete;
  ModelFolderWriter& operator=(const ModelFolderWriter&) = delete;

  // Writes the data of a tensor, or a part of it that begins at its byte `offset`. Each byte must
  // be written exactly once.
  absl::Status Write(absl::string_view name, uint64_t offset, absl::string_view bytes);
  // Errors: FAILED_PRECONDITION naming a file that lacks data; those of CheckNoCheckpoint and of
  // the disk.
  absl::Status Finish();

  // Returns the names of the files that Finish() leaves in the folder; the index is last, if there
  // is one.
  std::vector<std::string> FileNames() const;

 private:
  struct File {
    std::string name;
    SafetensorsLayout layout;
    uint64_t missing = 0;  // bytes of data
    OwnedFd fd;            // while it is being written
  };
  struct Place {
    size_t file = 0;
    uint64_t begin = 0, end = 0;  // in the data of the file
  };

  ModelFolderWriter(std::string folder, ShardPlan plan);
  absl::Status LayOut(const std::vector<SafetensorsEntry>& tensors);
  absl::Status Open(File* file) const;
  static absl::Status Close(File* file);
  absl::Status MoveIn() const;

  const std::string folder_;
  std::string scratch_;
  OwnedFd lock_;  // lock of scratch_, which shows that its writer is alive
  const ShardPlan plan_;
  std::vector<File> files_;
  std::map<std::string, Place, std::less<>> places_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MODEL_FOLDER_WRITER_H_
