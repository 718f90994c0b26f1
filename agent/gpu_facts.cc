#include "agent/gpu_facts.h"

#include <dlfcn.h>

#include <algorithm>
#include <cstddef>

#include "absl/status/status.h"
#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"

namespace muster::agent {
namespace {

// A part of NVML's interface, which is stable: a library keeps every name that it ever had.
using Device = void*;
constexpr int kSuccess = 0;
struct Memory {
  unsigned long long total, free, used;
};
struct FabricInfo {
  unsigned char cluster_uuid[16];
  int status;
  unsigned int clique_id;
  unsigned char state;
};
constexpr unsigned char kFabricCompleted = 3;

template <typename F>
F Find(void* library, const char* name) {
  return reinterpret_cast<F>(dlsym(library, name));
}

}  // namespace

absl::StatusOr<GpuFacts> ReadGpuFacts(const std::string& library) {
  // Never unloaded, because it has its own threads.
  void* const nvml = dlopen(library.c_str(), RTLD_NOW | RTLD_LOCAL);
  if (nvml == nullptr) return absl::NotFoundError(dlerror());
  const auto init = Find<int (*)()>(nvml, "nvmlInit_v2");
  const auto shutdown = Find<int (*)()>(nvml, "nvmlShutdown");
  const auto count_of = Find<int (*)(unsigned int*)>(nvml, "nvmlDeviceGetCount_v2");
  const auto device_at =
      Find<int (*)(unsigned int, Device*)>(nvml, "nvmlDeviceGetHandleByIndex_v2");
  const auto memory_of = Find<int (*)(Device, Memory*)>(nvml, "nvmlDeviceGetMemoryInfo");
  const auto error_text = Find<const char* (*)(int)>(nvml, "nvmlErrorString");
  // Available in drivers from 2023 on.
  const auto fabric_of = Find<int (*)(Device, FabricInfo*)>(nvml, "nvmlDeviceGetGpuFabricInfo");
  if (init == nullptr || count_of == nullptr || device_at == nullptr || memory_of == nullptr) {
    return absl::UnavailableError(absl::StrCat(library, " lacks functions of NVML"));
  }
  const auto fail = [&](absl::string_view what, int code) {
    return absl::UnavailableError(absl::StrCat(library, ": ", what, ": ",
                                               error_text != nullptr ? error_text(code) : "error",
                                               " (", code, ")"));
  };
  if (const int code = init(); code != kSuccess) return fail("nvmlInit", code);
  GpuFacts facts;
  unsigned int count = 0;
  const int counted = count_of(&count);
  bool one_domain = true;
  for (unsigned int i = 0; counted == kSuccess && i < count; ++i) {
    Device device = nullptr;
    Memory memory = {};
    const bool known = device_at(i, &device) == kSuccess && memory_of(device, &memory) == kSuccess;
    facts.memory_bytes.push_back(known ? static_cast<int64_t>(memory.total) : 0);
    FabricInfo fabric = {};
    std::string domain;
    const auto& uuid = fabric.cluster_uuid;
    if (device != nullptr && fabric_of != nullptr && fabric_of(device, &fabric) == kSuccess &&
        fabric.state == kFabricCompleted && fabric.status == kSuccess &&
        std::any_of(std::begin(uuid), std::end(uuid),
                    [](unsigned char byte) { return byte != 0; })) {
      domain =
          absl::StrCat(absl::BytesToHexString({reinterpret_cast<const char*>(uuid), sizeof(uuid)}),
                       ".", fabric.clique_id);
    }
    one_domain = one_domain && (i == 0 || domain == facts.nvlink_domain);
    if (i == 0) facts.nvlink_domain = domain;
  }
  if (!one_domain) facts.nvlink_domain.clear();
  if (shutdown != nullptr) shutdown();
  if (counted != kSuccess) return fail("nvmlDeviceGetCount", counted);
  return facts;
}

}  // namespace muster::agent
