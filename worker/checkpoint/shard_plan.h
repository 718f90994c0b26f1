#ifndef MUSTER_WORKER_CHECKPOINT_SHARD_PLAN_H_
#define MUSTER_WORKER_CHECKPOINT_SHARD_PLAN_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// Divides the tensors of a model into files as Hugging Face's libraries do, so that their readers
// and ours accept each other's files. Pure.

// The names of the files of a model in a folder of its own: model.safetensors and its shards.
inline constexpr char kModelStem[] = "model";
inline constexpr char kModelExtension[] = ".safetensors";

struct TensorToShard {
  std::string name;
  uint64_t bytes = 0;
  // Tensors with the same non-empty storage are one tensor under several names.
  std::string storage;
};

struct ShardPlanOptions {
  // A file is closed before it would grow beyond this; a larger tensor gets its own file.
  int64_t max_shard_bytes = 10'000'000'000;
  // Keep only the first of several names of one tensor, as safetensors files of models do.
  // Otherwise all names go to the file of the first.
  bool keep_first_name_only = true;
  // model.safetensors, model-00001-of-00002.safetensors, model.safetensors.index.json; or
  // pytorch_model and .bin.
  std::string stem = kModelStem;
  std::string extension = kModelExtension;
};

struct ShardPlan {
  struct File {
    std::string name;
    std::vector<std::string> tensors;
  };
  // At least one, also for a model without tensors.
  std::vector<File> files;
  // Each shared tensor counted once.
  uint64_t total_bytes = 0;
  // Name of the index; none if there is one file.
  std::optional<std::string> index_name;
};

// Errors: INVALID_ARGUMENT for a negative limit or a repeated name.
absl::StatusOr<ShardPlan> PlanShards(const std::vector<TensorToShard>& tensors,
                                     const ShardPlanOptions& options);

// Returns the index of a plan: {"metadata": {"total_size": N}, "weight_map": {name: file}},
// indented by 2, with sorted keys and a newline at the end.
std::string EncodeShardIndex(const ShardPlan& plan);

// Parses an index (with "weight_map", or the bare map) into pairs of name and file, sorted by name.
// Errors: INVALID_ARGUMENT naming `source`, and what it is if it is another kind of JSON, also for
// a file name that leaves the folder.
absl::StatusOr<std::vector<std::pair<std::string, std::string>>> ParseShardIndex(
    absl::string_view text, absl::string_view source);

// Whether `name` is a file that a model of this stem and extension may consist of: the single file,
// a shard, or the index. For removing the files of an earlier save.
bool IsShardFileName(absl::string_view name, absl::string_view stem, absl::string_view extension);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SHARD_PLAN_H_
