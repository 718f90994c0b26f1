#ifndef MUSTER_WORKER_BIGMODEL_MAX_MEMORY_H_
#define MUSTER_WORKER_BIGMODEL_MAX_MEMORY_H_

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "c10/core/DeviceType.h"
#include "worker/bigmodel/device_map.h"
#include "worker/bigmodel/map_checks.h"

namespace muster {

// What this process can have: free memory of each GPU, and of the host what the machine, its
// cgroup and the limits of the process (ulimit -d, -v) leave. Nothing of the host where a GPU's
// memory is the host's.
DeviceLimits GetMaxMemory();

// GPUs that this process sees; CUDA works in it from here on if there are any.
int CountGpus();

// The type of the devices that maps name "0", "1", ...: CUDA.
c10::DeviceType GpuType();
// Another one in this process, for good. For tests, before anything asks.
void SetGpuTypeForTest(c10::DeviceType type);
// Whether the memory of GPUs of such a type is the host's.
void SetGpusAreIntegratedForTest(bool integrated);

// FAILED_PRECONDITION for a device that is not there.
absl::Status CheckDevicesAreThere(const DeviceLimits& limits);
absl::Status CheckDevicesAreThere(const DeviceEntries& devices);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_MAX_MEMORY_H_
