#include "base/peer_file.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/memory_file.h"
#include "base/status_macros.h"

namespace muster {

absl::StatusOr<std::string> PlaceOfFile(int fd) {
  MUSTER_ASSIGN_OR_RETURN(const std::string identity, FileIdentity(fd));
  return absl::StrCat("/proc/", getpid(), "/fd/", fd, " ", identity);
}

absl::StatusOr<OwnedFd> OpenPeerFile(const std::string& place, int flags) {
  const size_t space = place.find(' ');
  if (!absl::StartsWith(place, "/proc/") || space == std::string::npos) {
    return absl::InvalidArgumentError(absl::StrCat("no place of a file: '", place, "'"));
  }
  const std::string path = place.substr(0, space);
  OwnedFd file(open(path.c_str(), flags | O_CLOEXEC));
  if (!file.open()) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot open another process's ", path));
  }
  // A process that has ended may have left its number to another one.
  MUSTER_ASSIGN_OR_RETURN(const std::string identity, FileIdentity(file.get()));
  if (identity != place.substr(space + 1)) {
    return absl::UnavailableError(absl::StrCat(path, " is not the file that its process shared"));
  }
  return file;
}

}  // namespace muster
