#ifndef MUSTER_AGENT_JOB_GPUS_H_
#define MUSTER_AGENT_JOB_GPUS_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace muster::agent {

// A GPU that an agent has for jobs.
struct JobGpu {
  std::string device;  // an entry of CUDA_VISIBLE_DEVICES: "2", "GPU-6f2a...", "MIG-..."
  int index = 0;       // among the machine's GPUs; -1: not known, as of a name
};

// The first `wanted` GPUs (-1: all) of an agent that runs with this CUDA_VISIBLE_DEVICES (nullopt:
// without it), on a machine with `found` GPUs (0: none could be seen). As for a CUDA program, its
// entries count up to the first one that names no GPU; names are believed. An agent that sees none
// has as many as it is told, by their numbers from 0 on. Pure. INVALID_ARGUMENT: more are wanted
// than are named, or one is named twice.
absl::StatusOr<std::vector<JobGpu>> ChooseJobGpus(const std::optional<std::string>& visible,
                                                  int found, int wanted);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_JOB_GPUS_H_
