#ifndef MUSTER_BASE_TEST_SYSTEM_CALLS_H_
#define MUSTER_BASE_TEST_SYSTEM_CALLS_H_

#include <dlfcn.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstring>

namespace muster {

// For programs that have system calls of their own in place of the C library's.

// The C library's function of that name.
template <class F>
F RealCall(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

// Whether `part` occurs in the path, or in that of an open file.
inline bool PathHas(const char* path, const char* part) {
  return path != nullptr && strstr(path, part) != nullptr;
}

inline bool PathHas(int fd, const char* part) {
  char link[64], path[4096];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t size = readlink(link, path, sizeof(path) - 1);
  if (size <= 0) return false;
  path[size] = 0;
  return PathHas(path, part);
}

}  // namespace muster

#endif  // MUSTER_BASE_TEST_SYSTEM_CALLS_H_
