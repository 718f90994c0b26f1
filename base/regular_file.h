#ifndef MUSTER_BASE_REGULAR_FILE_H_
#define MUSTER_BASE_REGULAR_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace muster {

// ReadFile() for paths that come with a folder of data: a pipe or a device in the place of a file,
// which a reader would wait for, is INVALID_ARGUMENT. Blocks on the disk. Thread-safe.
absl::StatusOr<std::string> ReadRegularFile(const std::string& path,
                                            int64_t max_bytes = int64_t{1} << 30);

}  // namespace muster

#endif  // MUSTER_BASE_REGULAR_FILE_H_
