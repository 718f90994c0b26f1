#include "worker/job/device.h"

#include <dlfcn.h>
#include <unistd.h>

#include <algorithm>
#include <map>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/collective/nccl.h"

namespace muster {

namespace {

constexpr char kNoGpu[] = "no GPU is visible";

// Returns a text that is the same for one GPU in two processes; empty if it is not known.
std::string IdOf(c10::Device device) {
  const auto get =
      reinterpret_cast<int (*)(char*, int, int)>(dlsym(RTLD_DEFAULT, "cudaDeviceGetPCIBusId"));
  char bus[32] = "";
  // Use the boot id, because machines may have the same name, and their GPUs the same places.
  const absl::StatusOr<std::string> boot = ReadFile("/proc/sys/kernel/random/boot_id", 128);
  if (!device.is_cuda() || get == nullptr || !boot.ok() ||
      get(bus, sizeof(bus), device.index()) != 0) {
    return "";
  }
  return absl::StrCat(absl::StripAsciiWhitespace(*boot), " ", bus);
}

// A rank's report of its device.
struct RankDevice {
  bool is_gpu = false;
  std::string host;
  std::string id;
  std::string error;  // empty: it is usable

  std::string Pack() const {
    return absl::StrCat(is_gpu ? "gpu" : "cpu", "\n", host, "\n", id, "\n", error);
  }
  static RankDevice Unpack(const std::string& bytes) {
    const std::vector<std::string> lines = absl::StrSplit(bytes, absl::MaxSplits('\n', 3));
    return {.is_gpu = lines.at(0) == "gpu",
            .host = lines.at(1),
            .id = lines.at(2),
            .error = lines.at(3)};
  }
};

// Returns the name of a rank in messages: "rank 2 (node-b)".
std::string NameOf(const std::vector<RankDevice>& all, size_t rank) {
  const std::string& host = all[rank].host;
  return absl::StrCat("rank ", rank, host.empty() ? "" : absl::StrCat(" (", host, ")"));
}

absl::Status CheckNoneIsShared(const std::vector<RankDevice>& all) {
  std::map<std::string, size_t> first_on;
  for (size_t rank = 0; rank < all.size(); ++rank) {
    if (all[rank].id.empty()) continue;
    const auto [first, is_new] = first_on.emplace(all[rank].id, rank);
    if (is_new) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(NameOf(all, first->second), " and ", NameOf(all, rank),
                     " are on one GPU: NCCL cannot share one; start no more processes on a machine "
                     "than it has GPUs, let the processes of a machine see all of its GPUs or each "
                     "its own (CUDA_VISIBLE_DEVICES), or run on the CPU (MUSTER_CPU=1)"));
  }
  return absl::OkStatus();
}

}  // namespace

std::string WhyNoGpu() {
  constexpr int kInsufficientDriver = 35, kNoDevice = 100;
  // Looked up as in VisibleGpus().
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
  MUSTER_RETURN_IF_ERROR(LoadCuda());
  // There may be fewer than processes, because each may see GPUs of its own (srun --gpus-per-task).
  // Whether two have the same one is found when they meet.
  return c10::Device(c10::kCUDA,
                     static_cast<c10::DeviceIndex>(environment.local_rank.value % gpus));
}

absl::Status AgreeOnDevices(Comm& comm, c10::Device device, const absl::Status& usable) {
  const RankDevice mine = {.is_gpu = device.is_cuda(),
                           .host = HostName(),
                           .id = IdOf(device),
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
  if (cpu == all.size()) return CheckNoneIsShared(all);
  if (gpu == all.size()) return absl::OkStatus();
  return absl::FailedPreconditionError(absl::StrCat(
      NameOf(all, cpu), " is on the CPU and ", NameOf(all, gpu),
      " on a GPU: the ranks of a job are all on GPUs or all on the CPU. Find out why ",
      NameOf(all, cpu),
      " sees no GPU (nvidia-smi, CUDA_VISIBLE_DEVICES, MUSTER_CPU), or run all of them on the CPU "
      "(MUSTER_CPU=1)"));
}

void MakeCurrent(c10::Device device) {
  if (!device.is_cuda()) return;
  // Use the registry that the CUDA half fills in when it is opened, so that there is no link to it.
  c10::impl::VirtualGuardImpl(c10::kCUDA).setDevice(device);
}

}  // namespace muster
