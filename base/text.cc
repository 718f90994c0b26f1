#include "base/text.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace muster {

size_t Utf8CharacterBytes(absl::string_view text) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const size_t size = at(0) < 0x80              ? 1
                      : (at(0) >> 5) == 0b110   ? 2
                      : (at(0) >> 4) == 0b1110  ? 3
                      : (at(0) >> 3) == 0b11110 ? 4
                                                : 0;
  if (size == 0 || size > text.size()) return 0;
  uint32_t code = size == 1 ? at(0) : at(0) & (0x7f >> size);
  for (size_t i = 1; i < size; ++i) {
    if ((at(i) >> 6) != 0b10) return 0;
    code = code << 6 | (at(i) & 0x3f);
  }
  // Written longer than needed, half of a pair, or beyond the last one.
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[size] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return 0;
  return size;
}

bool IsValidUtf8(absl::string_view text) {
  while (!text.empty()) {
    const size_t size = Utf8CharacterBytes(text);
    if (size == 0) return false;
    text.remove_prefix(size);
  }
  return true;
}

absl::string_view Utf8Prefix(absl::string_view text, size_t max_bytes) {
  if (text.size() <= max_bytes) return text;
  while (max_bytes > 0 && (static_cast<unsigned char>(text[max_bytes]) & 0xC0) == 0x80) --max_bytes;
  return text.substr(0, max_bytes);
}

std::string Printable(absl::string_view text, size_t max_bytes) {
  const bool cut = text.size() > max_bytes;
  const bool utf8 = IsValidUtf8(text);
  text = utf8 ? Utf8Prefix(text, max_bytes) : text.substr(0, max_bytes);
  std::string out;
  for (const char c : text) {
    const unsigned char byte = static_cast<unsigned char>(c);
    if (byte < 0x20 || byte == 0x7f || (byte >= 0x80 && !utf8)) {
      absl::StrAppendFormat(&out, "\\x%02x", byte);
    } else {
      out += c;
    }
  }
  return cut ? out + "..." : out;
}

absl::string_view FirstLine(absl::string_view text) {
  text = absl::StripAsciiWhitespace(text);
  return absl::StripTrailingAsciiWhitespace(text.substr(0, text.find('\n')));
}

std::string ShellWord(absl::string_view word) {
  const bool plain = !word.empty() && std::all_of(word.begin(), word.end(), [](unsigned char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("_-+=./:,@%", static_cast<char>(c));
  });
  return plain ? std::string(word)
               : absl::StrCat("'", absl::StrReplaceAll(word, {{"'", "'\\''"}}), "'");
}

}  // namespace muster
