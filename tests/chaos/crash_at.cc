// Preloaded into a program: it is killed (SIGKILL) just before its N-th call that changes something
// below a folder named "checkpoints": a file is made, written, synced, renamed or removed. All such
// calls are counted, so that the numbers from 1 on are every moment before and after each.
//   MUSTER_CRASH_AT=N     the number
//   MUSTER_CRASH_RANK=R   only of the process whose $RANK is R
//   MUSTER_CRASH_ONCE=F   only if the file F is not there yet, which is made then
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <cstdlib>
#include <cstring>

#include "base/test_system_calls.h"

namespace {

template <class Where>
bool Watched(Where where) {
  return muster::PathHas(where, "/checkpoints");
}

void Count() {
  static const long at = [] {
    const char* const text = getenv("MUSTER_CRASH_AT");
    const char* const rank = getenv("MUSTER_CRASH_RANK");
    const char* const mine = getenv("RANK");
    if (text == nullptr || (rank != nullptr && (mine == nullptr || strcmp(rank, mine) != 0))) {
      return 0L;
    }
    return atol(text);
  }();
  static std::atomic<long> calls{0};
  if (at == 0 || ++calls != at) return;
  const char* const once = getenv("MUSTER_CRASH_ONCE");
  if (once != nullptr) {
    const int fd = static_cast<int>(
        syscall(SYS_openat, AT_FDCWD, once, O_CREAT | O_EXCL | O_WRONLY | O_CLOEXEC, 0600));
    if (fd < 0) return;
    syscall(SYS_close, fd);
  }
  kill(getpid(), SIGKILL);
  pause();
}

// Never fails.
bool CountMade(const char* path, int flags) {
  if ((flags & O_CREAT) != 0 && Watched(path)) Count();
  return false;
}

}  // namespace

MUSTER_REPLACE_OPEN(open, CountMade)
MUSTER_REPLACE_OPEN(open64, CountMade)

extern "C" {

ssize_t write(int fd, const void* data, size_t size) {
  if (fd > 2 && Watched(fd)) Count();
  static const auto real = muster::RealCall<ssize_t (*)(int, const void*, size_t)>("write");
  return real(fd, data, size);
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  if (Watched(fd)) Count();
  static const auto real = muster::RealCall<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
  if (Watched(fd)) Count();
  static const auto real =
      muster::RealCall<ssize_t (*)(int, const void*, size_t, off64_t)>("pwrite64");
  return real(fd, data, size, at);
}

int fsync(int fd) {
  if (Watched(fd)) Count();
  static const auto real = muster::RealCall<int (*)(int)>("fsync");
  return real(fd);
}

int fdatasync(int fd) {
  if (Watched(fd)) Count();
  static const auto real = muster::RealCall<int (*)(int)>("fdatasync");
  return real(fd);
}

int mkdir(const char* path, mode_t mode) {
  if (Watched(path)) Count();
  static const auto real = muster::RealCall<int (*)(const char*, mode_t)>("mkdir");
  return real(path, mode);
}

int rename(const char* from, const char* to) {
  if (Watched(from)) Count();
  static const auto real = muster::RealCall<int (*)(const char*, const char*)>("rename");
  return real(from, to);
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned int flags) {
  if (Watched(from)) Count();
  static const auto real =
      muster::RealCall<int (*)(int, const char*, int, const char*, unsigned int)>("renameat2");
  return real(from_dir, from, to_dir, to, flags);
}

int unlink(const char* path) {
  if (Watched(path)) Count();
  static const auto real = muster::RealCall<int (*)(const char*)>("unlink");
  return real(path);
}

int unlinkat(int dir, const char* path, int flags) {
  if (Watched(path) || (dir >= 0 && Watched(dir))) Count();
  static const auto real = muster::RealCall<int (*)(int, const char*, int)>("unlinkat");
  return real(dir, path, flags);
}

int rmdir(const char* path) {
  if (Watched(path)) Count();
  static const auto real = muster::RealCall<int (*)(const char*)>("rmdir");
  return real(path);
}

}  // extern "C"
