#ifndef MUSTER_BASE_MEMORY_LEFT_H_
#define MUSTER_BASE_MEMORY_LEFT_H_

#include <cstddef>
#include <string>

namespace muster {

// Returns the bytes that can be allocated before the kernel kills a process for memory, as far as
// it reports limits: those of the machine, of the process's control group and of the groups above
// it, in both versions of the interface. SIZE_MAX: unknown. `root`: a prefix of /proc and /sys, for
// tests. Thread-safe.
size_t MemoryLeft(const std::string& root = "");

}  // namespace muster

#endif  // MUSTER_BASE_MEMORY_LEFT_H_
