#include "client/checkpoints/newest_checkpoint.h"

#include <cstdint>
#include <vector>

#include "base/status_macros.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/seal.h"

namespace muster::client {

absl::StatusOr<std::optional<FoundCheckpoint>> NewestCheckpoint(const std::string& folder) {
  const CheckpointFolder checkpoints(folder);
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, checkpoints.Numbers());
  for (auto number = numbers.rbegin(); number != numbers.rend(); ++number) {
    const std::string path = checkpoints.PathOf(*number);
    const absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(path);
    // A checkpoint whose record is damaged may be held back.
    if (seal.ok() ? !seal->promoted : StaysUnreadable(seal.status())) continue;
    if (!seal.ok() && !absl::IsNotFound(seal.status())) return seal.status();
    const absl::StatusOr<Manifest> manifest = ReadManifest(path);
    if (manifest.ok()) return FoundCheckpoint{path, manifest->info.step};
    if (!absl::IsNotFound(manifest.status()) && !StaysUnreadable(manifest.status())) {
      return manifest.status();
    }
  }
  return std::nullopt;
}

}  // namespace muster::client
