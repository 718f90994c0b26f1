#ifndef MUSTER_BASE_UNITS_H_
#define MUSTER_BASE_UNITS_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

// Conversion between amounts and texts. Everything here is pure and thread-safe.
//
// Two size grammars exist because users bring both from the Python world: memory limits and shard
// sizes. They share one number syntax (decimal digits with an optional sign, point and exponent; no
// underscores, hexadecimal, "inf" or "nan"), work in double precision, cut fractions of a byte off,
// and refuse what is negative or does not fit 63 bits. Errors: INVALID_ARGUMENT quoting the text
// and naming the units that are understood.

// A memory limit: KB MB GB (powers of 1000) or KiB MiB GiB (powers of 1024), in any case. A decimal
// unit written as a capital letter and a small b ("8Gb") counts bits, an eighth of a byte each.
// All-small "8gb" means bytes, as everywhere else. Blanks are allowed around the number, not after
// the unit.
absl::StatusOr<int64_t> ParseMemorySize(absl::string_view text);

// The largest size of a checkpoint file: KB MB GB TB (powers of 1000), in any case, always bytes;
// blanks are allowed around the number and the unit.
absl::StatusOr<int64_t> ParseShardSize(absl::string_view text);

// "0 B", "999 B", "1.50 KiB", "4.00 GiB": three significant digits in powers of 1024. Negative
// amounts get a minus.
std::string HumanBytes(int64_t bytes);

// "350 us", "12.5 ms", "3.2 s", "2m05s", "1h02m", "3d04h": the two largest parts; "inf" for
// infinite ones.
std::string HumanDuration(absl::Duration duration);

// "00:07", "12:34", "1:02:03": what a progress bar shows. "?" for infinite and negative durations.
std::string ClockDuration(absl::Duration duration);

}  // namespace muster

#endif  // MUSTER_BASE_UNITS_H_
