#ifndef MUSTER_COORDINATOR_JOURNAL_WAL_CHECK_H_
#define MUSTER_COORDINATOR_JOURNAL_WAL_CHECK_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"

namespace muster::coordinator {

// The result of checking a SQLite write-ahead log file.
struct WalReport {
  uint64_t frames = 0;  // valid ones of committed transactions
  uint64_t commits = 0;
  // Bytes after these frames, of a transaction that a crash cut short; SQLite drops them.
  uint64_t torn_tail_bytes = 0;
};

// SQLite ends its reading of a write-ahead log at the first frame whose checksum is wrong, be it
// the torn end of the last transaction (right: it was never acknowledged) or a flipped bit in the
// middle (wrong: it silently forgets acknowledged transactions). This check distinguishes the two.
// With synchronous=FULL a transaction is written only after the one before it was synced, so at
// most the last transaction can be torn: a bad frame that is followed by frames of a later
// transaction is corruption. Format: sqlite.org/fileformat2.html section 4 (header of 32 bytes,
// frames of 24 + page size; a frame with a non-zero size field commits; salts tell frames of this
// log from leftovers of older ones).
//
// A missing or empty file is fine. Errors: DATA_LOSS naming the file and the byte offset;
// UNAVAILABLE it cannot be read.
absl::StatusOr<WalReport> CheckWal(const std::string& path);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOURNAL_WAL_CHECK_H_
