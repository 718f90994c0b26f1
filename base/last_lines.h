#ifndef MUSTER_BASE_LAST_LINES_H_
#define MUSTER_BASE_LAST_LINES_H_

#include <cstdint>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/statusor.h"

namespace muster {

// Returns the offset at which the last `lines` lines of the text in bytes [begin, end) begin; `end`
// for 0 lines. Reads blocks backwards from the end, so the lines may be larger than the caller's
// memory. `read(offset, bytes)` returns that many bytes, or fewer if the text has become shorter;
// its errors are returned.
absl::StatusOr<int64_t> FindLastLines(
    int64_t begin, int64_t end, int lines,
    absl::FunctionRef<absl::StatusOr<std::string>(int64_t offset, int64_t bytes)> read);

}  // namespace muster

#endif  // MUSTER_BASE_LAST_LINES_H_
