#ifndef MUSTER_BASE_PEER_FILE_H_
#define MUSTER_BASE_PEER_FILE_H_

#include <string>

#include "absl/status/statusor.h"
#include "base/owned_fd.h"

namespace muster {

// Returns one line by which another process of this host, run by the same user, opens the open file
// `fd` of this process with OpenPeerFile. It is valid as long as this process keeps `fd` open. The
// file may have no name, such as one in memory. Errors: what the kernel says. Thread-safe.
absl::StatusOr<std::string> PlaceOfFile(int fd);

// Opens the file at a `place` with `flags` of open(2) (O_CLOEXEC is added). INVALID_ARGUMENT for a
// text that PlaceOfFile did not write; NOT_FOUND or PERMISSION_DENIED, from the kernel: the process
// has ended, has closed the file, runs in another PID namespace or belongs to another user;
// UNAVAILABLE if the descriptor is another file by now. Thread-safe.
absl::StatusOr<OwnedFd> OpenPeerFile(const std::string& place, int flags);

}  // namespace muster

#endif  // MUSTER_BASE_PEER_FILE_H_
