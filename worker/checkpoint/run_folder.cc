#include "worker/checkpoint/run_folder.h"

#include <algorithm>
#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"

namespace muster {
namespace {

// Whether `folder` holds a checkpoint of torch.distributed.checkpoint.
bool HoldsDistributedCheckpoint(const std::string& folder) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
  return names.ok() && std::any_of(names->begin(), names->end(), [](const std::string& name) {
           return absl::EndsWith(name, ".distcp");
         });
}

// Returns the folder or one in it (pytorch_model_fsdp_0 in a state of Accelerate's) that holds one,
// of an optimizer excepted; empty if there is none.
std::string FindDistributedCheckpoint(const std::string& folder) {
  if (HoldsDistributedCheckpoint(folder)) return folder;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(folder);
  if (!names.ok()) return "";
  std::string first;
  for (const std::string& name : *names) {
    const std::string path = JoinPath(folder, name);
    if (absl::StartsWith(name, "optimizer") || !HoldsDistributedCheckpoint(path)) continue;
    if (absl::StartsWith(name, "pytorch_model")) return path;
    if (first.empty()) first = path;
  }
  return first;
}

}  // namespace

std::string CheckpointsInPlaceOfWeights(const std::string& folder) {
  for (const std::string& root : {folder, JoinPath(folder, "checkpoints")}) {
    const CheckpointFolder checkpoints(root);
    const absl::StatusOr<std::vector<int64_t>> numbers = checkpoints.Numbers();
    if (!numbers.ok() || numbers->empty()) continue;
    std::string example = checkpoints.PathOf(numbers->back());
    for (const int64_t number : *numbers) {
      // Name the newest one that seems whole.
      const std::string path = checkpoints.PathOf(number);
      if (PathExists(JoinPath(path, kManifestName))) example = path;
    }
    return absl::StrCat("; it holds checkpoints: name one, such as ", example,
                        " (`muster checkpoints list ", folder, "` shows all)");
  }
  const std::string distributed = FindDistributedCheckpoint(folder);
  if (distributed.empty()) return "";
  return absl::StrCat(
      "; ", distributed == folder ? "it is" : absl::StrCat("it holds ", distributed, ","),
      " a distributed checkpoint of torch (*.distcp): `accelerate merge-weights ", distributed,
      " OUT` in Python makes a file of its weights, which load_weights() and load_model() "
      "take");
}

}  // namespace muster
