#include "agent/python_lines.h"

#include <cstddef>
#include <cstdint>

namespace muster::agent {
namespace {

uint8_t Byte(absl::string_view table, size_t at) { return static_cast<uint8_t>(table[at]); }

// co_lnotab, up to 3.9: pairs of the distances of the next line from the last one, in bytes and
// lines.
int64_t OfDeltas(absl::string_view table, int64_t line, int64_t offset) {
  int64_t start = 0;
  for (size_t i = 0; i + 1 < table.size(); i += 2) {
    start += Byte(table, i);
    if (start > offset) break;
    line += static_cast<int8_t>(table[i + 1]);
  }
  return line;
}

// co_linetable of 3.10: pairs of the length of a range, in bytes, and the distance of its line from
// the last one; -128: it has no line.
int64_t OfRanges(absl::string_view table, int64_t line, int64_t offset) {
  constexpr int8_t kNone = -128;
  int64_t end = 0;
  for (size_t i = 0; i + 1 < table.size(); i += 2) {
    end += Byte(table, i);
    const int8_t delta = static_cast<int8_t>(table[i + 1]);
    if (delta != kNone) line += delta;
    if (offset < end) return delta == kNone ? 0 : line;
  }
  return 0;
}

// A signed number in groups of six bits, the lowest first.
int64_t ReadSigned(absl::string_view table, size_t at) {
  uint64_t bits = 0;
  for (int shift = 0; at < table.size() && shift < 60; ++at, shift += 6) {
    const uint8_t byte = Byte(table, at);
    bits |= static_cast<uint64_t>(byte & 0x3f) << shift;
    if ((byte & 0x40) == 0) break;
  }
  const int64_t size = static_cast<int64_t>(bits >> 1);
  return (bits & 1) != 0 ? -size : size;
}

// co_linetable from 3.11 on: entries that begin with a byte with the highest bit set, which holds a
// kind and the number of two-byte instructions that the entry covers.
int64_t OfLocations(absl::string_view table, int64_t line, int64_t offset) {
  constexpr int kOneLine0 = 10, kOneLine2 = 12, kNoColumns = 13, kLong = 14, kNone = 15;
  int64_t end = 0;
  for (size_t i = 0; i < table.size();) {
    const uint8_t first = Byte(table, i);
    if ((first & 0x80) == 0) return 0;
    const int kind = first >> 3 & 0xf;
    end += ((first & 7) + 1) * 2;
    if (kind == kNoColumns || kind == kLong) {
      line += ReadSigned(table, i + 1);
    } else if (kind >= kOneLine0 && kind <= kOneLine2) {
      line += kind - kOneLine0;
    }
    if (line < INT32_MIN || line > INT32_MAX) return 0;  // not the table of a real function
    if (offset < end) return kind == kNone ? 0 : line;
    for (++i; i < table.size() && (Byte(table, i) & 0x80) == 0;) ++i;
  }
  return 0;
}

}  // namespace

int64_t PythonLine(PythonLayout::Lines kind, absl::string_view table, int64_t first_line,
                   int64_t offset) {
  if (offset < 0) return first_line;
  int64_t line = 0;
  switch (kind) {
    case PythonLayout::Lines::kDeltas:
      line = OfDeltas(table, first_line, offset);
      break;
    case PythonLayout::Lines::kRanges:
      line = OfRanges(table, first_line, offset);
      break;
    case PythonLayout::Lines::kLocations:
      line = OfLocations(table, first_line, offset);
      break;
  }
  return line > 0 && line <= INT32_MAX ? line : 0;
}

}  // namespace muster::agent
