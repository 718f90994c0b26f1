#ifndef MUSTER_WORKER_BIGMODEL_MAP_CHECKS_H_
#define MUSTER_WORKER_BIGMODEL_MAP_CHECKS_H_

#include <optional>
#include <set>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/bigmodel/device_map.h"

namespace muster {

// Checks whether a device map can be carried out, and answers questions about it. Pure.

// Parses what each device may hold, "0=20GB,cpu=30GB", in the grammar of ParseSizeOption
// (base/size_option.h). Errors: INVALID_ARGUMENT that quotes the wrong part; those of OrderDevices.
absl::StatusOr<DeviceLimits> ParseMaxMemory(absl::string_view text);

// Returns the device of `name`: that of the longest entry that is `name` or a module around it.
// Null if there is none.
const std::string* FindDevice(const DeviceEntries& devices, absl::string_view name);

// Calls `visit` for each module with its full name ("" is the root), a module before its children.
void VisitModules(
    const PlannedModel& model,
    absl::FunctionRef<void(const std::string& name, const PlannedModule& module)> visit);

// Calls `visit` with the full name of each parameter and buffer, in the order of the modules.
void VisitTensorNames(const PlannedModel& model,
                      absl::FunctionRef<void(const std::string& name)> visit);

// Returns the device on which offloaded modules run unless a program sets it: the GPU of the map's
// first part on one, by the order of the modules; absent if the map names no GPU, or places nothing
// on one.
std::optional<std::string> FirstGpu(const PlannedModel& model, const DeviceEntries& devices);

// Changes the type of floating-point tensors to `dtype` ("F32", "BF16", ...), as loading with that
// type does, whether it is smaller or larger. (SizeOptions::dtype has the rule of Accelerate, which
// counts no tensor larger than it is stored.) Buffers that the files lack keep their own type when
// a model is loaded, but they count here as if they became `dtype`, too: they are small.
void SetFloatingType(PlannedModel& model, const std::string& dtype);

// Checks that a map places each tensor of the model. Errors: INVALID_ARGUMENT for a repeated entry,
// an entry that is not a module, parameter or buffer, a device that OrderDevices refuses, and
// tensors without a device.
absl::Status CheckDeviceMap(const PlannedModel& model, const DeviceEntries& devices);

// Checks that each tensor, and each module of a class that is not to be divided, fits on some
// device with a limit: from the disk it would have to be moved there to be used. Errors:
// INVALID_ARGUMENT that names the largest such module, a tensor, or a class that no module has;
// those of ModuleSizes. `no_split_flag`: the flag of the command that set `options.no_split`, for
// the remedy in the message; empty: a program set it.
absl::Status CheckUndivided(const PlannedModel& model, const DeviceLimits& limits,
                            const DeviceMapOptions& options, absl::string_view no_split_flag = "");

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_MAP_CHECKS_H_
