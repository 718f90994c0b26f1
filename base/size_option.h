#ifndef MUSTER_BASE_SIZE_OPTION_H_
#define MUSTER_BASE_SIZE_OPTION_H_

#include <cstdint>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster {

// A size that a user gives as an option or a setting, in bytes. The two grammars of base/units.h
// are Accelerate's, and read some texts differently (D14); this one means the same everywhere. It
// takes KB MB GB TB (powers of 1000) and KiB MiB GiB (powers of 1024), in any case but one: a
// capital letter and a small b ("10Gb"), which counts bits in one of the grammars and bytes in the
// other. Errors: INVALID_ARGUMENT that quotes the text, and says what to write. Pure.
absl::StatusOr<int64_t> ParseSizeOption(absl::string_view text);

}  // namespace muster

#endif  // MUSTER_BASE_SIZE_OPTION_H_
