#ifndef MUSTER_WORKER_BIGMODEL_DEVICE_MAP_H_
#define MUSTER_WORKER_BIGMODEL_DEVICE_MAP_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// Which device each part of a model goes to, from the sizes of its tensors and the memory of the
// devices, before anything is allocated. The rules are those of Accelerate 1.15's
// infer_auto_device_map and get_balanced_memory (docs/accelerate.md lists where ours differ). Pure.

// A parameter or buffer, by its name inside its module.
struct PlannedTensor {
  std::string name;
  std::string dtype;  // as in safetensors: "F32", "BF16", "I64", "BOOL", ...
  std::vector<int64_t> shape;
};

// A module with what it owns, in the order of registration.
struct PlannedModule {
  std::string name;  // inside its parent; of the root: not used
  std::string class_name;
  std::vector<PlannedTensor> parameters;
  std::vector<PlannedTensor> buffers;
  std::vector<PlannedModule> children;
};

struct PlannedModel {
  PlannedModule root;
  // Groups of full names ("decoder.weight") of parameters that are one tensor. Its size counts
  // under the first name, its owner.
  std::vector<std::vector<std::string>> tied;
};

// Bytes that each device may hold. Devices are "0", "1", ... for GPUs, "mps", "cpu" and "disk",
// which has no limit. Fractional only after BalanceMemory with limits that were found.
using DeviceLimits = std::vector<std::pair<std::string, double>>;

// The full name of `name` inside the module with the full name `module` ("" is the model itself).
std::string JoinName(absl::string_view module, absl::string_view name);

// In the order in which devices are filled: GPUs by number, mps, cpu, disk. Errors:
// INVALID_ARGUMENT for an unknown device, a duplicate device, or a negative limit.
absl::StatusOr<DeviceLimits> OrderDevices(const DeviceLimits& limits);

struct SizeOptions {
  // The type in which the model is to be loaded: a floating tensor counts with the smaller element
  // of this and its own. Integers and booleans keep theirs.
  std::optional<std::string> dtype;
  // Full name of a tensor to the type that it is loaded in.
  std::map<std::string, std::string> special_dtypes;
};

// Bytes of every tensor, and of every module with what is below it, by full name ("" is the root).
// A tied tensor counts once, for its owner. Errors: INVALID_ARGUMENT for an unknown dtype, a
// negative dimension, a name twice, or a size beyond 2^53 bytes.
absl::StatusOr<std::map<std::string, int64_t>> ModuleSizes(const PlannedModel& model,
                                                           const SizeOptions& options);

struct DeviceMapOptions : SizeOptions {
  // Classes whose modules are never divided among devices.
  std::set<std::string> no_split;
  // Buffers of modules that are not on a GPU stay with them.
  bool offload_buffers = false;
  // Before a device is left empty, looks for a later part that fits on it.
  bool fallback_allocation = false;
  // Merges entries whose parts are all on one device.
  bool clean_result = true;
};

// Full name of a module, parameter or buffer to its device; "" is the whole model.
using DeviceEntries = std::vector<std::pair<std::string, std::string>>;

struct DeviceMap {
  // In the order of placement. Together they cover every tensor.
  DeviceEntries devices;
  // The buffers of modules that are not on a GPU fit on no GPU; offload_buffers avoids that.
  bool buffers_do_not_fit = false;
};

// Fills the devices in order; what fits on none goes to the disk. Errors: those of OrderDevices and
// ModuleSizes.
absl::StatusOr<DeviceMap> InferDeviceMap(const PlannedModel& model, const DeviceLimits& limits,
                                         const DeviceMapOptions& options);

struct BalanceOptions : SizeOptions {
  std::set<std::string> no_split;
  // Leaves the first GPU as empty as possible, for other work there.
  bool low_zero = false;
  // Full names of modules that count as one module in the mean size of modules.
  std::set<std::string> counted_whole = {};
  // The caller set the limits; else they were found on the machine, and the only GPU of a
  // machine keeps a tenth free.
  bool user_set = true;
};

// The lists of a Mixtral's experts, which is one module in the memory of transformers 5: counted
// whole, they leave the shares of the GPUs as Accelerate has them.
std::set<std::string> ExpertLists(const PlannedModel& model);

// Limits that make InferDeviceMap divide the model evenly among the GPUs. Errors: as above.
absl::StatusOr<DeviceLimits> BalanceMemory(const PlannedModel& model, const DeviceLimits& limits,
                                           const BalanceOptions& options);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_DEVICE_MAP_H_
