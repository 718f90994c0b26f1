#include "agent/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

namespace muster::agent {
namespace {

// Containers have limits of a milliard, which would take minutes to try.
constexpr rlim_t kMostTried = 1 << 20;

int kept = -1;  // of KeepOpen

struct LinuxDirent {
  uint64_t ino;
  int64_t off;
  unsigned short reclen;
  unsigned char type;
  char name[1];
};

// False if /proc cannot say which there are.
template <typename Apply>
bool ForEachListed(int first, Apply apply) {
  const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  alignas(LinuxDirent) char entries[4096];
  long size;  // NOLINT: what syscall returns
  // The kernel continues by number, so closing listed descriptors skips none.
  while ((size = syscall(SYS_getdents64, folder, entries, sizeof(entries))) > 0) {
    for (long at = 0; at < size;) {  // NOLINT
      const auto* entry = reinterpret_cast<const LinuxDirent*>(entries + at);
      at += entry->reclen;
      int fd = 0;
      const char* c = entry->name;
      while (*c >= '0' && *c <= '9') fd = fd * 10 + (*c++ - '0');
      if (*c == '\0' && c != entry->name && fd >= first && fd != folder) apply(fd);
    }
  }
  close(folder);
  return size == 0;
}

template <typename Apply>
void ForEachFrom(int first, Apply apply) {
  if (ForEachListed(first, apply)) return;
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  const int end = static_cast<int>(std::min(limit.rlim_cur, kMostTried));
  for (int fd = first; fd < end; ++fd) apply(fd);
}

}  // namespace

int SystemCloseRange(unsigned first, unsigned last, unsigned flags) {
  return static_cast<int>(syscall(SYS_close_range, first, last, flags));
}

void OpenStandardDescriptors() {
  int fd;
  do {
    fd = open("/dev/null", O_RDWR);
  } while (fd >= 0 && fd <= STDERR_FILENO);
  if (fd >= 0) close(fd);
}

bool IsStandardDescriptor(int fd) { return fcntl(fd, F_GETFD) == 0; }

void KeepOpen(int fd) { kept = fd; }

void CloseFrom(int first, CloseRangeCall close_range) {
  if (kept >= first) {
    const bool below = kept == first || close_range(first, kept - 1, 0) == 0;
    if (below && close_range(kept + 1, ~0U, 0) == 0) return;
  } else if (close_range(first, ~0U, 0) == 0) {
    return;
  }
  ForEachFrom(first, [](int fd) {
    if (fd != kept) close(fd);
  });
}

}  // namespace muster::agent
