#include "base/test_failing_disk.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <type_traits>

#include "base/test_system_calls.h"

namespace muster {

DiskFault disk_fault;

void DiskFault::Arm(long call) {
  calls = 0;
  fired = false;
  at = call;
}

void DiskFault::Disarm() { at = 0; }

}  // namespace muster

namespace {

template <class Where>
bool Fails(Where where, bool removes = false) {
  muster::DiskFault& fault = muster::disk_fault;
  if (fault.at == 0 || (removes && !fault.also_removals)) return false;
  if (fault.open_files && !std::is_same_v<Where, int>) return false;
  if (!muster::PathHas(where, "/failing_disk")) return false;
  const long call = ++fault.calls;
  if (fault.lasts ? call < fault.at : call != fault.at) return false;
  fault.fired = true;
  errno = fault.error;
  return true;
}

bool FailsToMake(const char* path, int flags) { return (flags & O_CREAT) != 0 && Fails(path); }

}  // namespace

MUSTER_REPLACE_OPEN(open, FailsToMake)

extern "C" {

ssize_t write(int fd, const void* data, size_t size) {
  if (fd > 2 && Fails(fd)) return -1;
  static const auto real = muster::RealCall<ssize_t (*)(int, const void*, size_t)>("write");
  return real(fd, data, size);
}

ssize_t pwrite(int fd, const void* data, size_t size, off_t at) {
  if (Fails(fd)) return -1;
  static const auto real = muster::RealCall<ssize_t (*)(int, const void*, size_t, off_t)>("pwrite");
  return real(fd, data, size, at);
}

int fallocate(int fd, int mode, off_t at, off_t size) {
  if (Fails(fd)) return -1;
  static const auto real = muster::RealCall<int (*)(int, int, off_t, off_t)>("fallocate");
  return real(fd, mode, at, size);
}

int ftruncate(int fd, off_t size) {
  if (Fails(fd)) return -1;
  static const auto real = muster::RealCall<int (*)(int, off_t)>("ftruncate");
  return real(fd, size);
}

int fsync(int fd) {
  if (Fails(fd)) return -1;
  static const auto real = muster::RealCall<int (*)(int)>("fsync");
  return real(fd);
}

int fdatasync(int fd) {
  if (Fails(fd)) return -1;
  static const auto real = muster::RealCall<int (*)(int)>("fdatasync");
  return real(fd);
}

int mkdir(const char* path, mode_t mode) {
  if (Fails(path)) return -1;
  static const auto real = muster::RealCall<int (*)(const char*, mode_t)>("mkdir");
  return real(path, mode);
}

int rename(const char* from, const char* to) {
  if (Fails(from)) return -1;
  static const auto real = muster::RealCall<int (*)(const char*, const char*)>("rename");
  return real(from, to);
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to, unsigned int flags) {
  if (Fails(from)) return -1;
  static const auto real =
      muster::RealCall<int (*)(int, const char*, int, const char*, unsigned int)>("renameat2");
  return real(from_dir, from, to_dir, to, flags);
}

int unlink(const char* path) {
  if (Fails(path, /*removes=*/true)) return -1;
  static const auto real = muster::RealCall<int (*)(const char*)>("unlink");
  return real(path);
}

int unlinkat(int dir, const char* path, int flags) {
  if (dir >= 0 ? Fails(dir, /*removes=*/true) : Fails(path, /*removes=*/true)) return -1;
  static const auto real = muster::RealCall<int (*)(int, const char*, int)>("unlinkat");
  return real(dir, path, flags);
}

int rmdir(const char* path) {
  if (Fails(path, /*removes=*/true)) return -1;
  static const auto real = muster::RealCall<int (*)(const char*)>("rmdir");
  return real(path);
}

}  // extern "C"
