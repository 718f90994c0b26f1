#ifndef MUSTER_WORKER_CHECKPOINT_TEST_MOUNTED_H_
#define MUSTER_WORKER_CHECKPOINT_TEST_MOUNTED_H_

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>

#include <cstdint>
#include <string>

#include "base/test_system_calls.h"

// The place where another file system seems to be mounted. For a test program of one file.
struct Mounted {
  std::string end = "";       // the end of the mount point's path; empty: there is none
  bool kernel_tells = false;  // whether statx reports it, so that devices need not be compared
  bool refuses_statx = false;
};
inline Mounted mounted;

inline bool IsMounted(const std::string& path) {
  return !mounted.end.empty() && path.size() >= mounted.end.size() &&
         path.compare(path.size() - mounted.end.size(), std::string::npos, mounted.end) == 0;
}

extern "C" int statx(int folder, const char* path, int flags, unsigned int mask,
                     struct statx* info) noexcept {
  static const auto real =
      muster::RealCall<int (*)(int, const char*, int, unsigned int, struct statx*)>("statx");
  if (mounted.refuses_statx) {
    errno = EPERM;
    return -1;
  }
  const int result = real(folder, path, flags, mask, info);
  if (mounted.end.empty()) return result;
  if (mounted.kernel_tells) {
    info->stx_attributes_mask |= STATX_ATTR_MOUNT_ROOT;
  } else {
    info->stx_attributes_mask &= ~static_cast<uint64_t>(STATX_ATTR_MOUNT_ROOT);
  }
  if (!IsMounted(path)) return result;
  info->stx_attributes |= STATX_ATTR_MOUNT_ROOT;
  ++info->stx_dev_minor;
  return result;
}

extern "C" int rename(const char* from, const char* to) noexcept {
  static const auto real = muster::RealCall<int (*)(const char*, const char*)>("rename");
  if (!IsMounted(from)) return real(from, to);
  errno = EBUSY;
  return -1;
}

#endif  // MUSTER_WORKER_CHECKPOINT_TEST_MOUNTED_H_
