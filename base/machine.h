#ifndef MUSTER_BASE_MACHINE_H_
#define MUSTER_BASE_MACHINE_H_

#include <cstdint>
#include <map>
#include <string>
#include <vector>

namespace muster {

struct Gpu {
  int index = 0;
  std::string model;      // empty: the driver does not say
  std::string uuid = {};  // "GPU-6f2a...", empty: the driver does not say
};

// The resources of this machine, read from the kernel's files: no driver library is loaded and no
// program run.
struct Machine {
  std::string hostname;
  std::string system;  // "Debian GNU/Linux 12 (bookworm)"
  std::string kernel;
  std::string architecture;
  std::string cpu_model;
  int cores = 1;  // the cores that this process may use: affinity and control group
  int64_t memory_bytes = 0;
  int64_t memory_available_bytes = 0;
  std::string driver;  // the version of NVIDIA's kernel driver; empty: none
  std::vector<Gpu> gpus;
  int usable_gpus = 0;  // the GPUs that CUDA_VISIBLE_DEVICES lets programs see
};

// `root` prefixes every path; for tests.
Machine ReadMachine(const std::map<std::string, std::string>& variables,
                    const std::string& root = "");

// Returns the entries of CUDA_VISIBLE_DEVICES before the first one that names none of `gpus` GPUs:
// these are the GPUs that a CUDA program sees. Names ("GPU-...", "MIG-...") are not checked.
std::vector<std::string> VisibleDevices(const std::string& cuda_visible_devices, int gpus);

// Returns the number of those entries; 0 on a machine without GPUs.
int CountVisible(const std::string& cuda_visible_devices, int gpus);

}  // namespace muster

#endif  // MUSTER_BASE_MACHINE_H_
