#include "worker/track/append_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace muster {

AppendFile::~AppendFile() {
  if (fd_ >= 0) close(fd_);
}

absl::Status AppendFile::Open(const std::string& path, bool lines) {
  MUSTER_RETURN_IF_ERROR(Close());
  MUSTER_RETURN_IF_ERROR(MakeDirectories(ParentPath(path)));
  path_ = path;
  fd_ = open(path.c_str(), O_RDWR | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
  if (fd_ < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot open ", path));
  struct stat info;
  char last = '\n';
  if (lines && fstat(fd_, &info) == 0 && info.st_size > 0 &&
      pread(fd_, &last, 1, info.st_size - 1) == 1 && last != '\n') {
    return Append("\n");
  }
  return absl::OkStatus();
}

absl::Status AppendFile::Append(absl::string_view bytes) {
  if (fd_ < 0) return absl::FailedPreconditionError("the tracker has not been started");
  while (!bytes.empty()) {
    const ssize_t n = write(fd_, bytes.data(), bytes.size());
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path_));
    bytes.remove_prefix(n);
  }
  return absl::OkStatus();
}

absl::Status AppendFile::Close() {
  if (fd_ >= 0 && close(std::exchange(fd_, -1)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot close ", path_));
  }
  return absl::OkStatus();
}

}  // namespace muster
