#include "rpc/dead_socket.h"

#include <fcntl.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/file_identity.h"
#include "base/owned_fd.h"

namespace muster::rpc {
namespace {

// Returns an errno; 0 if a process listens.
int TryToConnect(const std::string& path) {
  sockaddr_un name{};
  name.sun_family = AF_UNIX;
  std::memcpy(name.sun_path, path.c_str(), path.size() + 1);
  // Non-blocking: connect() would wait while the server's queue is full.
  const OwnedFd fd(socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0));
  if (!fd.open() || connect(fd.get(), reinterpret_cast<sockaddr*>(&name), sizeof(name)) != 0) {
    return errno == EAGAIN ? 0 : errno;
  }
  return 0;
}

}  // namespace

absl::Status RemoveDeadSocket(const Address& address, absl::FunctionRef<void()> wait) {
  const std::string& path = address.path;
  const std::string what = absl::StrCat("cannot listen on ", address.ToString(), ": ");
  const std::string folder = ParentPath(path);
  if (access(folder.c_str(), W_OK | X_OK) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat(what, "folder '", folder, "'"));
  }
  // Kept open, so that the number of its inode is not given to another file meanwhile.
  const OwnedFd found(open(path.c_str(), O_PATH | O_CLOEXEC));
  struct stat info;
  if (!found.open() || fstat(found.get(), &info) != 0) return absl::OkStatus();
  if (!S_ISSOCK(info.st_mode)) {
    return absl::AlreadyExistsError(absl::StrCat(what, "the path is a file that is not a socket"));
  }
  int error = TryToConnect(path);
  if (error == ECONNREFUSED) {
    wait();
    error = TryToConnect(path);
  }
  if (error == 0) {
    return absl::AlreadyExistsError(absl::StrCat(what, "another process is listening there"));
  }
  // The socket has been removed meanwhile; a new one at this path is not ours to remove.
  if (error == ENOENT) return absl::OkStatus();
  if (error != ECONNREFUSED) {
    return absl::ErrnoToStatus(
        error, absl::StrCat("cannot determine whether a process listens on ", address.ToString()));
  }
  if (FileIdentityAt(path) == FileIdentityOf(info)) unlink(path.c_str());
  return absl::OkStatus();
}

}  // namespace muster::rpc
