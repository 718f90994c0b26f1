#ifndef MUSTER_AGENT_GPU_FACTS_H_
#define MUSTER_AGENT_GPU_FACTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace muster::agent {

// Facts about this machine's GPUs from the driver's library, which the kernel's files do not have.
struct GpuFacts {
  std::vector<int64_t> memory_bytes;  // in the order of their PCI addresses; 0: not reported
  // The NVLink fabric to which all GPUs belong, possibly across machines: its cluster and clique.
  // Empty: none, or several.
  std::string nvlink_domain;
};

inline constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

// Loads the library, queries it and leaves it loaded; blocks on the driver, usually for some
// milliseconds. Errors: NOT_FOUND there is no such library; UNAVAILABLE it does not work, and why.
absl::StatusOr<GpuFacts> ReadGpuFacts(const std::string& library = kNvmlLibrary);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_GPU_FACTS_H_
