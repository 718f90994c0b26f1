#include "muster/weights.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "torch/csrc/jit/api/module.h"
#include "worker/checkpoint/optional_tensors.h"
#include "worker/checkpoint/weight_files.h"
#include "worker/parallel/paged_storage.h"
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

// A paged tensor's values come from elsewhere: values written to its memory would be lost when that
// is freed, and a tensor with memory of its own would stay there, outside the ring or the shards.
absl::Status CheckIsInMemory(const NamedTensors& targets) {
  for (const auto& [name, tensor] : targets) {
    if (!IsPaged(tensor)) continue;
    return absl::FailedPreconditionError(absl::StrCat(
        Printable(name),
        " is offloaded or sharded: load the weights before the model is dispatched or prepared; "
        "load_checkpoint_and_dispatch() loads and offloads, and accelerator.load_weights() and "
        "load_state() load into a sharded model"));
  }
  return absl::OkStatus();
}

// Returns those of `tensors` that the file at `path` must have.
absl::StatusOr<NamedTensors> WantedOf(const torch::nn::Module& model, const NamedTensors& tensors,
                                      const std::string& path, const LoadWeightsOptions& options) {
  if (OptionalTensorsOf(model).empty()) return tensors;
  MUSTER_ASSIGN_OR_RETURN(const WeightFiles files, OpenWeights(path, options));
  std::vector<std::string> names;
  for (const WeightEntry& entry : files.entries()) names.push_back(entry.tensor.name);
  NamedTensors wanted = tensors;
  RemoveOptional(model, NamesInModel(names, options.prefix, options.rename), &wanted);
  return wanted;
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
  MUSTER_RETURN_IF_ERROR(CheckIsInMemory(targets));
  absl::StatusOr<NamedTensors> wanted = NamedTensors();
  absl::Status status = Guard([&] { wanted = WantedOf(model, targets, path, options); });
  if (status.ok()) status = wanted.status();
  if (!status.ok()) return status;
  absl::StatusOr<LoadedWeights> loaded = Load(path, *wanted, options);
  if (!loaded.ok() || !options.dtype.has_value()) return loaded;
  // Tensors that the file may lack are converted to the type, too.
  status = Guard([&] {
    for (const auto& [name, tensor] : targets) {
      if (!tensor.is_floating_point() || tensor.scalar_type() == *options.dtype) continue;
      at::Tensor(tensor).set_data(tensor.detach().to(*options.dtype));
    }
  });
  if (!status.ok()) return status;
  return loaded;
}

absl::StatusOr<LoadedWeights> load_model(const torch::jit::Module& model, const std::string& path,
                                         const LoadWeightsOptions& options) {
  NamedTensors targets;
  for (const auto& item : model.named_parameters()) targets.emplace_back(item.name, item.value);
  for (const auto& item : model.named_buffers()) targets.emplace_back(item.name, item.value);
  return Load(path, targets, options);
}

}  // namespace muster
