#include "agent/mapped_file.h"

#include <fcntl.h>
#include <linux/openat2.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <climits>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/strings/strip.h"
#include "base/owned_fd.h"

namespace muster::agent {
namespace {

// Follows symbolic links as the processes of `root` see them, so that none leads out of it.
int OpenAt(int root, const std::string& path) {
  open_how how = {};
  how.flags = O_PATH | O_CLOEXEC;
  how.resolve = RESOLVE_IN_ROOT;
  const auto fd = static_cast<int>(syscall(SYS_openat2, root, path.c_str(), &how, sizeof(how)));
  if (fd >= 0 || (errno != ENOSYS && errno != EPERM)) return fd;
  // A kernel before 5.6, or a filter of system calls that does not know openat2.
  return openat(root, path.substr(1).c_str(), O_PATH | O_CLOEXEC);
}

// Takes `place`, an O_PATH descriptor or -1.
int OpenRegular(int place) {
  if (place < 0) return -1;
  const OwnedFd owned(place);
  struct stat info;
  if (fstat(place, &info) != 0 || !S_ISREG(info.st_mode)) return -1;
  return open(absl::StrCat("/proc/self/fd/", place).c_str(),
              O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
}

int OpenRegular(const std::string& path) {
  return OpenRegular(open(path.c_str(), O_PATH | O_CLOEXEC));
}

bool HasOwnMounts(pid_t pid) {
  struct stat its, ours;
  return stat(absl::StrCat("/proc/", pid, "/ns/mnt").c_str(), &its) != 0 ||
         stat("/proc/self/ns/mnt", &ours) != 0 || its.st_ino != ours.st_ino;
}

}  // namespace

int OpenMappedFile(pid_t pid, const std::string& path) {
  const std::string link = absl::StrCat("/proc/", pid, "/root");
  // The root that a chroot has set; "/" also for a container, which has its own mounts.
  char root_path[PATH_MAX];
  const ssize_t size = readlink(link.c_str(), root_path, sizeof(root_path));
  const OwnedFd root(open(link.c_str(), O_PATH | O_DIRECTORY | O_CLOEXEC));
  if (size > 0 && root.get() >= 0 && absl::StartsWith(path, "/")) {
    // The paths of a chroot begin where its mounts do, not at its root.
    absl::string_view inside = path;
    const absl::string_view prefix(root_path, static_cast<size_t>(size));
    if (prefix == "/" || (absl::ConsumePrefix(&inside, prefix) && absl::StartsWith(inside, "/"))) {
      const int fd = OpenRegular(OpenAt(root.get(), std::string(inside)));
      if (fd >= 0) return fd;
    }
  }
  return HasOwnMounts(pid) ? -1 : OpenRegular(path);
}

}  // namespace muster::agent
