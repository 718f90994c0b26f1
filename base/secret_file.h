#ifndef MUSTER_BASE_SECRET_FILE_H_
#define MUSTER_BASE_SECRET_FILE_H_

#include <cstddef>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// Returns the first `max_bytes` bytes of a file that holds a secret. `what` names the file's flag
// or variable in errors, `secret` what it holds: "token". The file must belong to this user and be
// closed to all others (mode 0600); one owned by root may be readable by a group (0640), like those
// that a cluster mounts into containers. Root may use any user's file that is closed. Blocks on the
// disk. Errors: NOT_FOUND; PERMISSION_DENIED, also for a file that others can read;
// INVALID_ARGUMENT if it is not a regular file.
absl::StatusOr<std::string> ReadSecretFile(const std::string& path, absl::string_view what,
                                           absl::string_view secret, size_t max_bytes);

// Writes a file of mode 0600 under a temporary name next to `path`, syncs it, renames it to `path`
// and syncs the folder. Blocks on the disk. Errors: those of the file, with its name.
absl::Status WriteSecretFile(const std::string& path, absl::string_view contents);

}  // namespace muster

#endif  // MUSTER_BASE_SECRET_FILE_H_
