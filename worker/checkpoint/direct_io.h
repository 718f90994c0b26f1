#ifndef MUSTER_WORKER_CHECKPOINT_DIRECT_IO_H_
#define MUSTER_WORKER_CHECKPOINT_DIRECT_IO_H_

#include <sys/types.h>
#include <unistd.h>

#include <atomic>
#include <cstdint>
#include <functional>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/owned_fd.h"

namespace muster {

// Reads and writes past the page cache (O_DIRECT): what direct_file.h and scratch_file.h are made
// of.

// What direct I/O asks of addresses, offsets and sizes; more than any common disk needs.
inline constexpr size_t kDirectAlignment = 4096;

inline bool IsDirectAligned(uint64_t number) { return number % kDirectAlignment == 0; }
inline bool IsDirectAligned(const void* address) {
  return IsDirectAligned(reinterpret_cast<uintptr_t>(address));
}
inline uint64_t DirectAlignedUp(uint64_t number) {
  return (number + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}

// The calls of the system. Tests put others in their place.
struct DirectFileSystem {
  std::function<int(const char* path, int flags, mode_t mode)> open;
  std::function<ssize_t(int fd, const void* from, size_t size, off_t at)> pwrite = ::pwrite;
  std::function<ssize_t(int fd, void* to, size_t size, off_t at)> pread = ::pread;
  std::function<int(int fd, off_t size)> allocate;
  std::function<int(int fd)> fsync = ::fsync;
  std::function<void(absl::Duration)> wait;  // empty: the limiter's
  // Whether a file that is appended to gets another thread. Empty: if the system gives one.
  std::function<bool()> gives_thread;

  DirectFileSystem();

  static const DirectFileSystem& Real();
};

// An open file that turns to the page cache for good when the file system refuses direct I/O.
// Transfers are thread-safe. Errors are the system's, with the path and the offset.
class DirectFile {
 public:
  // As open(2), direct if `direct`; not direct if the file system refuses. Borrows `system`.
  static absl::StatusOr<DirectFile> Open(const DirectFileSystem& system, const std::string& path,
                                         int flags, bool direct, mode_t mode = 0666);
  DirectFile(DirectFile&& other) noexcept;

  const std::string& path() const { return path_; }
  // What errors call the file from now on.
  void set_path(std::string path) { path_ = std::move(path); }
  int fd() const { return fd_.get(); }
  bool direct() const { return direct_.load(std::memory_order_relaxed); }

  // Asks for direct I/O from now on. Whether the file system agrees.
  bool TurnDirect();
  // After EINVAL of a transfer that was `direct`: some file systems refuse at the first one only.
  // Whether to try again.
  bool GiveUpDirect();

  // Writes all of `bytes`, which is aligned if the file is direct, at `at`. RESOURCE_EXHAUSTED for
  // a full disk.
  absl::Status Write(absl::string_view bytes, uint64_t at);
  // Reads `size` bytes; address, size and offset are aligned if the file is direct. DATA_LOSS if
  // the file ends before.
  absl::Status Read(char* to, size_t size, uint64_t at);

 private:
  DirectFile(const DirectFileSystem& system, std::string path, int fd, bool direct);

  const DirectFileSystem* system_;
  std::string path_;
  OwnedFd fd_;
  std::atomic<bool> direct_;
};

// The error in `errno`: "cannot <what> <path> at byte <offset>".
absl::Status DirectIoError(absl::string_view what, const std::string& path, uint64_t offset);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DIRECT_IO_H_
