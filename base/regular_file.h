#ifndef MUSTER_BASE_REGULAR_FILE_H_
#define MUSTER_BASE_REGULAR_FILE_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace muster {

// Does the same as ReadFile() for paths that come with a folder of data: returns INVALID_ARGUMENT
// for a pipe or a device in the place of a file, on which a reader would block. Blocks on the disk.
// Thread-safe.
absl::StatusOr<std::string> ReadRegularFile(const std::string& path,
                                            int64_t max_bytes = int64_t{1} << 30);

}  // namespace muster

#endif  // MUSTER_BASE_REGULAR_FILE_H_
