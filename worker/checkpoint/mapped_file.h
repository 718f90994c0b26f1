#ifndef MUSTER_WORKER_CHECKPOINT_MAPPED_FILE_H_
#define MUSTER_WORKER_CHECKPOINT_MAPPED_FILE_H_

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster {

// A file that is mapped into memory for reading: its bytes are pages of the page cache, which the
// kernel takes back when others need memory, and reads again at the next access. Thread-safe.
//
// A write into the mapping ends the process (SIGSEGV). So does an access to a part that the file
// has lost, or that the disk cannot read (SIGBUS); LoadPages() finds both without a signal. Error
// messages lack the file's name, which callers prepend.
class MappedFile {
 public:
  // Maps the first `bytes` bytes of a file that is open for reading, and may be closed afterwards.
  // RESOURCE_EXHAUSTED if the process may have no more addresses; otherwise the system's error.
  static absl::StatusOr<MappedFile> Of(int fd, uint64_t bytes);
  MappedFile(MappedFile&& other) noexcept;
  MappedFile& operator=(MappedFile&&) = delete;
  ~MappedFile();

  // Begins at a page boundary. Null: the file is empty.
  const char* data() const { return data_; }
  uint64_t size() const { return size_; }

  // Whether all of the range is in memory, so that no access to it waits for the disk. False if
  // that cannot be determined (cached_pages.h). Does not block.
  bool IsInMemory(uint64_t begin, uint64_t bytes) const;
  // Reads those pages of the range that are not in memory. Blocks on the disk. DATA_LOSS if the
  // file has become shorter, or cannot be read.
  absl::Status LoadPages(uint64_t begin, uint64_t bytes) const;

 private:
  MappedFile(char* data, uint64_t size, bool may_ask)
      : data_(data), size_(size), may_ask_(may_ask) {}

  char* data_;
  uint64_t size_;
  bool may_ask_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MAPPED_FILE_H_
