#include "worker/track/append_file.h"

#include <errno.h>
#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/file_identity.h"
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
  if (fd_ < 0)
    return absl::FailedPreconditionError(
        "the tracker is not open: it has not been started, or is finished");
  MUSTER_RETURN_IF_ERROR(RemovePart());
  struct stat before;
  if (fstat(fd_, &before) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read the size of ", path_));
  }
  size_t written = 0;
  while (written < bytes.size()) {
    const ssize_t n = write(fd_, bytes.data() + written, bytes.size() - written);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) {
      const absl::Status failed = absl::ErrnoToStatus(errno, absl::StrCat("cannot write ", path_));
      part_begin_ = before.st_size;
      part_end_ = part_begin_ + static_cast<int64_t>(written);
      RemovePart().IgnoreError();
      return failed;
    }
    written += static_cast<size_t>(n);
  }
  return absl::OkStatus();
}

void AppendFile::Lock() {
  while (flock(fd_, LOCK_EX) != 0 && errno == EINTR) {
  }
}

void AppendFile::Unlock() { flock(fd_, LOCK_UN); }

bool AppendFile::IsAtPath() const {
  struct stat info;
  return fstat(fd_, &info) == 0 && FileIdentityAt(path_) == FileIdentityOf(info);
}

absl::StatusOr<int64_t> AppendFile::Size() const {
  struct stat info;
  if (fstat(fd_, &info) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot read the size of ", path_));
  }
  return info.st_size;
}

absl::StatusOr<std::string> AppendFile::Read(int64_t offset, size_t size) const {
  std::string bytes(size, '\0');
  size_t done = 0;
  while (done < size) {
    const ssize_t n = pread(fd_, bytes.data() + done, size - done, offset + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) return absl::ErrnoToStatus(errno, absl::StrCat("cannot read ", path_));
    if (n == 0) break;
    done += static_cast<size_t>(n);
  }
  bytes.resize(done);
  return bytes;
}

absl::Status AppendFile::RemovePart() {
  struct stat info;
  // If another process has appended since, the bytes after the part are not ours to remove.
  if (part_begin_ < part_end_ && fstat(fd_, &info) == 0 && info.st_size == part_end_ &&
      ftruncate(fd_, part_begin_) != 0) {
    return absl::ErrnoToStatus(
        errno,
        absl::StrCat("cannot remove the part of a record that a failed write has left in ", path_));
  }
  part_begin_ = part_end_ = 0;
  return absl::OkStatus();
}

absl::Status AppendFile::Close() {
  part_begin_ = part_end_ = 0;
  if (fd_ >= 0 && close(std::exchange(fd_, -1)) != 0) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot close ", path_));
  }
  return absl::OkStatus();
}

}  // namespace muster
