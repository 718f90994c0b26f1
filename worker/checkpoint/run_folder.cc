#include "worker/checkpoint/run_folder.h"

#include <cstdint>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"

namespace muster {

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
  return "";
}

}  // namespace muster
