#ifndef MUSTER_AGENT_JOB_GPUS_H_
#define MUSTER_AGENT_JOB_GPUS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "base/machine.h"

namespace muster::agent {

// A GPU that an agent has for jobs.
struct JobGpu {
  std::string device;  // an entry of CUDA_VISIBLE_DEVICES: "2", "GPU-6f2a...", "MIG-..."
  int index = 0;       // among the machine's GPUs; -1: not known, for a name that matches none
};

// Chooses the first `wanted` GPUs (-1: all) of an agent that runs with this CUDA_VISIBLE_DEVICES
// (nullopt: not set), on a machine with these GPUs (empty: none could be seen). As for a CUDA
// program, its entries count up to the first one that names no GPU, and the start of a UUID is
// enough; names that cannot be checked on this machine are accepted. An agent that sees no GPU gets
// `wanted` of them, numbered from 0. Pure. INVALID_ARGUMENT: more are wanted than are named, one is
// or may be named twice, or a name matches several.
absl::StatusOr<std::vector<JobGpu>> ChooseJobGpus(const std::optional<std::string>& visible,
                                                  const std::vector<Gpu>& machine, int wanted);

// Returns the memory of each of `gpus`, from the driver's list for the whole machine; 0: not known.
std::vector<int64_t> MemoryOfJobGpus(const std::vector<JobGpu>& gpus,
                                     const std::vector<int64_t>& machine);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_JOB_GPUS_H_
