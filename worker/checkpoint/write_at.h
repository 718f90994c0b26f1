#ifndef MUSTER_WORKER_CHECKPOINT_WRITE_AT_H_
#define MUSTER_WORKER_CHECKPOINT_WRITE_AT_H_

#include <cstdint>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"

namespace muster {

// Writes all of `bytes` into an open file, also one in memory, at `offset`. Blocks on the disk.
// Thread-safe. Errors: the system's, after `what`; part of the bytes may be there.
absl::Status WriteAt(int fd, uint64_t offset, absl::string_view bytes, absl::string_view what);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_WRITE_AT_H_
