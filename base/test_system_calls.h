#ifndef MUSTER_BASE_TEST_SYSTEM_CALLS_H_
#define MUSTER_BASE_TEST_SYSTEM_CALLS_H_

#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <sys/types.h>
#include <unistd.h>

#include <cstring>

namespace muster {

// For programs that replace system calls of the C library by their own functions.

// Returns the C library's function of that name.
template <class F>
F RealCall(const char* name) {
  return reinterpret_cast<F>(dlsym(RTLD_NEXT, name));
}

// Returns whether `part` occurs in the path, or in the path of an open file.
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

// Returns the mode of a new file, the argument after `flags` of open(); 0 if there is none.
inline mode_t OpenMode(int flags, va_list after_flags) {
  const bool makes_file = (flags & O_CREAT) != 0 || (flags & O_TMPFILE) == O_TMPFILE;
  return makes_file ? va_arg(after_flags, mode_t) : 0;
}

// Defines the program's own `name`, open or open64: it fails if `fails(path, flags)` is true, with
// the errno that is set by then, and otherwise calls the C library's. Use it outside of namespaces.
#define MUSTER_REPLACE_OPEN(name, fails)                                              \
  extern "C" int name(const char* path, int flags, ...) {                             \
    va_list after_flags;                                                              \
    va_start(after_flags, flags);                                                     \
    const mode_t mode = muster::OpenMode(flags, after_flags);                         \
    va_end(after_flags);                                                              \
    if (fails(path, flags)) return -1;                                                \
    static const auto real = muster::RealCall<int (*)(const char*, int, ...)>(#name); \
    return real(path, flags, mode);                                                   \
  }

// Defines the program's own read and pread likewise: they fail if `fails(fd)` is true.
#define MUSTER_REPLACE_READS(fails)                                                             \
  extern "C" ssize_t read(int fd, void* to, size_t size) {                                      \
    if (fails(fd)) return -1;                                                                   \
    static const auto real = muster::RealCall<ssize_t (*)(int, void*, size_t)>("read");         \
    return real(fd, to, size);                                                                  \
  }                                                                                             \
  extern "C" ssize_t pread(int fd, void* to, size_t size, off_t at) {                           \
    if (fails(fd)) return -1;                                                                   \
    static const auto real = muster::RealCall<ssize_t (*)(int, void*, size_t, off_t)>("pread"); \
    return real(fd, to, size, at);                                                              \
  }

}  // namespace muster

#endif  // MUSTER_BASE_TEST_SYSTEM_CALLS_H_
