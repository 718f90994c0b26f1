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

// A file that is read through the page cache where it is there already, and else past it (O_DIRECT,
// if the file system allows): weights that are read once would only drive out of the cache what
// others have there, and cost a copy. Thread-safe; everything blocks on the disk.
//
// Errors are for callers who put the file's name before them: the system's, as ReadError(), and
// DATA_LOSS if the file has become shorter.
class StreamedFile {
 public:
  // A regular file of `bytes` bytes that is open for reading. Borrows `fd`, and `system`, of which
  // it calls open() and pread().
  StreamedFile(int fd, uint64_t bytes, const DirectFileSystem& system = DirectFileSystem::Real());

  int fd() const { return cached_; }
  // Whether the file system has agreed to direct I/O so far.
  bool direct() const { return is_direct_; }

  // Reads to `to`. What cannot be read in place goes through `scratch`: in place goes memory whose
  // address has the remainder of `begin` for kDirectAlignment, but for both ends.
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
