// An imitation of the driver's NVML for tests: two GPUs, or what FAKE_NVML says: "none" fails to
// start, "one" has one GPU that reports no memory.
#include <cstdlib>
#include <cstring>
#include <string>

namespace {

std::string Kind() {
  const char* const kind = std::getenv("FAKE_NVML");
  return kind == nullptr ? "" : kind;
}
struct Memory {
  unsigned long long total, free, used;
};
struct FabricInfo {
  unsigned char cluster_uuid[16];
  int status;
  unsigned int clique_id;
  unsigned char state;
};

}  // namespace

extern "C" {
int nvmlInit_v2() { return Kind() == "none" ? 9 : 0; }
int nvmlShutdown() { return 0; }
const char* nvmlErrorString(int) { return "Driver Not Loaded"; }
int nvmlDeviceGetCount_v2(unsigned int* count) {
  *count = Kind() == "one" ? 1 : 2;
  return 0;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned int index, void** device) {
  *device = reinterpret_cast<void*>(static_cast<size_t>(index) + 1);
  return 0;
}
int nvmlDeviceGetMemoryInfo(void* device, Memory* memory) {
  if (Kind() == "one") return 3;
  memory->total = 40ull << 30 << (reinterpret_cast<size_t>(device) - 1);
  return 0;
}
int nvmlDeviceGetGpuFabricInfo(void* device, FabricInfo* info) {
  std::memset(info->cluster_uuid, 0xab, sizeof(info->cluster_uuid));
  info->status = 0;
  info->clique_id =
      Kind() == "cliques" ? static_cast<unsigned int>(reinterpret_cast<size_t>(device)) : 7;
  info->state = Kind() == "one" ? 1 : 3;
  return 0;
}
}
