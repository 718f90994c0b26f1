#ifndef MUSTER_BASE_MEMORY_FILE_H_
#define MUSTER_BASE_MEMORY_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster {

// Returns RESOURCE_EXHAUSTED if the limit of a file's size (ulimit -f) is below `bytes`. The kernel
// kills a process that makes a file larger (SIGXFSZ), even one in memory (memfd). Thread-safe.
absl::Status CheckMemoryFileSize(uint64_t bytes);

// Sets the size of a file in memory; the added bytes are zero, and take memory when they are
// touched. Errors: as CheckMemoryFileSize, or what the kernel says. Thread-safe.
absl::Status ResizeMemoryFile(int fd, uint64_t bytes);

// Returns FileIdentityOf() an open file, in memory or not, with its size. Errors: what the kernel
// says. Thread-safe.
absl::StatusOr<std::string> FileIdentity(int fd);

}  // namespace muster

#endif  // MUSTER_BASE_MEMORY_FILE_H_
