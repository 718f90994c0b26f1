#ifndef MUSTER_BASE_MEMORY_LEFT_H_
#define MUSTER_BASE_MEMORY_LEFT_H_

#include <cstddef>
#include <string>

namespace muster {

// What can be had before the kernel kills a process for memory, as far as it says so, in bytes: of
// the machine, and of the process's control group and those above it, of both versions of the
// interface. SIZE_MAX: unknown. `root`: before /proc and /sys, for tests. Thread-safe.
size_t MemoryLeft(const std::string& root = "");

}  // namespace muster

#endif  // MUSTER_BASE_MEMORY_LEFT_H_
