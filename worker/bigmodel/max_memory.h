#ifndef MUSTER_WORKER_BIGMODEL_MAX_MEMORY_H_
#define MUSTER_WORKER_BIGMODEL_MAX_MEMORY_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/DeviceType.h"
#include "worker/bigmodel/device_map.h"
#include "worker/bigmodel/map_checks.h"

namespace muster {

// Returns the memory that this process can get: the free memory of each GPU, and, for the host,
// what the machine, its cgroup and the limits of the process (ulimit -d, -v) leave. Without the
// host if a GPU's memory is the host's.
DeviceLimits GetMaxMemory();

// Returns the number of GPUs that this process sees; initializes CUDA in the process if there are
// any.
int CountGpus();

// Returns the type of the devices that maps name "0", "1", ...: CUDA.
c10::DeviceType GpuType();
// Sets another type for this process, permanently. For tests, before anything asks for the type.
void SetGpuTypeForTest(c10::DeviceType type);
// Sets whether the memory of GPUs of such a type is the host's.
void SetGpusAreIntegratedForTest(bool integrated);

// Return FAILED_PRECONDITION for a device that does not exist.
absl::Status CheckDevicesAreThere(const DeviceLimits& limits);
absl::Status CheckDevicesAreThere(const DeviceEntries& devices);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_MAX_MEMORY_H_
