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

// Reads and writes past the page cache (O_DIRECT), for direct_file.h and scratch_file.h.

// The alignment of addresses, offsets and sizes for direct I/O; more than any common disk needs.
inline constexpr size_t kDirectAlignment = 4096;

inline bool IsDirectAligned(uint64_t number) { return number % kDirectAlignment == 0; }
inline bool IsDirectAligned(const void* address) {
  return IsDirectAligned(reinterpret_cast<uintptr_t>(address));
}
inline uint64_t DirectAlignedUp(uint64_t number) {
  return (number + kDirectAlignment - 1) / kDirectAlignment * kDirectAlignment;
}

// The system calls. Tests replace them.
struct DirectFileSystem {
  std::function<int(const char* path, int flags, mode_t mode)> open;
  std::function<ssize_t(int fd, const void* from, size_t size, off_t at)> pwrite = ::pwrite;
  std::function<ssize_t(int fd, void* to, size_t size, off_t at)> pread = ::pread;
  std::function<int(int fd, off_t size)> allocate;
  std::function<int(int fd)> fsync = ::fsync;
  std::function<void(absl::Duration)> wait;  // empty: that of the limiter
  // Whether another thread can be started for a file that is appended to. Empty: try to start one.
  std::function<bool()> gives_thread;

  DirectFileSystem();

  static const DirectFileSystem& Real();
};

// An open file that switches to the page cache for good when the file system refuses direct I/O.
// Transfers are thread-safe. Errors are the system's, with the path and the offset.
class DirectFile {
 public:
  // Opens a file as open(2) does, with direct I/O if `direct` and the file system allows it.
  // Borrows `system`.
  static absl::StatusOr<DirectFile> Open(const DirectFileSystem& system, const std::string& path,
                                         int flags, bool direct, mode_t mode = 0666);
  DirectFile(DirectFile&& other) noexcept;

  const std::string& path() const { return path_; }
  // Sets the name of the file in later errors.
  void set_path(std::string path) { path_ = std::move(path); }
  int fd() const { return fd_.get(); }
  bool direct() const { return direct_.load(std::memory_order_relaxed); }

  // Tries to use direct I/O from now on. Returns whether the file system agrees.
  bool TurnDirect();
  // Call it after EINVAL of a transfer that was `direct`: some file systems refuse direct I/O only
  // at the first transfer. Returns whether to try again.
  bool GiveUpDirect();

  // Writes all of `bytes` at `at`; they are aligned if the file is direct. RESOURCE_EXHAUSTED for a
  // full disk.
  absl::Status Write(absl::string_view bytes, uint64_t at);
  // Reads `size` bytes; address, size and offset are aligned if the file is direct. DATA_LOSS if
  // the file ends earlier.
  absl::Status Read(char* to, size_t size, uint64_t at);

 private:
  DirectFile(const DirectFileSystem& system, std::string path, int fd, bool direct);

  const DirectFileSystem* system_;
  std::string path_;
  OwnedFd fd_;
  std::atomic<bool> direct_;
};

// Returns the error in `errno`: "cannot <what> <path> at byte <offset>".
absl::Status DirectIoError(absl::string_view what, const std::string& path, uint64_t offset);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DIRECT_IO_H_
