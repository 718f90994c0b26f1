#ifndef MUSTER_AGENT_ATTEMPT_LOG_H_
#define MUSTER_AGENT_ATTEMPT_LOG_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace muster::agent {

// A piece of a process's log.
struct LogPiece {
  std::string data;
  int64_t offset = 0;       // of the first byte of `data` since the start of the process
  int64_t next_offset = 0;  // of the byte after it
};

// Reads at most `max_bytes` of the log that a LogFile writes at `path`, from `offset` on, or from
// where the log begins now if that part is gone; `offset` -1: the last `tail_lines` lines. Ends
// after a whole line if there is one. Empty data: nothing has been written there yet. Errors:
// NOT_FOUND there is no such log; those of the disk.
absl::StatusOr<LogPiece> ReadLogPiece(const std::string& path, int64_t offset, int tail_lines,
                                      size_t max_bytes);

// Returns the offset of the first line that was written at `since` or later, with a precision of
// one second; 0 if the log has no times. Errors: NOT_FOUND there is no such log.
absl::StatusOr<int64_t> LogOffsetAt(const std::string& path, absl::Time since);

}  // namespace muster::agent

#endif  // MUSTER_AGENT_ATTEMPT_LOG_H_
