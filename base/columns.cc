#include "base/columns.h"

#include <sys/ioctl.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>

#include "base/text.h"

namespace muster {
namespace {

struct Range {
  uint32_t first, last;
};

// East Asian Wide and Fullwidth with emoji, and combining marks.
constexpr Range kWide[] = {{0x1100, 0x115F},   {0x2E80, 0x303E},   {0x3041, 0x33FF},
                           {0x3400, 0x4DBF},   {0x4E00, 0x9FFF},   {0xA000, 0xA4CF},
                           {0xA960, 0xA97F},   {0xAC00, 0xD7A3},   {0xF900, 0xFAFF},
                           {0xFE30, 0xFE6F},   {0xFF00, 0xFF60},   {0xFFE0, 0xFFE6},
                           {0x1F300, 0x1F64F}, {0x1F680, 0x1F6FF}, {0x1F900, 0x1F9FF},
                           {0x1FA70, 0x1FAFF}, {0x20000, 0x3FFFD}};
constexpr Range kNone[] = {{0x0300, 0x036F}, {0x200B, 0x200F}, {0x20D0, 0x20FF}, {0xFE00, 0xFE0F}};

template <size_t size>
bool IsIn(const Range (&ranges)[size], uint32_t point) {
  return std::any_of(std::begin(ranges), std::end(ranges), [point](const Range& range) {
    return range.first <= point && point <= range.last;
  });
}

// The columns of one character of UTF-8, or of one byte.
int ColumnsOfCharacter(absl::string_view character) {
  const auto lead = static_cast<uint8_t>(character.front());
  if (character.size() == 1) return 1;
  uint32_t point = lead & (0xFF >> (character.size() + 1));
  for (const char c : character.substr(1)) point = point << 6 | (static_cast<uint8_t>(c) & 0x3F);
  return IsIn(kWide, point) ? 2 : IsIn(kNone, point) ? 0 : 1;
}

}  // namespace

size_t CharacterBytes(absl::string_view text) {
  return std::max<size_t>(1, Utf8CharacterBytes(text));
}

int Columns(absl::string_view text) {
  int columns = 0;
  while (!text.empty()) {
    const size_t size = CharacterBytes(text);
    columns += ColumnsOfCharacter(text.substr(0, size));
    text.remove_prefix(size);
  }
  return columns;
}

absl::string_view FitColumns(absl::string_view text, int columns) {
  size_t end = 0;
  while (end < text.size()) {
    const size_t size = CharacterBytes(text.substr(end));
    columns -= ColumnsOfCharacter(text.substr(end, size));
    if (columns < 0) break;
    end += size;
  }
  return text.substr(0, end);
}

int TerminalColumns(int fd) {
  winsize size{};
  if (ioctl(fd, TIOCGWINSZ, &size) == 0 && size.ws_col > 0) return size.ws_col;
  return 80;
}

}  // namespace muster
