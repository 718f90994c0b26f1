#include "worker/checkpoint/write_at.h"

#include <sys/types.h>
#include <unistd.h>

#include <cerrno>

namespace muster {

absl::Status WriteAt(int fd, uint64_t offset, absl::string_view bytes, absl::string_view what) {
  while (!bytes.empty()) {
    const ssize_t written = pwrite(fd, bytes.data(), bytes.size(), static_cast<off_t>(offset));
    if (written < 0 && errno == EINTR) continue;
    if (written <= 0) return absl::ErrnoToStatus(written == 0 ? ENOSPC : errno, what);
    bytes.remove_prefix(static_cast<size_t>(written));
    offset += static_cast<uint64_t>(written);
  }
  return absl::OkStatus();
}

}  // namespace muster
