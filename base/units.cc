#include "base/units.h"

#include <cmath>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/text.h"

namespace muster {
namespace {

struct Unit {
  absl::string_view suffix;  // in small letters
  double bytes;
  bool decimal;
};

constexpr Unit kMemoryUnits[] = {
    {"gib", 1024.0 * 1024 * 1024, false},
    {"mib", 1024.0 * 1024, false},
    {"kib", 1024.0, false},
    {"gb", 1e9, true},
    {"mb", 1e6, true},
    {"kb", 1e3, true},
};
constexpr Unit kShardUnits[] = {
    {"tb", 1e12, true}, {"gb", 1e9, true}, {"mb", 1e6, true}, {"kb", 1e3, true}};

// absl::SimpleAtod alone would also take "inf", "nan" and hexadecimal digits.
std::optional<double> ParseNumber(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  size_t i = 0;
  const auto skip_digits = [&] {
    const size_t begin = i;
    while (i < text.size() && absl::ascii_isdigit(text[i])) ++i;
    return i - begin;
  };
  const auto skip_sign = [&] {
    if (i < text.size() && (text[i] == '+' || text[i] == '-')) ++i;
  };
  skip_sign();
  size_t digits = skip_digits();
  if (i < text.size() && text[i] == '.') {
    ++i;
    digits += skip_digits();
  }
  if (digits == 0) return std::nullopt;
  if (i < text.size() && (text[i] == 'e' || text[i] == 'E')) {
    ++i;
    skip_sign();
    if (skip_digits() == 0) return std::nullopt;
  }
  double value = 0;
  if (i != text.size() || !absl::SimpleAtod(text, &value)) return std::nullopt;
  return value;
}

absl::Status BadSize(absl::string_view text, absl::string_view why, absl::string_view units) {
  return absl::InvalidArgumentError(absl::StrCat("size \"", Printable(text, 100), "\" ", why,
                                                 "; write a number and a unit out of ", units));
}

template <size_t N>
absl::StatusOr<int64_t> ParseSize(absl::string_view text, absl::string_view body,
                                  const Unit (&units)[N], bool bits, absl::string_view names) {
  for (const Unit& unit : units) {
    if (!absl::EndsWithIgnoreCase(body, unit.suffix)) continue;
    const absl::string_view written = body.substr(body.size() - unit.suffix.size());
    const std::optional<double> number =
        ParseNumber(body.substr(0, body.size() - unit.suffix.size()));
    if (!number.has_value()) return BadSize(text, "does not begin with a number", names);
    const double bytes = std::trunc(*number * unit.bytes);
    if (!(bytes < 9223372036854775808.0)) return BadSize(text, "is too large", names);
    if (bytes < 0) return BadSize(text, "is negative", names);
    const bool counts_bits =
        bits && unit.decimal && absl::ascii_isupper(written.front()) && written.back() == 'b';
    return static_cast<int64_t>(bytes) / (counts_bits ? 8 : 1);
  }
  return BadSize(text, "has no unit that is known here", names);
}

}  // namespace

absl::StatusOr<int64_t> ParseMemorySize(absl::string_view text) {
  return ParseSize(text, text, kMemoryUnits, /*bits=*/true,
                   "KB MB GB KiB MiB GiB, as in \"5.5GB\"");
}

absl::StatusOr<int64_t> ParseShardSize(absl::string_view text) {
  return ParseSize(text, absl::StripAsciiWhitespace(text), kShardUnits, /*bits=*/false,
                   "KB MB GB TB, as in \"10GB\"");
}

std::string HumanBytes(int64_t bytes) {
  const bool negative = bytes < 0;
  const double amount = std::abs(static_cast<double>(bytes));
  const char* const sign = negative ? "-" : "";
  if (amount < 1024) return absl::StrFormat("%s%d B", sign, static_cast<int64_t>(amount));
  constexpr const char* kNames[] = {"KiB", "MiB", "GiB", "TiB", "PiB", "EiB"};
  double scaled = amount / 1024;
  size_t i = 0;
  while (scaled >= 999.5 && i + 1 < sizeof(kNames) / sizeof(kNames[0])) {
    scaled /= 1024;
    ++i;
  }
  const int digits = scaled < 9.995 ? 2 : scaled < 99.95 ? 1 : 0;
  return absl::StrFormat("%s%.*f %s", sign, digits, scaled, kNames[i]);
}

std::string HumanDuration(absl::Duration duration) {
  if (duration == absl::InfiniteDuration()) return "inf";
  if (duration == -absl::InfiniteDuration()) return "-inf";
  if (duration < absl::ZeroDuration()) return absl::StrCat("-", HumanDuration(-duration));
  // Below what rounds to the next unit.
  if (duration < absl::Nanoseconds(999'950)) {
    return absl::StrFormat("%.4g us", absl::ToDoubleMicroseconds(duration));
  }
  if (duration < absl::Microseconds(999'500)) {
    return absl::StrFormat("%.3g ms", absl::ToDoubleMilliseconds(duration));
  }
  if (duration < absl::Minutes(1)) {
    return absl::StrFormat("%.3g s", absl::ToDoubleSeconds(duration));
  }
  const int64_t seconds = absl::ToInt64Seconds(duration);
  if (seconds < 3600) return absl::StrFormat("%dm%02ds", seconds / 60, seconds % 60);
  if (seconds < 86400) return absl::StrFormat("%dh%02dm", seconds / 3600, seconds / 60 % 60);
  return absl::StrFormat("%dd%02dh", seconds / 86400, seconds / 3600 % 24);
}

std::string ClockDuration(absl::Duration duration) {
  if (duration < absl::ZeroDuration() || duration == absl::InfiniteDuration()) return "?";
  const int64_t seconds = absl::ToInt64Seconds(duration);
  if (seconds < 3600) return absl::StrFormat("%02d:%02d", seconds / 60, seconds % 60);
  return absl::StrFormat("%d:%02d:%02d", seconds / 3600, seconds / 60 % 60, seconds % 60);
}

}  // namespace muster
