#include "muster/bigmodel.h"

#include "base/status_macros.h"
#include "worker/bigmodel/map_checks.h"
#include "worker/bigmodel/max_memory.h"
#include "worker/bigmodel/module_description.h"
#include "worker/train/guard.h"

namespace muster {
namespace {

// Tensor code throws; callers of the functions below get a status.
template <class F>
auto Guarded(const F& call) -> decltype(call()) {
  decltype(call()) result = absl::InternalError("not called");
  MUSTER_RETURN_IF_ERROR(Guard([&] { result = call(); }));
  return result;
}

}  // namespace

absl::StatusOr<std::map<std::string, int64_t>> compute_module_sizes(
    const torch::nn::Module& model, std::optional<at::ScalarType> dtype,
    const std::map<std::string, at::ScalarType>& special_dtypes) {
  MUSTER_ASSIGN_OR_RETURN(const PlannedModel described, DescribeModule(model));
  SizeOptions options;
  MUSTER_ASSIGN_OR_RETURN(options.special_dtypes, PlannedTypes(model, special_dtypes));
  if (dtype.has_value()) {
    MUSTER_ASSIGN_OR_RETURN(options.dtype, PlannedType(*dtype));
  }
  return ModuleSizes(described, options);
}

absl::StatusOr<DeviceLimits> get_max_memory(const std::string& text) {
  if (text.empty()) return GetMaxMemory();
  MUSTER_ASSIGN_OR_RETURN(DeviceLimits limits, ParseMaxMemory(text));
  MUSTER_RETURN_IF_ERROR(CheckDevicesAreThere(limits));
  return limits;
}

absl::StatusOr<DeviceLimits> get_balanced_memory(const torch::nn::Module& model,
                                                 const DevicePlanOptions& options, bool low_zero) {
  // The same choice as in PlanDevices, so that a plan within these limits is that of "auto".
  MUSTER_ASSIGN_OR_RETURN(PlannedModel described, DescribeModule(model));
  if (options.dtype.has_value()) {
    MUSTER_ASSIGN_OR_RETURN(const std::string type, PlannedType(*options.dtype));
    SetFloatingType(described, type);
  }
  BalanceOptions balance;
  balance.no_split = ShortClassNames(options.no_split);
  MUSTER_ASSIGN_OR_RETURN(balance.special_dtypes, PlannedTypes(model, options.special_dtypes));
  balance.counted_whole = ExpertLists(described);
  balance.low_zero = low_zero;
  balance.user_set = !options.max_memory.empty();
  return BalanceMemory(described, balance.user_set ? options.max_memory : GetMaxMemory(), balance);
}

absl::StatusOr<DeviceMap> infer_auto_device_map(const torch::nn::Module& model,
                                                const DevicePlanOptions& options) {
  return PlanDevices(model, "sequential", options);
}

absl::Status check_device_map(const torch::nn::Module& model, const DeviceEntries& devices) {
  MUSTER_ASSIGN_OR_RETURN(const PlannedModel described, DescribeModule(model));
  return CheckDeviceMap(described, devices);
}

absl::StatusOr<DispatchedModel> load_checkpoint_and_dispatch(torch::nn::Module& model,
                                                             const std::string& checkpoint,
                                                             const DeviceMapChoice& device_map,
                                                             const BigModelOptions& options) {
  DeviceEntries devices;
  LoadCheckpointOptions load;
  load.dispatch.max_memory = options.max_memory;
  if (const auto* const mode = std::get_if<std::string>(&device_map)) {
    // The memory is measured once, for both the plan and the ring.
    if (load.dispatch.max_memory.empty()) load.dispatch.max_memory = GetMaxMemory();
    MUSTER_ASSIGN_OR_RETURN(const DeviceMap plan,
                            PlanDevices(model, *mode,
                                        {.max_memory = options.max_memory,
                                         .no_split = options.no_split,
                                         .dtype = options.dtype,
                                         .offload_buffers = options.offload_buffers}));
    devices = plan.devices;
  } else {
    devices = std::get<DeviceEntries>(device_map);
  }
  load.weights.strict = options.strict;
  load.weights.prefix = options.prefix;
  load.weights.rename = options.rename;
  load.parts = options.parts;
  load.weights.dtype = options.dtype;
  load.keep_buffers = options.keep_buffers;
  load.dispatch.offload_buffers = options.offload_buffers;
  load.dispatch.ring_bytes = options.ring_bytes;
  load.dispatch.readers = options.readers;
  load.dispatch.prefetch = options.prefetch;
  load.dispatch.mmap = options.mmap;
  return Guarded([&] { return LoadCheckpointAndDispatch(model, checkpoint, devices, load); });
}

absl::StatusOr<DispatchedModel> dispatch_model(torch::nn::Module& model,
                                               const DeviceEntries& device_map,
                                               const DispatchOptions& options) {
  return Guarded([&] { return DispatchModel(model, device_map, options); });
}

absl::StatusOr<DispatchedModel> cpu_offload(torch::nn::Module& model, at::Device device,
                                            const DispatchOptions& options) {
  return Guarded([&] { return CpuOffload(model, device, options); });
}

absl::StatusOr<DispatchedModel> disk_offload(torch::nn::Module& model, const std::string& folder,
                                             at::Device device, const DispatchOptions& options) {
  return Guarded([&] { return DiskOffload(model, folder, device, options); });
}

}  // namespace muster
