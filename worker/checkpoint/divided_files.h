#ifndef MUSTER_WORKER_CHECKPOINT_DIVIDED_FILES_H_
#define MUSTER_WORKER_CHECKPOINT_DIVIDED_FILES_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/manifest.h"

namespace muster {

// Files of a checkpoint that several ranks write together, because no rank has, or should have, the
// memory for all of it: each tensor is whole in the file of one rank. The files are named like the
// shards of a Hugging Face model, so that readers of those accept them. Pure.

// A tensor, by its size.
struct SizedTensor {
  std::string name;
  int64_t bytes = 0;
};

struct DividedFile {
  int rank = 0;  // its writer
  std::vector<std::string> tensors;
};

// The memory that one rank at a time needs for a file when it loads.
inline constexpr int64_t kMaxDividedBytes = 512 << 20;

// Decides which rank writes which tensors: the largest first, each to the rank that has least so
// far. So no rank has more than the average plus the largest tensor. A file is closed before it
// grows beyond `max_bytes`; a larger tensor has a file of its own. Files are in the order of ranks,
// the tensors of a file in the order of `tensors`; a rank without tensors has no file. The same on
// every rank.
std::vector<DividedFile> DivideTensors(const std::vector<SizedTensor>& tensors, int ranks,
                                       int64_t max_bytes = kMaxDividedBytes);

// The name of part `index` (from 0) of `count` of "model.safetensors":
// "model-00001-of-00004.safetensors".
std::string PartFileName(absl::string_view name, size_t index, size_t count);
// "model.safetensors.index.json": which part has which tensor (EncodeShardIndex).
std::string IndexFileName(absl::string_view name);

// Returns the parts of the file `name` that a checkpoint holds, in order; none if it is not
// divided. Errors: DATA_LOSS naming a missing part.
absl::StatusOr<std::vector<std::string>> PartsOf(const Manifest& manifest, absl::string_view name);

// Returns the files that a model consists of: `name`, or its parts; none if there is no such model.
absl::StatusOr<std::vector<std::string>> FilesOfModel(const Manifest& manifest,
                                                      absl::string_view name);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DIVIDED_FILES_H_
