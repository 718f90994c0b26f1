#ifndef MUSTER_WORKER_CHECKPOINT_MODEL_FILES_H_
#define MUSTER_WORKER_CHECKPOINT_MODEL_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "worker/checkpoint/model_folder_writer.h"
#include "worker/checkpoint/safetensors.h"

namespace muster {

// Writes a model's tensors into `dir` as Hugging Face's save_model does: model.safetensors, or
// shards of at most `max_shard_bytes` with model.safetensors.index.json; metadata {"format": "pt"};
// of a tensor with several names the first. Other files in `dir` stay; shards and index of an
// earlier save go. For one process. Blocks on the disk.
//
// As ModelFolderWriter. Errors: as WriteSafetensors; FAILED_PRECONDITION if `dir` is a file.
absl::Status SaveModelFiles(const std::string& dir, const NamedTensors& tensors,
                            int64_t max_shard_bytes = 10'000'000'000);

// Writes the data of a tensor that was declared to `writer`; copies it if it is on a device or has
// gaps. Throws c10::Error if a copy from a device fails.
absl::Status WriteTensor(ModelFolderWriter& writer, const std::string& name,
                         const at::Tensor& tensor);

// A model's files, opened: finds tensors by name in any of the files.
class ModelFiles {
 public:
  // `path`: a safetensors file, an index (.json), or a folder with model.safetensors or exactly one
  // *.index.json. Checks that every file is there and holds the tensors that the index places in
  // it. Errors: NOT_FOUND that names the missing file or tensor; INVALID_ARGUMENT as
  // ReadSafetensorsHeader and ParseShardIndex.
  static absl::StatusOr<ModelFiles> Open(const std::string& path);

  // All names, sorted.
  std::vector<std::string> Names() const;

  // As SafetensorsReader.
  absl::StatusOr<at::Tensor> Read(absl::string_view name) const;
  absl::StatusOr<at::Tensor> Map(absl::string_view name) const;
  // Shape and type without reading data; null if there is no such tensor.
  const SafetensorsEntry* Find(absl::string_view name) const;

 private:
  const SafetensorsReader* ReaderOf(absl::string_view name) const;

  std::string path_;
  std::vector<SafetensorsReader> readers_;
  std::vector<std::pair<std::string, size_t>> places_;  // sorted by name; index into readers_
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MODEL_FILES_H_
