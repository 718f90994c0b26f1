#ifndef MUSTER_BASE_SIZE_OPTION_H_
#define MUSTER_BASE_SIZE_OPTION_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// Parses a size in bytes that a user gives as an option or a setting. The two grammars of
// base/units.h are Accelerate's and read some texts differently (D14); a text that this function
// accepts means the same wherever it is used. It takes KB MB GB TB (powers of 1000) and KiB MiB GiB
// (powers of 1024) in any case, with one exception: a capital prefix with a small b ("10Gb"), which
// counts bits in one grammar and bytes in the other. Errors: INVALID_ARGUMENT that quotes the text
// and says what to write. Pure.
absl::StatusOr<int64_t> ParseSizeOption(absl::string_view text);

}  // namespace muster

#endif  // MUSTER_BASE_SIZE_OPTION_H_
