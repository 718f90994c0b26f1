#ifndef MUSTER_WORKER_CHECKPOINT_DIRECT_FILE_H_
#define MUSTER_WORKER_CHECKPOINT_DIRECT_FILE_H_

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/direct_io.h"
#include "worker/checkpoint/rate_limiter.h"

namespace muster {

struct HostPinning;

// Writes and reads large files past the page cache (O_DIRECT) in blocks, several at a time, and
// digests each block in the same pass. If the file system refuses direct I/O, uses the cache.
// Everything blocks on the disk and is thread-safe.

inline constexpr size_t kDirectBlockBytes = size_t{8} << 20;

struct DirectFileOptions {
  // A multiple of kDirectAlignment.
  size_t block_bytes = kDirectBlockBytes;
  // Blocks under way at a time, each in a thread of its own.
  int in_flight = 2;
  // Null: as fast as the disk takes it.
  RateLimiter* limiter = nullptr;
  // For writes: once it is true, no further block is written. Null: never.
  const std::atomic<bool>* abandoned = nullptr;
  // For writes: called when `bytes` more bytes are in the file, by the thread that wrote them: one
  // of the `in_flight` threads that WriteDirectFile() starts, or only the caller's, if the file is
  // written through the cache or is a single block.
  std::function<void(uint64_t bytes)> wrote = nullptr;
  // Null: the real one.
  const DirectFileSystem* system = nullptr;
  // For a DirectFileStream: how its blocks are pinned, for a GPU that writes to them. Null: they
  // are not pinned. Borrowed.
  const HostPinning* pinning = nullptr;
  // For reads: returns the place for the block at an offset: memory that begins at a multiple of
  // kDirectAlignment and has room for the block's size, rounded up to the next multiple. If it is
  // null or returns null, blocks go into memory of the read's own.
  std::function<char*(uint64_t offset)> place = nullptr;
};

struct DirectFileWritten {
  FileDigest digest;
  BlockDigests blocks;
  // false: the file system refused direct I/O.
  bool direct = false;
};

// Writes the file and syncs it, but not its folder. An existing file is overwritten. Direct only
// from memory that begins at a multiple of kDirectAlignment. After an error part of the file stays.
// Errors: the system's, with the path and, for a write, the offset (RESOURCE_EXHAUSTED for a full
// disk); CANCELLED once it is abandoned.
absl::StatusOr<DirectFileWritten> WriteDirectFile(const std::string& path,
                                                  absl::string_view contents,
                                                  const DirectFileOptions& options = {});

// Writes a file as WriteDirectFile does, from bytes that come in order and lie anywhere in memory:
// they are copied into blocks, which threads write while the next block is filled. Needs memory for
// one block more than there are under way. Not thread-safe.
class DirectFileStream {
 public:
  // `bytes`: the size of the file. Errors: those of WriteDirectFile.
  static absl::StatusOr<std::unique_ptr<DirectFileStream>> Create(
      const std::string& path, uint64_t bytes, const DirectFileOptions& options = {});
  // Waits for blocks under way. Without Finish(), part of the file stays.
  ~DirectFileStream();
  DirectFileStream(const DirectFileStream&) = delete;
  DirectFileStream& operator=(const DirectFileStream&) = delete;

  // Appends `bytes`, which may change after the return. Blocks while all blocks are under way.
  // Errors: those of an earlier block.
  absl::Status Append(absl::string_view bytes);

  // Like Append, for bytes that are not in memory: `fill` puts `size` of them, from `offset` on,
  // into `to`, from which they are written. It is called in order, each time for as much as a block
  // has room for. An exception of `fill` is passed on; nothing can be appended afterwards.
  absl::Status AppendBy(uint64_t bytes,
                        absl::FunctionRef<void(char* to, uint64_t offset, size_t size)> fill);

  // Must be called once all bytes are appended: writes the rest and syncs the file. Nothing may be
  // called after it.
  absl::StatusOr<DirectFileWritten> Finish();

 private:
  struct State;
  explicit DirectFileStream(std::unique_ptr<State> state);

  const std::unique_ptr<State> state_;
};

// A range of a file, in bytes.
struct FileRange {
  uint64_t begin = 0;
  uint64_t end = 0;
};

// Reads the blocks that `range` touches (absent: all) of a file of `bytes` bytes, compares each
// with its digest, and passes it to `take` with its offset, from several threads at once and in any
// order. Needs memory for one block in each thread. Stops at the first error. Errors: the system's;
// DATA_LOSS if the file is shorter, or naming the damaged block; those of `take`.
absl::Status ReadDirectFile(
    const std::string& path, uint64_t bytes, const BlockDigests& blocks,
    const std::optional<FileRange>& range,
    absl::FunctionRef<absl::Status(uint64_t offset, absl::string_view block)> take,
    const DirectFileOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DIRECT_FILE_H_
