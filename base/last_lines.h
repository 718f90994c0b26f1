#ifndef MUSTER_BASE_LAST_LINES_H_
#define MUSTER_BASE_LAST_LINES_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace muster {

// Where the last `lines` lines of a text begin whose bytes are at [begin, end): the offset of the
// first of them; `end` for 0 lines. Reads blocks from the end on, until it has found them, so they
// may be longer than what the caller has memory for. `read(offset, bytes)` returns so many bytes,
// fewer where the text has become shorter; its errors are returned.
absl::StatusOr<int64_t> FindLastLines(
    int64_t begin, int64_t end, int lines,
    absl::FunctionRef<absl::StatusOr<std::string>(int64_t offset, int64_t bytes)> read);

}  // namespace muster

#endif  // MUSTER_BASE_LAST_LINES_H_
