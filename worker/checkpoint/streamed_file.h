#ifndef MUSTER_WORKER_CHECKPOINT_STREAMED_FILE_H_
#define MUSTER_WORKER_CHECKPOINT_STREAMED_FILE_H_

#include <atomic>
#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/owned_fd.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/cached_pages.h"
#include "worker/checkpoint/direct_io.h"

namespace muster {

// A file that is read through the page cache if it is cached, and otherwise past it (O_DIRECT, if
// the file system allows it): weights that are read once would only evict what others have cached,
// and cost a copy. Thread-safe; everything blocks on the disk.
//
// Errors are for callers that prepend the file's name: the system's, as from ReadError(), and
// DATA_LOSS if the file has become shorter.
class StreamedFile {
 public:
  // A regular file of `bytes` bytes that is open for reading. Borrows `fd`, and `system`, whose
  // open() and pread() it calls.
  StreamedFile(int fd, uint64_t bytes, const DirectFileSystem& system = DirectFileSystem::Real());

  int fd() const { return cached_; }
  // Whether the file system has agreed to direct I/O so far.
  bool direct() const { return is_direct_; }

  // Reads to `to`. Bytes that cannot be read in place go through `scratch`. Except for both ends,
  // memory is read in place if its address has the same remainder as `begin` for kDirectAlignment.
  absl::Status Read(uint64_t begin, size_t bytes, char* to, AlignedMemory& scratch) const;

  // Reads to somewhere in `block`, which begins at a multiple of kDirectAlignment and has room for
  // RoomFor() bytes. Returns the offset there.
  absl::StatusOr<size_t> Fetch(uint64_t begin, size_t bytes, char* block) const;
  static size_t RoomFor(uint64_t begin, size_t bytes) {
    return DirectAlignedUp(begin + bytes) - begin / kDirectAlignment * kDirectAlignment;
  }

 private:
  bool IsFromCache(uint64_t begin, size_t bytes) const {
    return !is_direct_ || pages_.Has(begin, bytes);
  }
  // Reads up to `most` bytes; `needed` must be there.
  absl::Status ReadFrom(int fd, uint64_t at, size_t needed, size_t most, char* to) const;

  const DirectFileSystem& system_;
  const int cached_;
  const OwnedFd direct_;
  const CachedPages pages_;
  mutable std::atomic<bool> is_direct_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_STREAMED_FILE_H_
