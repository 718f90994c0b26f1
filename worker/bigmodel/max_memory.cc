#include "worker/bigmodel/max_memory.h"

#include <dlfcn.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <limits>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "base/memory_left.h"
#include "base/status_macros.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "c10/core/impl/VirtualGuardImpl.h"
#include "worker/collective/nccl.h"

namespace muster {
namespace {

std::atomic<c10::DeviceType> gpu_type = c10::kCUDA;
std::atomic<bool> gpus_are_integrated = false;  // the GPUs of tests

// The pages of this process: its address space and its data.
struct Pages {
  uint64_t space = 0, data = 0;
};

Pages PagesInUse() {
  Pages pages;
  FILE* const file = fopen("/proc/self/statm", "re");
  if (file == nullptr) return pages;
  unsigned long long space = 0, data = 0;  // NOLINT: what fscanf takes
  if (fscanf(file, "%llu %*u %*u %*u %*u %llu", &space, &data) == 2) pages = {space, data};
  fclose(file);
  return pages;
}

uint64_t LeftOf(decltype(RLIMIT_DATA) resource, uint64_t used) {
  rlimit limit = {};
  if (getrlimit(resource, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
    return std::numeric_limits<uint64_t>::max();
  }
  return limit.rlim_cur > used ? limit.rlim_cur - used : 0;
}

uint64_t HostMemory() {
  const auto page = static_cast<uint64_t>(sysconf(_SC_PAGESIZE));
  const Pages pages = PagesInUse();
  return std::min({uint64_t{MemoryLeft()}, LeftOf(RLIMIT_DATA, pages.data * page),
                   LeftOf(RLIMIT_AS, pages.space * page)});
}

// Whether the memory of a GPU is the host's.
bool IsIntegrated(int gpu) {
  if (GpuType() != c10::kCUDA) return gpus_are_integrated;
  // Looked up as in VisibleGpus().
  using GetAttribute = int (*)(int* value, int attribute, int device);
  constexpr int kIntegrated = 18;  // cudaDevAttrIntegrated
  static const auto get =
      reinterpret_cast<GetAttribute>(dlsym(RTLD_DEFAULT, "cudaDeviceGetAttribute"));
  int value = 0;
  return get != nullptr && get(&value, kIntegrated, gpu) == 0 && value != 0;
}

absl::Status CheckDevice(const std::string& device) {
  if (device == "cpu" || device == "disk") return absl::OkStatus();
  // A GPU whose library is missing has its own error.
  if (GpuType() == c10::kCUDA && VisibleGpus() > 0) MUSTER_RETURN_IF_ERROR(LoadCuda());
  const int gpus = CountGpus();
  int number = -1;
  if (absl::SimpleAtoi(device, &number) && number < gpus) return absl::OkStatus();
  return absl::FailedPreconditionError(
      absl::StrCat("device ", device, " does not exist: this process sees ",
                   gpus == 0 ? "no GPU" : absl::StrCat(gpus, gpus == 1 ? " GPU" : " GPUs"),
                   "; name \"cpu\" or \"disk\"", gpus == 0 ? "" : ", or a lower number"));
}

}  // namespace

int CountGpus() {
  if (GpuType() == c10::kCUDA && (VisibleGpus() == 0 || !LoadCuda().ok())) return 0;
  return c10::impl::VirtualGuardImpl(GpuType()).deviceCount();
}

c10::DeviceType GpuType() { return gpu_type; }

void SetGpuTypeForTest(c10::DeviceType type) { gpu_type = type; }

void SetGpusAreIntegratedForTest(bool integrated) { gpus_are_integrated = integrated; }

DeviceLimits GetMaxMemory() {
  DeviceLimits limits;
  bool shares_memory = false;
  const int gpus = CountGpus();
  for (int i = 0; i < gpus; ++i) {
    auto* const allocator = dynamic_cast<c10::DeviceAllocator*>(c10::GetAllocator(GpuType()));
    if (allocator == nullptr) break;
    try {
      const auto [free, all] = allocator->getMemoryInfo(static_cast<c10::DeviceIndex>(i));
      limits.emplace_back(absl::StrCat(i), static_cast<double>(free));
      shares_memory = shares_memory || IsIntegrated(i);
    } catch (const c10::Error&) {
      // A GPU that does not answer counts as if it were not there.
      continue;
    }
  }
  // Otherwise the same memory would count twice.
  if (!shares_memory) limits.emplace_back("cpu", static_cast<double>(HostMemory()));
  return limits;
}

absl::Status CheckDevicesAreThere(const DeviceLimits& limits) {
  for (const auto& [device, limit] : limits) {
    if (const absl::Status status = CheckDevice(device); !status.ok()) return status;
  }
  return absl::OkStatus();
}

absl::Status CheckDevicesAreThere(const DeviceEntries& devices) {
  for (const auto& [name, device] : devices) {
    if (const absl::Status status = CheckDevice(device); !status.ok()) return status;
  }
  return absl::OkStatus();
}

}  // namespace muster
