#ifndef MUSTER_WORKER_TRAIN_DISK_COPIES_H_
#define MUSTER_WORKER_TRAIN_DISK_COPIES_H_

#include <cstdint>
#include <memory>
#include <string>

#include "ATen/core/Tensor.h"

namespace muster {

// Copies of tensors in unlinked files of a folder, read on access: they take no memory that the
// kernel could not reclaim. Several copies share a file and its map, since a process may have no
// more than some 65,000 maps; the space on the disk is freed when the last copy in a file is
// dropped. Everything blocks on the disk. Not thread-safe; the copies are ordinary tensors and
// outlive the object.
class DiskCopies {
 public:
  // A tensor of this size or more has a file of its own.
  static constexpr uint64_t kFileBytes = uint64_t{64} << 20;

  // The folder is created when it is needed.
  explicit DiskCopies(std::string folder, uint64_t file_bytes = kFileBytes);

  // Returns a copy of `tensor` on the CPU, contiguous. Small tensors are copied in memory. Throws
  // c10::Error if the disk is full or fails; a disk that fails when the copy is used ends the
  // process (SIGBUS).
  at::Tensor Copy(const at::Tensor& tensor);

  // The number of copies that this process has made in files. Thread-safe.
  static uint64_t Made();

  // Returns the current values of `tensor` for a later reader: the tensor itself if it is a copy in
  // a file that was made when Made() was `since` or more; else Copy(). `since`: from a moment after
  // which no copy was given to code that changes it.
  at::Tensor Keep(const at::Tensor& tensor, uint64_t since);

 private:
  struct File;

  // Returns a file with room for `bytes` more, a multiple of the page.
  std::shared_ptr<File> FileFor(uint64_t bytes);

  const std::string folder_;
  const uint64_t file_bytes_;
  // The file that is being filled. Its copies keep it alive.
  std::weak_ptr<File> filling_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_DISK_COPIES_H_
