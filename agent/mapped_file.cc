#include "agent/mapped_file.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "absl/strings/str_cat.h"

namespace muster::agent {
namespace {

int OpenRegular(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) != 0 || !S_ISREG(info.st_mode)) return -1;
  // It may have become another one meanwhile.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK | O_NOCTTY);
  if (fd >= 0 && (fstat(fd, &info) != 0 || !S_ISREG(info.st_mode))) {
    close(fd);
    return -1;
  }
  return fd;
}

bool HasOwnMounts(pid_t pid) {
  struct stat its, ours;
  return stat(absl::StrCat("/proc/", pid, "/ns/mnt").c_str(), &its) != 0 ||
         stat("/proc/self/ns/mnt", &ours) != 0 || its.st_ino != ours.st_ino;
}

}  // namespace

int OpenMappedFile(pid_t pid, const std::string& path) {
  const int fd = OpenRegular(absl::StrCat("/proc/", pid, "/root", path));
  // The paths of a chroot among our own mounts begin at our root.
  return fd >= 0 || HasOwnMounts(pid) ? fd : OpenRegular(path);
}

}  // namespace muster::agent
