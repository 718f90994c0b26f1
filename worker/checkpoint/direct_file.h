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

// Large files, written and read past the page cache (O_DIRECT) in blocks, several at a time, with
// the digest of each block from the same pass. Where the file system refuses direct I/O, through
// the cache. Everything blocks on the disk and is thread-safe.

inline constexpr size_t kDirectBlockBytes = size_t{8} << 20;

struct DirectFileOptions {
  // A multiple of kDirectAlignment.
  size_t block_bytes = kDirectBlockBytes;
  // Blocks under way at a time, each by a thread of its own.
  int in_flight = 2;
  // Null: as fast as the disk takes it.
  RateLimiter* limiter = nullptr;
  // Of writes: once it is true no further block is written. Null: never.
  const std::atomic<bool>* abandoned = nullptr;
  // Of writes: called when so many bytes more are in the file, by the thread that wrote them: one
  // of `in_flight` that WriteDirectFile() starts, or the caller's, alone, through the cache or if
  // there is a single block.
  std::function<void(uint64_t bytes)> wrote = nullptr;
  // Null: the system's own.
  const DirectFileSystem* system = nullptr;
  // Of a DirectFileStream: how its blocks are pinned, for a GPU that writes to them. Null: they are
  // not. Borrowed.
  const HostPinning* pinning = nullptr;
  // Of reads: where the block at an offset goes, memory for all of it up to the next multiple of
  // kDirectAlignment, which begins at one. Null, or where it returns null: into memory of the
  // read's own.
  std::function<char*(uint64_t offset)> place = nullptr;
};

struct DirectFileWritten {
  FileDigest digest;
  BlockDigests blocks;
  // false: the file system refused direct I/O.
  bool direct = false;
};

// Writes the file and syncs it; not its folder. A file that is there is overwritten. Direct only
// from memory that begins at a multiple of kDirectAlignment. After an error part of the file stays.
// Errors: the system's, with the path and, of a write, the offset (RESOURCE_EXHAUSTED for a full
// disk); CANCELLED once it is abandoned.
absl::StatusOr<DirectFileWritten> WriteDirectFile(const std::string& path,
                                                  absl::string_view contents,
                                                  const DirectFileOptions& options = {});

// Writes a file as WriteDirectFile does, from bytes that come in order and lie anywhere in memory:
// they are copied into blocks, which threads write while the next block is filled. Needs the memory
// of one block more than there are under way. Not thread-safe.
class DirectFileStream {
 public:
  // `bytes`: the size of the file. Errors: as WriteDirectFile.
  static absl::StatusOr<std::unique_ptr<DirectFileStream>> Create(
      const std::string& path, uint64_t bytes, const DirectFileOptions& options = {});
  // Waits for blocks under way. Without Finish() part of the file stays.
  ~DirectFileStream();
  DirectFileStream(const DirectFileStream&) = delete;
  DirectFileStream& operator=(const DirectFileStream&) = delete;

  // The bytes may change then. Blocks while all blocks are under way. Errors: those of a block
  // before.
  absl::Status Append(absl::string_view bytes);

  // As Append, of bytes that are not in memory: `fill` puts `size` of them, from `offset` on, where
  // they are written from. It is called in order, for as much as a block has room for. What it
  // throws is thrown; no more can be appended then.
  absl::Status AppendBy(uint64_t bytes,
                        absl::FunctionRef<void(char* to, uint64_t offset, size_t size)> fill);

  // Once all bytes are there: writes the rest and syncs the file. Nothing may be called after it.
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
// with its digest, and hands it to `take` with its offset: from several threads at once, in any
// order. Needs a block's memory for each thread. Stops at the first error. Errors: the system's;
// DATA_LOSS if the file is shorter, or naming the block that is damaged; what `take` returns.
absl::Status ReadDirectFile(
    const std::string& path, uint64_t bytes, const BlockDigests& blocks,
    const std::optional<FileRange>& range,
    absl::FunctionRef<absl::Status(uint64_t offset, absl::string_view block)> take,
    const DirectFileOptions& options = {});

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DIRECT_FILE_H_
