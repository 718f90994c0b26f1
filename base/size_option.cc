#include "base/size_option.h"

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/text.h"
#include "base/units.h"

namespace muster {
namespace {

// Returns whether the unit is like "Gb", but not like "gb" or "Gib".
bool MayCountBits(absl::string_view text) {
  if (text.size() < 2 || text.back() != 'b') return false;
  const char prefix = text[text.size() - 2];
  return prefix == 'K' || prefix == 'M' || prefix == 'G' || prefix == 'T';
}

}  // namespace

absl::StatusOr<int64_t> ParseSizeOption(absl::string_view text) {
  const absl::string_view size = absl::StripAsciiWhitespace(text);
  const absl::StatusOr<int64_t> memory = ParseMemorySize(size), shard = ParseShardSize(size);
  if (!memory.ok() && !shard.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(
        "size \"", Printable(text, 100),
        "\": write a number that is not negative, and a unit out of KB MB GB TB KiB MiB GiB, as in "
        "\"5.5GB\""));
  }
  if (MayCountBits(size)) {
    return absl::InvalidArgumentError(
        absl::StrCat("size \"", Printable(text, 100), "\" may mean bits or bytes: write ",
                     size.substr(0, size.size() - 1), "B for bytes, and an eighth of it for bits"));
  }
  return memory.ok() ? memory : shard;
}

}  // namespace muster
