#ifndef MUSTER_WORKER_CHECKPOINT_SCRATCH_FILE_H_
#define MUSTER_WORKER_CHECKPOINT_SCRATCH_FILE_H_

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/direct_io.h"

namespace muster {

// A file of one process for state that does not fit into its memory. It has no name, so it
// disappears with the process, however that ends. Reads and writes bypass the page cache if the
// file system allows it. Everything blocks on the disk. Read, Write and Map are thread-safe for
// ranges that do not overlap; Reserve is not.
class ScratchFile {
 public:
  // Makes a file in `folder`, which is created if it does not exist. Warns if the folder is in
  // memory. `system`: null: the real one; borrowed. Errors: the system's, with the path.
  static absl::StatusOr<std::shared_ptr<ScratchFile>> Create(
      const std::string& folder, const DirectFileSystem* system = nullptr);

  // Reserves `bytes` more bytes on the disk, which are zeros, and returns their offset, a multiple
  // of kDirectAlignment. If the file system cannot reserve, a later write may find the disk full.
  // Errors: RESOURCE_EXHAUSTED for a full disk; then nothing has changed.
  absl::StatusOr<uint64_t> Reserve(uint64_t bytes);

  // Offset, size and address must be multiples of kDirectAlignment. Errors: the system's, with the
  // folder and the offset.
  absl::Status Read(uint64_t at, char* to, uint64_t bytes);
  absl::Status Write(uint64_t at, absl::string_view bytes);

  // Returns the bytes as memory of their own that is filled from the file when it is read. It
  // outlives this object. It may reach beyond the end of the file, to be read once that has been
  // written. Later writes to the file show in pages that have not been read yet, and may or may not
  // show in others; writes to the memory do not reach the file. A disk that fails under it ends the
  // process (SIGBUS).
  absl::StatusOr<std::shared_ptr<char>> Map(uint64_t at, uint64_t bytes) const;

  uint64_t size() const { return size_; }
  bool direct() const { return file_.direct(); }

 private:
  ScratchFile(const DirectFileSystem& system, DirectFile file);

  const DirectFileSystem& system_;
  DirectFile file_;
  uint64_t size_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SCRATCH_FILE_H_
