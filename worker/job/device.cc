#include "worker/job/device.h"

#include <dlfcn.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/collective/nccl.h"

namespace muster {

namespace {

constexpr char kNoGpu[] = "no GPU is visible";

}  // namespace

std::string WhyNoGpu() {
  constexpr int kInsufficientDriver = 35, kNoDevice = 100;
  // As VisibleGpus() asks.
  const auto count = reinterpret_cast<int (*)(int*)>(dlsym(RTLD_DEFAULT, "cudaGetDeviceCount"));
  const auto text =
      reinterpret_cast<const char* (*)(int)>(dlsym(RTLD_DEFAULT, "cudaGetErrorString"));
  int gpus = 0;
  const int code = count == nullptr ? kNoDevice : count(&gpus);
  // A machine without a driver has an insufficient one.
  if (code == 0 || code == kNoDevice ||
      (code == kInsufficientDriver && access("/dev/nvidiactl", F_OK) != 0)) {
    return kNoGpu;
  }
  return absl::StrCat("CUDA error ", code, ": ", text == nullptr ? "" : text(code));
}

absl::StatusOr<c10::Device> ChooseDevice(const Environment& environment) {
  if (environment.use_cpu.value) return c10::Device(c10::kCPU);
  const int gpus = VisibleGpus();
  if (gpus == 0) {
    const std::string why = WhyNoGpu();
    if (why != kNoGpu && environment.local_rank.value == 0) {
      MUSTER_LOG(Warning) << "no GPU of this machine is usable, so its processes train on the CPU: "
                          << why << ". MUSTER_CPU=yes accepts that";
    }
    return c10::Device(c10::kCPU);
  }
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
