#ifndef MUSTER_BIGMODEL_H_
#define MUSTER_BIGMODEL_H_

#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <variant>

#include "absl/status/statusor.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/bigmodel/device_map.h"
#include "worker/bigmodel/dispatch.h"
#include "worker/bigmodel/empty_weights.h"

namespace muster {

// Models larger than the available memory: constructed without weights, divided among GPUs, the
// host's memory and the disk by a plan, loaded straight to their places, and run while weights
// stream through a ring of memory.
//
//   auto net = muster::init_empty_weights([&] { return Net(config); });
//   auto model = muster::load_checkpoint_and_dispatch(
//       net, "llama", "auto", {.max_memory = {{"cpu", 4e9}}, .no_split = {"Block"}});
//   if (!model.ok()) return model.status();
//   torch::NoGradGuard no_grad;
//   at::Tensor out = net->forward(ids);  // while *model lives
//
// For inference, with any torch::nn module. Pass inputs on model->main_device(); with several GPUs,
// results are on the GPU of the last weight. See docs/bigmodel.md. Everything blocks on the disk.
// Not thread-safe for one model, except that several threads may run its forward() at the same
// time.

// Constructs a module whose parameters are on the meta device, without allocating memory or drawing
// random numbers. `make` returns a module holder or a pointer to a module. Buffers have the values
// that the constructor computes, unless `.include_buffers` is set. For the rules see
// EmptyWeightsScope in worker/bigmodel/empty_weights.h.
template <class Make>
auto init_empty_weights(Make&& make, const EmptyWeightsOptions& options = {}) {
  return InitEmptyWeights(std::forward<Make>(make), options);
}

// "auto", "balanced", "balanced_low_0" or "sequential"; or a device ("0", "cpu", "disk") for each
// module or tensor by name, where "" stands for everything not named.
using DeviceMapChoice = std::variant<std::string, DeviceEntries>;

// Returns the bytes of each tensor and module by full name, where "" is the whole model. Tied
// tensors count once, under their first name. A tensor in `special_dtypes` counts with the type
// there; any other floating-point tensor with the smaller of `dtype` and its own. Errors:
// INVALID_ARGUMENT for a special type of no tensor.
absl::StatusOr<std::map<std::string, int64_t>> compute_module_sizes(
    const torch::nn::Module& model, std::optional<at::ScalarType> dtype = std::nullopt,
    const std::map<std::string, at::ScalarType>& special_dtypes = {});

// Parses "0=20GB,cpu=30GB" into bytes by device. For an empty text returns what this process can
// have: the free memory of each GPU, and as much host memory as the machine, its cgroup and the
// process's limits leave.
absl::StatusOr<DeviceLimits> get_max_memory(const std::string& text = "");

// Returns the limits that divide the model evenly among GPUs.
absl::StatusOr<DeviceLimits> get_balanced_memory(const torch::nn::Module& model,
                                                 const DevicePlanOptions& options = {},
                                                 bool low_zero = false);

// Chooses a device for each part of the model, without allocating memory. Errors: those of
// PlanDevices in worker/bigmodel/dispatch.h.
absl::StatusOr<DeviceMap> infer_auto_device_map(const torch::nn::Module& model,
                                                const DevicePlanOptions& options = {});

// Returns OK if the map fits the model; the error names what does not.
absl::Status check_device_map(const torch::nn::Module& model, const DeviceEntries& devices);

// How load_checkpoint_and_dispatch plans and loads.
struct BigModelOptions {
  // For the plan.
  DeviceLimits max_memory = {};
  std::set<std::string> no_split = {};
  // Converts floating-point tensors to this type, but not the buffers of `keep_buffers`; by default
  // the model keeps its own.
  std::optional<at::ScalarType> dtype = std::nullopt;
  bool offload_buffers = false;
  // For loading: missing or unexpected names are an error.
  bool strict = true;
  // Buffers that the files lack keep their values and types, even with `strict`; they are listed as
  // missing.
  bool keep_buffers = true;
  std::string prefix = "";
  std::function<std::string(const std::string&)> rename = nullptr;
  // For a tensor [a, b, c] in the files that stacks several of the model's matrices, returns the
  // names that they would have in a file; for any other tensor, nothing.
  std::function<std::vector<std::string>(const std::string&)> parts = nullptr;
  // For offloaded tensors: see DispatchOptions in worker/bigmodel/dispatch.h.
  std::optional<uint64_t> ring_bytes = std::nullopt;
  int readers = 8;
  bool prefetch = true;
  bool mmap = false;
};

// Loads files of save_model, transformers, safetensors or torch.save into a model, which may be
// empty, directly to the devices of the plan. Tensors placed on the disk stay in these files and
// are read from there when used. Peak memory: the model's own share and a few MiB.
absl::StatusOr<DispatchedModel> load_checkpoint_and_dispatch(torch::nn::Module& model,
                                                             const std::string& checkpoint,
                                                             const DeviceMapChoice& device_map,
                                                             const BigModelOptions& options = {});

// Distributes a model that already has its weights. Writes tensors placed on the disk to
// options.offload_folder.
absl::StatusOr<DispatchedModel> dispatch_model(torch::nn::Module& model,
                                               const DeviceEntries& device_map,
                                               const DispatchOptions& options = {});

// Keep all weights in host memory, or in a file in `folder`, and bring them to `device` when used.
absl::StatusOr<DispatchedModel> cpu_offload(torch::nn::Module& model, at::Device device,
                                            const DispatchOptions& options = {});
absl::StatusOr<DispatchedModel> disk_offload(torch::nn::Module& model, const std::string& folder,
                                             at::Device device = at::kCPU,
                                             const DispatchOptions& options = {});

// The same for module holders and pointers to modules.
template <class M>
concept HoldsModule = requires(M& model) {
  static_cast<torch::nn::Module&>(*model);
};

template <HoldsModule M>
absl::StatusOr<DispatchedModel> load_checkpoint_and_dispatch(M&& model,
                                                             const std::string& checkpoint,
                                                             const DeviceMapChoice& device_map,
                                                             const BigModelOptions& options = {}) {
  return load_checkpoint_and_dispatch(static_cast<torch::nn::Module&>(*model), checkpoint,
                                      device_map, options);
}
template <HoldsModule M>
absl::StatusOr<DispatchedModel> dispatch_model(M&& model, const DeviceEntries& device_map,
                                               const DispatchOptions& options = {}) {
  return dispatch_model(static_cast<torch::nn::Module&>(*model), device_map, options);
}
template <HoldsModule M>
absl::StatusOr<DispatchedModel> cpu_offload(M&& model, at::Device device,
                                            const DispatchOptions& options = {}) {
  return cpu_offload(static_cast<torch::nn::Module&>(*model), device, options);
}
template <HoldsModule M>
absl::StatusOr<DispatchedModel> disk_offload(M&& model, const std::string& folder,
                                             at::Device device = at::kCPU,
                                             const DispatchOptions& options = {}) {
  return disk_offload(static_cast<torch::nn::Module&>(*model), folder, device, options);
}

}  // namespace muster

#endif  // MUSTER_BIGMODEL_H_
