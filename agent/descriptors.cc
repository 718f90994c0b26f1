#include "agent/descriptors.h"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>

#include "agent/numbered_entries.h"

namespace muster::agent {
namespace {

// Containers may have limits of a billion, which would take minutes to try.
constexpr rlim_t kMostTried = 1 << 20;

int kept = -1;  // the descriptor of KeepOpen

// Returns false if /proc cannot list the open descriptors.
template <typename Apply>
bool ForEachListed(int first, Apply apply) {
  const int folder = open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (folder < 0) return false;
  // The kernel continues by number, so closing listed descriptors skips none.
  const bool all = ForEachNumber(folder, [&](int fd, const char* /*name*/) {
    if (fd >= first && fd != folder) apply(fd);
  });
  close(folder);
  return all;
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
