#ifndef MUSTER_WEIGHTS_H_
#define MUSTER_WEIGHTS_H_

#include <concepts>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <utility>

#include "absl/status/statusor.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/any.h"
#include "torch/nn/pimpl.h"
#include "worker/checkpoint/weight_loader.h"

namespace torch::jit {
struct Module;
}

namespace muster {

// Loads pretrained weights: files of save_model, transformers, safetensors or torch.save.
//
//   Net net;
//   auto loaded = muster::load_model(net, "gpt2", {.prefix = "transformer."});
//   if (!loaded.ok()) return loaded.status();
//
// `path` is a folder (model.safetensors, its index, pytorch_model.bin or its index, in this order)
// or one of these files. Files of torch.save are read without executing code; they may contain only
// tensors in plain containers. Nested tensors have dotted names: read a file {"state_dict": {...}}
// with `.prefix = "state_dict."`. See docs/weights.md.
//
// Fills parameters and buffers on any device. For the rules, the report and the errors see
// LoadWeights in worker/checkpoint/weight_loader.h. Not collective: call it on every process,
// before prepare(): FAILED_PRECONDITION names a tensor that is offloaded or sharded already. Blocks
// on the disk. Not thread-safe for one model.
absl::StatusOr<LoadedWeights> load_model(torch::nn::Module& model, const std::string& path,
                                         const LoadWeightsOptions& options = {});
absl::StatusOr<LoadedWeights> load_model(const torch::jit::Module& model, const std::string& path,
                                         const LoadWeightsOptions& options = {});
inline absl::StatusOr<LoadedWeights> load_model(const torch::nn::AnyModule& model,
                                                const std::string& path,
                                                const LoadWeightsOptions& options = {}) {
  return load_model(*model.ptr(), path, options);
}
// The same for module holders, a shared_ptr to a module, and handles that prepare() returned.
template <class M>
requires requires(M& model) { static_cast<torch::nn::Module&>(*model); }
absl::StatusOr<LoadedWeights> load_model(M&& model, const std::string& path,
                                         const LoadWeightsOptions& options = {}) {
  return load_model(static_cast<torch::nn::Module&>(*model), path, options);
}

// The options of load_model with Accelerate's default. See there for their meaning.
struct LoadInModelOptions {
  bool strict = false;
  bool skip_mismatched = false;
  std::string prefix = "";
  std::function<std::string(const std::string&)> rename = nullptr;
  std::optional<at::ScalarType> dtype = std::nullopt;
};

// The same under Accelerate's name and with its default: missing and unexpected names are not
// errors but are listed in the result, also with {.dtype = torch::kBFloat16}.
template <class M>
absl::StatusOr<LoadedWeights> load_checkpoint_in_model(M&& model, const std::string& checkpoint,
                                                       const LoadInModelOptions& options = {}) {
  return load_model(std::forward<M>(model), checkpoint,
                    LoadWeightsOptions{.strict = options.strict,
                                       .skip_mismatched = options.skip_mismatched,
                                       .prefix = options.prefix,
                                       .rename = options.rename,
                                       .dtype = options.dtype});
}
// With a variable of load_model's options: as strict as these are.
template <class M, std::same_as<LoadWeightsOptions> O>
absl::StatusOr<LoadedWeights> load_checkpoint_in_model(M&& model, const std::string& checkpoint,
                                                       const O& options) {
  return load_model(std::forward<M>(model), checkpoint, options);
}

}  // namespace muster

#endif  // MUSTER_WEIGHTS_H_
