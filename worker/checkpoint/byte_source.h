#ifndef MUSTER_WORKER_CHECKPOINT_BYTE_SOURCE_H_
#define MUSTER_WORKER_CHECKPOINT_BYTE_SOURCE_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster {

class StreamedFile;

// Bytes that can be read at any offset: a file, or memory in tests. Read may be called from several
// threads.
class ByteSource {
 public:
  virtual ~ByteSource() = default;

  // A name for messages: the path of a file.
  virtual const std::string& name() const = 0;
  virtual uint64_t size() const = 0;

  // Reads exactly `bytes` bytes at `offset`. Returns DATA_LOSS if the range leaves the source.
  virtual absl::Status Read(uint64_t offset, char* to, size_t bytes) const = 0;

  // Access for bytes that are read only once; null: there is only Read().
  virtual const StreamedFile* streamed() const { return nullptr; }
};

// Opens a file. Blocks on the disk. INVALID_ARGUMENT if `path` is not a regular file.
absl::StatusOr<std::unique_ptr<ByteSource>> OpenFileSource(const std::string& path);

std::unique_ptr<ByteSource> MemorySource(std::string bytes, std::string name);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_BYTE_SOURCE_H_
