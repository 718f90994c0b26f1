#ifndef MUSTER_BASE_MEMORY_LEFT_H_
#define MUSTER_BASE_MEMORY_LEFT_H_

#include <cstddef>
#include <string>

namespace muster {

// The bytes that can be allocated before the kernel kills a process for memory, as far as it
// reports limits: of the machine, the process's control group and those above it, in both versions
// of the interface. SIZE_MAX: unknown. `root`: before /proc and /sys, for tests. Thread-safe.
size_t MemoryLeft(const std::string& root = "");

}  // namespace muster

#endif  // MUSTER_BASE_MEMORY_LEFT_H_
