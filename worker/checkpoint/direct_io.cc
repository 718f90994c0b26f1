#include "worker/checkpoint/direct_io.h"

#include <errno.h>
#include <fcntl.h>

#include <utility>

#include "absl/strings/str_cat.h"
#include "worker/checkpoint/read_error.h"

namespace muster {

DirectFileSystem::DirectFileSystem()
    : open([](const char* path, int flags, mode_t mode) { return ::open(path, flags, mode); }),
      allocate([](int fd, off_t size) { return ::fallocate(fd, 0, 0, size); }) {}

const DirectFileSystem& DirectFileSystem::Real() {
  static const DirectFileSystem* const system = new DirectFileSystem;
  return *system;
}

absl::Status DirectIoError(absl::string_view what, const std::string& path, uint64_t offset) {
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot ", what, " ", path, " at byte ", offset));
}

namespace {

absl::Status OpenError(int flags, const std::string& path) {
  const std::string message = absl::StrCat("cannot open ", path);
  return (flags & O_ACCMODE) == O_RDONLY ? ReadError(errno, message)
                                         : absl::ErrnoToStatus(errno, message);
}

}  // namespace

absl::StatusOr<DirectFile> DirectFile::Open(const DirectFileSystem& system, const std::string& path,
                                            int flags, bool direct, mode_t mode) {
  int fd = -1;
  if (direct) {
    fd = system.open(path.c_str(), flags | O_DIRECT, mode);
    direct = fd >= 0;
    if (fd < 0 && errno != EINVAL && errno != EOPNOTSUPP) {
      return OpenError(flags, path);
    }
  }
  if (fd < 0) fd = system.open(path.c_str(), flags, mode);
  if (fd < 0) return OpenError(flags, path);
  return DirectFile(system, path, fd, direct);
}

DirectFile::DirectFile(const DirectFileSystem& system, std::string path, int fd, bool direct)
    : system_(&system), path_(std::move(path)), fd_(fd), direct_(direct) {}

DirectFile::DirectFile(DirectFile&& other) noexcept
    : system_(other.system_),
      path_(std::move(other.path_)),
      fd_(std::move(other.fd_)),
      direct_(other.direct_.load(std::memory_order_relaxed)) {}

bool DirectFile::TurnDirect() {
  const int flags = fcntl(fd(), F_GETFL);
  if (flags < 0 || fcntl(fd(), F_SETFL, flags | O_DIRECT) != 0) return false;
  direct_.store(true, std::memory_order_relaxed);
  return true;
}

bool DirectFile::GiveUpDirect() {
  if (!direct()) return false;
  const int flags = fcntl(fd(), F_GETFL);
  if (flags < 0 || fcntl(fd(), F_SETFL, flags & ~O_DIRECT) != 0) return false;
  direct_.store(false, std::memory_order_relaxed);
  return true;
}

absl::Status DirectFile::Write(absl::string_view bytes, uint64_t at) {
  size_t done = 0;
  while (done < bytes.size()) {
    // Remember the mode, because another thread may give up direct I/O meanwhile, which does not
    // change what EINVAL means.
    const bool was_direct = direct();
    const ssize_t n = system_->pwrite(fd(), bytes.data() + done, bytes.size() - done, at + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && was_direct && (GiveUpDirect() || !direct())) continue;
    if (n < 0) return DirectIoError("write", path_, at + done);
    if (n == 0) {
      errno = ENOSPC;
      return DirectIoError("write", path_, at + done);
    }
    done += n;
    // A short write may end anywhere; the next one begins where direct I/O can.
    if (done < bytes.size() && direct()) {
      const size_t before = done - n;
      done -= done % kDirectAlignment;
      // If not even an aligned part was written, the file system has no room, or does not really
      // support direct I/O.
      if (done <= before && !GiveUpDirect() && direct()) {
        errno = ENOSPC;
        return DirectIoError("write", path_, at + done);
      }
    }
  }
  return absl::OkStatus();
}

absl::Status DirectFile::Read(char* to, size_t size, uint64_t at) {
  size_t done = 0;
  while (done < size) {
    const bool was_direct = direct();
    const ssize_t n = system_->pread(fd(), to + done, size - done, at + done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0 && errno == EINVAL && was_direct && (GiveUpDirect() || !direct())) continue;
    if (n < 0) {
      return ReadError(errno, absl::StrCat("cannot read ", path_, " at byte ", at + done));
    }
    if (n == 0) {
      return absl::DataLossError(absl::StrCat(path_, ": ends at byte ", at + done,
                                              ", but at least ", at + size, " bytes are expected"));
    }
    done += n;
    // Continue at an aligned offset, as in Write.
    if (done < size && direct() && !IsDirectAligned(done)) {
      const size_t before = done - n;
      done -= done % kDirectAlignment;
      if (done <= before) GiveUpDirect();
    }
  }
  return absl::OkStatus();
}

}  // namespace muster
