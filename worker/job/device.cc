#include "worker/job/device.h"

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/collective/nccl.h"

namespace muster {

absl::StatusOr<c10::Device> ChooseDevice(const Environment& environment) {
  if (environment.use_cpu.value) return c10::Device(c10::kCPU);
  const int gpus = VisibleGpus();
  if (gpus == 0) return c10::Device(c10::kCPU);
  if (environment.local_world_size.value > gpus) {
    return absl::InvalidArgumentError(
        absl::StrCat(environment.local_world_size.value, " processes on this node (",
                     environment.local_world_size.source, ") but ", gpus,
                     " visible GPUs: NCCL cannot share one; start fewer processes, or run on the "
                     "CPU (MUSTER_CPU=1)"));
  }
  MUSTER_RETURN_IF_ERROR(LoadCuda());
  return c10::Device(c10::kCUDA, static_cast<c10::DeviceIndex>(environment.local_rank.value));
}

void MakeCurrent(c10::Device device) {
  if (!device.is_cuda()) return;
  // Through the registry that the CUDA half fills in when it is opened: no link to it.
  c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
}

}  // namespace muster
