#ifndef MUSTER_WORKER_CHECKPOINT_DIRECT_PIECES_H_
#define MUSTER_WORKER_CHECKPOINT_DIRECT_PIECES_H_

#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/direct_file.h"

namespace muster {

// Files whose bytes lie in several places of memory, and files that lie in memory. Thread-safe.

// Like WriteDirectFile, for bytes that lie in several places, in order. Past the page cache, blocks
// are copied unless the bytes lie in one place that begins at a multiple of kDirectAlignment: by
// one thread more than there are blocks under way, and into as many blocks of memory. Through the
// cache, which accepts a file's bytes from one thread at a time, they are written from where they
// are.
absl::StatusOr<DirectFileWritten> WriteDirectPieces(const std::string& path,
                                                    absl::Span<const absl::string_view> pieces,
                                                    const DirectFileOptions& options = {});

// Whether the file system of an open file keeps files in memory (tmpfs, ramfs), where direct I/O
// would make one more copy. False for file systems with which the options replace the real one.
bool IsInMemory(int fd, const DirectFileOptions& options);

// Compares the blocks that `range` touches (absent: all) of `contents`, a file in memory, with
// their digests, in `threads` threads. Errors: those of ReadDirectFile.
absl::Status CheckBlocks(const std::string& path, absl::string_view contents,
                         const BlockDigests& blocks, const std::optional<FileRange>& range,
                         int threads);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_DIRECT_PIECES_H_
