#include "worker/job/device.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/collective/nccl.h"

namespace muster {

namespace {

constexpr char kNoGpu[] = "no GPU is visible";

// What a rank says of its device.
struct RankDevice {
  bool is_gpu = false;
  std::string host;
  std::string error;  // empty: it is usable

  std::string Pack() const { return absl::StrCat(is_gpu ? "gpu" : "cpu", "\n", host, "\n", error); }
  static RankDevice Unpack(const std::string& bytes) {
    const std::vector<std::string> lines = absl::StrSplit(bytes, absl::MaxSplits('\n', 2));
    return {.is_gpu = lines.at(0) == "gpu", .host = lines.at(1), .error = lines.at(2)};
  }
};

// "rank 2 (node-b)".
std::string NameOf(const std::vector<RankDevice>& all, size_t rank) {
  const std::string& host = all[rank].host;
  return absl::StrCat("rank ", rank, host.empty() ? "" : absl::StrCat(" (", host, ")"));
}

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

absl::Status AgreeOnDevices(Comm& comm, c10::Device device, const absl::Status& usable) {
  const RankDevice mine = {.is_gpu = device.is_cuda(),
                           .host = HostName(),
                           .error = usable.ok() ? "" : usable.ToString()};
  std::vector<RankDevice> all;
  for (const std::string& bytes : comm.AllGatherBytes(mine.Pack())) {
    all.push_back(RankDevice::Unpack(bytes));
  }
  MUSTER_RETURN_IF_ERROR(usable);
  const auto rank_of = [&](const auto& condition) {
    return static_cast<size_t>(std::find_if(all.begin(), all.end(), condition) - all.begin());
  };
  const size_t unusable = rank_of([](const RankDevice& rank) { return !rank.error.empty(); });
  if (unusable < all.size()) {
    return absl::FailedPreconditionError(absl::StrCat(
        NameOf(all, unusable), " cannot connect its GPU to the others: ", all[unusable].error));
  }
  const size_t gpu = rank_of([](const RankDevice& rank) { return rank.is_gpu; });
  const size_t cpu = rank_of([](const RankDevice& rank) { return !rank.is_gpu; });
  if (gpu == all.size() || cpu == all.size()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      NameOf(all, cpu), " is on the CPU and ", NameOf(all, gpu),
      " on a GPU: the ranks of a job are all on GPUs or all on the CPU. Find out why ",
      NameOf(all, cpu),
      " sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES, MUSTER_CPU), or run all of them on the CPU "
      "(MUSTER_CPU=1)"));
}

void MakeCurrent(c10::Device device) {
  if (!device.is_cuda()) return;
  // Through the registry that the CUDA half fills in when it is opened: no link to it.
  c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
}

}  // namespace muster
