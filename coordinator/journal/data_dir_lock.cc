#include "coordinator/journal/data_dir_lock.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <string>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace muster::coordinator {

absl::StatusOr<std::unique_ptr<DataDirLock>> DataDirLock::Take(const std::string& directory) {
  std::string parent = ParentPath(directory);
  std::vector<std::string> missing;
  for (; !PathExists(parent) && ParentPath(parent) != parent; parent = ParentPath(parent)) {
    missing.push_back(parent);
  }
  if (!missing.empty()) {
    if (absl::Status made = MakeDirectories(missing.front()); !made.ok()) {
      return absl::Status(made.code(), absl::StrCat("data directory '", directory,
                                                    "' cannot be created: ", made.message()));
    }
    for (const std::string& path : missing) {
      MUSTER_RETURN_IF_ERROR(SyncDirectory(ParentPath(path)));
    }
  }
  if (mkdir(directory.c_str(), 0700) == 0) {
    // Files synced in the directory are lost if the directory itself does not survive a power cut.
    MUSTER_RETURN_IF_ERROR(SyncDirectory(ParentPath(directory)));
  } else if (errno != EEXIST) {
    return absl::ErrnoToStatus(errno,
                               absl::StrCat("data directory '", directory, "' cannot be created"));
  }
  const std::string path = directory + "/LOCK";
  const int fd = open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  if (fd < 0)
    return absl::ErrnoToStatus(errno, absl::StrCat("data directory: cannot open '", path, "'"));
  if (flock(fd, LOCK_EX | LOCK_NB) != 0) {
    const int error = errno;
    char text[32] = {};
    const ssize_t length = pread(fd, text, sizeof(text) - 1, 0);
    close(fd);
    if (error != EWOULDBLOCK)
      return absl::ErrnoToStatus(error, absl::StrCat("cannot lock '", path, "'"));
    const std::string pid(
        absl::StripAsciiWhitespace(absl::string_view(text, length > 0 ? length : 0)));
    return absl::AlreadyExistsError(absl::StrCat(
        "data directory '", directory, "' is in use by process ", pid.empty() ? "(unknown)" : pid,
        ": stop that coordinator or use another directory"));
  }
  // The lock holds without the pid in it: a full disk must not stop a restart.
  const std::string pid = absl::StrCat(getpid(), "\n");
  if (ftruncate(fd, 0) == 0 && pwrite(fd, pid.data(), pid.size(), 0) < 0) errno = 0;
  return std::unique_ptr<DataDirLock>(new DataDirLock(fd));
}

DataDirLock::~DataDirLock() { close(fd_); }

}  // namespace muster::coordinator
