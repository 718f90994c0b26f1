#ifndef MUSTER_AGENT_GPU_FACTS_H_
#define MUSTER_AGENT_GPU_FACTS_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"

namespace muster::agent {

// What the driver's library says of this machine's GPUs, which the kernel's files do not.
struct GpuFacts {
  std::vector<int64_t> memory_bytes;  // in the order of their PCI addresses; 0: it does not say
  // The NVLink fabric to which all of them belong, over several machines: its cluster and clique.
  // Empty: none, or several.
  std::string nvlink_domain;
};

inline constexpr char kNvmlLibrary[] = "libnvidia-ml.so.1";

// Loads the library, asks and leaves it loaded; blocks on the driver, usually for some
// milliseconds. Errors: NOT_FOUND there is no such library; UNAVAILABLE it does not work, and why.
absl::StatusOr<GpuFacts> ReadGpuFacts(const std::string& library = kNvmlLibrary);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_GPU_FACTS_H_
