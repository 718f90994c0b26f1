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
// a tensor with several names under its first one. Other files in `dir` stay; the shards and index
// of an earlier save are removed. For one process. Blocks on the disk.
//
// Errors: those of WriteSafetensors; FAILED_PRECONDITION if `dir` is a file. Otherwise like
// ModelFolderWriter.
absl::Status SaveModelFiles(const std::string& dir, const NamedTensors& tensors,
                            int64_t max_shard_bytes = 10'000'000'000);

// Writes the data of a tensor that was declared to `writer`; copies it if it is on a device or has
// gaps. Throws c10::Error if a copy from a device fails.
absl::Status WriteTensor(ModelFolderWriter& writer, const std::string& name,
                         const at::Tensor& tensor);

// A model's open files: finds tensors by name in any of the files.
class ModelFiles {
 public:
  // `path`: a safetensors file, an index (.json), or a folder with model.safetensors or exactly one
  // *.index.json. Checks that every file exists and holds the tensors that the index places in it.
  // Errors: NOT_FOUND naming the missing file or tensor; INVALID_ARGUMENT as for
  // ReadSafetensorsHeader and ParseShardIndex.
  static absl::StatusOr<ModelFiles> Open(const std::string& path);

  // Returns all names, sorted.
  std::vector<std::string> Names() const;

  // Like those of SafetensorsReader.
  absl::StatusOr<at::Tensor> Read(absl::string_view name) const;
  absl::StatusOr<at::Tensor> Map(absl::string_view name) const;
  // Returns shape and type without reading data; null if there is no such tensor.
  const SafetensorsEntry* Find(absl::string_view name) const;

 private:
  const SafetensorsReader* ReaderOf(absl::string_view name) const;

  std::string path_;
  std::vector<SafetensorsReader> readers_;
  std::vector<std::pair<std::string, size_t>> places_;  // sorted by name; index into readers_
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MODEL_FILES_H_
