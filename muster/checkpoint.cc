#include "muster/checkpoint.h"

#include <utility>

#include "worker/checkpoint/safetensors.h"
#include "worker/train/guard.h"

namespace muster {

std::map<std::string, at::Tensor> LoadTensors(const std::string& path) {
  const absl::StatusOr<SafetensorsReader> reader = SafetensorsReader::Open(path);
  ThrowIfError(reader.status());
  absl::StatusOr<NamedTensors> tensors = reader->ReadAll();
  ThrowIfError(tensors.status());
  std::map<std::string, at::Tensor> by_name;
  for (auto& [name, tensor] : *tensors) by_name.emplace(std::move(name), std::move(tensor));
  return by_name;
}

absl::Status SaveTensors(const std::string& path,
                         const std::map<std::string, at::Tensor>& tensors) {
  const NamedTensors list(tensors.begin(), tensors.end());
  return WriteSafetensors(path, list,
                          {.metadata = SafetensorsMetadata{{"format", "pt"}},
                           .shared = SharedTensors::kWriteAll})
      .status();
}

}  // namespace muster
