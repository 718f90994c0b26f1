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

// Decides on which device each part of a model goes, from the sizes of its tensors and the memory
// of the devices, before anything is allocated. The rules are those of Accelerate 1.15's
// infer_auto_device_map and get_balanced_memory (docs/accelerate.md lists where ours differ). Pure.

// A parameter or buffer, by its name inside its module.
struct PlannedTensor {
  std::string name;
  std::string dtype;  // as in safetensors: "F32", "BF16", "I64", "BOOL", ...
  std::vector<int64_t> shape;
};

// A module and what it owns, in the order of registration.
struct PlannedModule {
  std::string name;  // inside its parent; not used for the root
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

// The bytes that each device may hold. Devices are "0", "1", ... for GPUs, "mps", "cpu" and "disk",
// which has no limit. Fractional only after BalanceMemory with limits that were found.
using DeviceLimits = std::vector<std::pair<std::string, double>>;

// The full name of `name` inside the module with the full name `module` ("" is the model itself).
std::string JoinName(absl::string_view module, absl::string_view name);

// Returns the limits in the order in which devices are filled: GPUs by number, mps, cpu, disk.
// Errors: INVALID_ARGUMENT for an unknown device, a duplicate device, or a negative limit.
absl::StatusOr<DeviceLimits> OrderDevices(const DeviceLimits& limits);

struct SizeOptions {
  // The type in which the model is to be loaded: a floating-point tensor counts with the smaller of
  // this and its own element size. Integers and booleans keep theirs.
  std::optional<std::string> dtype;
  // The types in which single tensors are loaded, by full name.
  std::map<std::string, std::string> special_dtypes;
};

// Returns the bytes of every tensor, and of every module with its submodules, by full name ("" is
// the root). A tied tensor counts once, for its owner. Errors: INVALID_ARGUMENT for an unknown
// dtype, a negative dimension, a repeated name, or a size beyond 2^53 bytes.
absl::StatusOr<std::map<std::string, int64_t>> ModuleSizes(const PlannedModel& model,
                                                           const SizeOptions& options);

struct DeviceMapOptions : SizeOptions {
  // Classes whose modules are never divided among devices.
  std::set<std::string> no_split;
  // Whether buffers of modules that are not on a GPU stay with them.
  bool offload_buffers = false;
  // Whether to look for a later part that fits on a device before it is left empty.
  bool fallback_allocation = false;
  // Whether to merge entries whose parts are all on one device.
  bool clean_result = true;
};

// The full name of a module, parameter or buffer, and its device; "" is the whole model.
using DeviceEntries = std::vector<std::pair<std::string, std::string>>;

struct DeviceMap {
  // In the order of placement. Together they cover every tensor.
  DeviceEntries devices;
  // The buffers of modules that are not on a GPU fit on none; offload_buffers avoids that.
  bool buffers_do_not_fit = false;
};

// Fills the devices in order; parts that fit on none go to the disk. Errors: those of OrderDevices
// and ModuleSizes.
absl::StatusOr<DeviceMap> InferDeviceMap(const PlannedModel& model, const DeviceLimits& limits,
                                         const DeviceMapOptions& options);

struct BalanceOptions : SizeOptions {
  std::set<std::string> no_split;
  // Whether to leave the first GPU as empty as possible, for other work there.
  bool low_zero = false;
  // Full names of modules that count as one module in the mean size of modules.
  std::set<std::string> counted_whole = {};
  // Whether the caller set the limits; otherwise they were found on the machine, and the only GPU
  // of a machine keeps a tenth free.
  bool user_set = true;
};

// Returns the lists of a Mixtral's experts, each of which is one module in the memory of
// transformers 5: if they count as whole modules, the shares of the GPUs are the same as
// Accelerate's.
std::set<std::string> ExpertLists(const PlannedModel& model);

// Returns limits that make InferDeviceMap divide the model evenly among the GPUs. Errors: as above.
absl::StatusOr<DeviceLimits> BalanceMemory(const PlannedModel& model, const DeviceLimits& limits,
                                           const BalanceOptions& options);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_DEVICE_MAP_H_
