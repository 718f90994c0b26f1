// Preloaded into a program, which is killed (SIGKILL) just before its N-th call that changes
// something below a folder named "checkpoints": a file is made, written, synced, renamed or
// removed. All such calls are counted, so that the numbers from 1 on are every moment before and
// after each.
//   MUSTER_CRASH_AT=N     the number
//   MUSTER_CRASH_RANK=R   only of the process whose $RANK is R
//   MUSTER_CRASH_ONCE=F   only if the file F is not there yet, which is made then
//   MUSTER_CRASH_LOG=F    a line for each call is appended to the file F: its number, its kind and
//                         what it is about
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

void Describe(const char* path, char* text, size_t size) { snprintf(text, size, "%s", path); }

void Describe(int fd, char* text, size_t size) {
  char link[64];
  snprintf(link, sizeof(link), "/proc/self/fd/%d", fd);
  const ssize_t length = readlink(link, text, size - 1);
  text[length < 0 ? 0 : length] = 0;
}

template <class What>
void Log(const char* log, long number, const char* kind, What what) {
  char path[4096], line[4200];
  Describe(what, path, sizeof(path));
  const int length = snprintf(line, sizeof(line), "%ld %s %s\n", number, kind, path);
  const int fd = static_cast<int>(
      syscall(SYS_openat, AT_FDCWD, log, O_CREAT | O_APPEND | O_WRONLY | O_CLOEXEC, 0600));
  if (fd < 0) return;
  syscall(SYS_write, fd, line, length);
  syscall(SYS_close, fd);
}

std::atomic<long> calls{0};

template <class What>
void Count(const char* kind, What what) {
  static const bool counts = [] {
    const char* const rank = getenv("MUSTER_CRASH_RANK");
    const char* const mine = getenv("RANK");
    return rank == nullptr || (mine != nullptr && strcmp(rank, mine) == 0);
  }();
  if (!counts) return;
  static const long at = [] {
    const char* const text = getenv("MUSTER_CRASH_AT");
    return text == nullptr ? 0L : atol(text);
  }();
  const long number = ++calls;
  static const char* const log = getenv("MUSTER_CRASH_LOG");
  if (log != nullptr) Log(log, number, kind, what);
  if (number != at) return;
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
  if ((flags & O_CREAT) != 0 && Watched(path)) Count("create", path);
  return false;
}

}  // namespace

MUSTER_REPLACE_OPEN(open, CountMade)
MUSTER_REPLACE_OPEN(open64, CountMade)

extern "C" {

ssize_t write(int fd, const void* data, size_t size) {
  if (fd > 2 && Watched(fd)) Count("write", fd);
  static const auto real = muster::RealCall<ssize_t (*)(int, const void*, size_t)>("write");
  return real(fd, data, size);
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  if (Watched(fd)) Count("pwrite", fd);
  static const auto real = muster::RealCall<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return real(fd, data, size, at);
}

ssize_t pwrite64(int fd, const void* data, size_t size, off64_t at) {
  if (Watched(fd)) Count("pwrite64", fd);
  static const auto real =
      muster::RealCall<ssize_t (*)(int, const void*, size_t, off64_t)>("pwrite64");
  return real(fd, data, size, at);
}

int fsync(int fd) {
  if (Watched(fd)) Count("fsync", fd);
  static const auto real = muster::RealCall<int (*)(int)>("fsync");
  return real(fd);
}

int fdatasync(int fd) {
  if (Watched(fd)) Count("fdatasync", fd);
  static const auto real = muster::RealCall<int (*)(int)>("fdatasync");
  return real(fd);
}

int mkdir(const char* path, mode_t mode) {
  if (Watched(path)) Count("mkdir", path);
  static const auto real = muster::RealCall<int (*)(const char*, mode_t)>("mkdir");
  return real(path, mode);
}

int rename(const char* from, const char* to) {
  if (Watched(from)) Count("rename", from);
  static const auto real = muster::RealCall<int (*)(const char*, const char*)>("rename");
  return real(from, to);
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned int flags) {
  if (Watched(from)) Count("renameat2", from);
  static const auto real =
      muster::RealCall<int (*)(int, const char*, int, const char*, unsigned int)>("renameat2");
  return real(from_dir, from, to_dir, to, flags);
}

int unlink(const char* path) {
  if (Watched(path)) Count("unlink", path);
  static const auto real = muster::RealCall<int (*)(const char*)>("unlink");
  return real(path);
}

int unlinkat(int dir, const char* path, int flags) {
  if (Watched(path) || (dir >= 0 && Watched(dir))) Count("unlinkat", path);
  static const auto real = muster::RealCall<int (*)(int, const char*, int)>("unlinkat");
  return real(dir, path, flags);
}

int rmdir(const char* path) {
  if (Watched(path)) Count("rmdir", path);
  static const auto real = muster::RealCall<int (*)(const char*)>("rmdir");
  return real(path);
}

}  // extern "C"
