#include "base/last_lines.h"

#include <algorithm>

#include "base/status_macros.h"

namespace muster {
namespace {

constexpr int64_t kBlock = 256 << 10;

}  // namespace

absl::StatusOr<int64_t> FindLastLines(
    int64_t begin, int64_t end, int lines,
    absl::FunctionRef<absl::StatusOr<std::string>(int64_t offset, int64_t bytes)> read) {
  if (lines == 0) return end;
  int found = 0;
  for (int64_t to = end; to > begin;) {
    const int64_t from = std::max(begin, to - kBlock);
    MUSTER_ASSIGN_OR_RETURN(const std::string block, read(from, to - from));
    for (size_t at = block.size(); at > 0; --at) {
      const int64_t offset = from + static_cast<int64_t>(at);
      // The newline that ends the last line does not begin another one.
      if (block[at - 1] == '\n' && offset < end && ++found == lines) return offset;
    }
    to = from;
  }
  return begin;
}

}  // namespace muster
