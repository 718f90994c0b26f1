#include "base/memory_file.h"

#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>

#include "absl/strings/str_cat.h"
#include "base/file_identity.h"
#include "base/status_macros.h"

namespace muster {

absl::Status CheckMemoryFileSize(uint64_t bytes) {
  rlimit limit = {};
  if (getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY ||
      bytes <= limit.rlim_cur) {
    return absl::OkStatus();
  }
  return absl::ResourceExhaustedError(
      absl::StrCat("the limit of a file's size (ulimit -f) is ", limit.rlim_cur, " bytes"));
}

absl::Status ResizeMemoryFile(int fd, uint64_t bytes) {
  MUSTER_RETURN_IF_ERROR(CheckMemoryFileSize(bytes));
  if (ftruncate(fd, static_cast<off_t>(bytes)) != 0) {
    return absl::ErrnoToStatus(errno, "cannot size shared memory");
  }
  return absl::OkStatus();
}

absl::StatusOr<std::string> FileIdentity(int fd) {
  struct stat info;
  if (fstat(fd, &info) != 0) return absl::ErrnoToStatus(errno, "cannot examine shared memory");
  return absl::StrCat(FileIdentityOf(info), ":", info.st_size);
}

}  // namespace muster
