#include "muster/weights.h"

#include "torch/csrc/jit/api/module.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

absl::StatusOr<LoadedWeights> Load(const std::string& path, const NamedTensors& targets,
                                   const LoadWeightsOptions& options) {
  absl::StatusOr<LoadedWeights> loaded = LoadedWeights();
  const absl::Status status = Guard([&] { loaded = LoadWeights(path, targets, options); });
  if (!status.ok()) return status;
  return loaded;
}

}  // namespace

absl::StatusOr<LoadedWeights> load_model(torch::nn::Module& model, const std::string& path,
                                         const LoadWeightsOptions& options) {
  NamedTensors targets;
  for (const auto& tensors : {model.named_parameters(), model.named_buffers()}) {
    for (const auto& item : tensors) {
      if (item.value().defined()) targets.emplace_back(item.key(), item.value());
    }
  }
  return Load(path, targets, options);
}

absl::StatusOr<LoadedWeights> load_model(const torch::jit::Module& model, const std::string& path,
                                         const LoadWeightsOptions& options) {
  NamedTensors targets;
  for (const auto& item : model.named_parameters()) targets.emplace_back(item.name, item.value);
  for (const auto& item : model.named_buffers()) targets.emplace_back(item.name, item.value);
  return Load(path, targets, options);
}

}  // namespace muster
