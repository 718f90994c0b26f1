#include "muster/checkpoint.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/home_path.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

// A checkpoint's manifest knows the size and the digest of each of its files.
absl::Status CheckNoFileOfCheckpoint(const std::string& path) {
  const absl::StatusOr<Manifest> manifest = ReadManifest(ParentPath(path));
  if (!manifest.ok()) return absl::OkStatus();  // there is none
  const std::string name = BaseName(path);
  if (manifest->Find(name) == nullptr && name != kManifestName && name != kSealName) {
    return absl::OkStatus();
  }
  return absl::AlreadyExistsError(absl::StrCat(
      path, " is a file of a checkpoint, which this would damage: write to another file"));
}

}  // namespace

std::map<std::string, at::Tensor> LoadTensors(const std::string& path) {
  const absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::Open(WithHome(path));
  ThrowIfError(reader.status());
  absl::StatusOr<NamedTensors> tensors = reader->ReadAll();
  ThrowIfError(tensors.status());
  std::map<std::string, at::Tensor> by_name;
  for (auto& [name, tensor] : *tensors) by_name.emplace(std::move(name), std::move(tensor));
  return by_name;
}

absl::Status SaveTensors(const std::string& given,
                         const std::map<std::string, at::Tensor>& tensors) {
  const std::string path = WithHome(given);
  if (absl::Status status = CheckNoFileOfCheckpoint(path); !status.ok()) return status;
  const NamedTensors list(tensors.begin(), tensors.end());
  return WriteSafetensors(path, list,
                          {.metadata = SafetensorsMetadata{{"format", "pt"}},
                           .shared = SharedTensors::kWriteAll})
      .status();
}

}  // namespace muster
