#include "base/text.h"

#include <algorithm>
#include <cstdint>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"

namespace muster {
namespace {

// Whether the character controls a terminal, or the direction in which it shows the text that
// follows: C0, DEL, C1 and the controls of the bidirectional algorithm. `character` is one
// character of UTF-8.
bool IsControl(absl::string_view character) {
  const auto at = [&](size_t i) { return static_cast<unsigned char>(character[i]); };
  if (character.size() == 1) return at(0) < 0x20 || at(0) == 0x7f;
  if (character.size() == 2) {
    return (at(0) == 0xc2 && at(1) < 0xa0) ||  // U+0080 to U+009F
           (at(0) == 0xd8 && at(1) == 0x9c);   // U+061C
  }
  if (character.size() != 3 || at(0) != 0xe2) return false;
  return (at(1) == 0x80 && (at(2) == 0x8e || at(2) == 0x8f)) ||  // U+200E and U+200F
         (at(1) == 0x80 && at(2) >= 0xa8 && at(2) <= 0xae) ||    // U+2028 to U+202E
         (at(1) == 0x81 && at(2) >= 0xa6 && at(2) <= 0xa9);      // U+2066 to U+2069
}

}  // namespace

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
  // Overlong, half of a surrogate pair, or beyond the last character.
  constexpr uint32_t kLeast[] = {0, 0, 0x80, 0x800, 0x10000};
  if (code < kLeast[size] || code > 0x10ffff || (code >= 0xd800 && code < 0xe000)) return 0;
  return size;
}

void AppendUtf8(std::string& out, char32_t c) {
  const auto put = [&](char32_t byte) { out += static_cast<char>(byte); };
  if (c < 0x80) {
    put(c);
  } else if (c < 0x800) {
    put(0xC0 | c >> 6);
    put(0x80 | (c & 0x3F));
  } else if (c < 0x10000) {
    put(0xE0 | c >> 12);
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  } else {
    put(0xF0 | c >> 18);
    put(0x80 | (c >> 12 & 0x3F));
    put(0x80 | (c >> 6 & 0x3F));
    put(0x80 | (c & 0x3F));
  }
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
  while (!text.empty()) {
    const absl::string_view character = text.substr(0, utf8 ? Utf8CharacterBytes(text) : 1);
    text.remove_prefix(character.size());
    const bool plain = utf8 || static_cast<unsigned char>(character[0]) < 0x80;
    if (plain && !IsControl(character)) {
      absl::StrAppend(&out, character);
      continue;
    }
    for (const char c : character) {
      absl::StrAppendFormat(&out, "\\x%02x", static_cast<unsigned char>(c));
    }
  }
  return cut ? out + "..." : out;
}

std::string Utf8Text(absl::string_view text) {
  return IsValidUtf8(text) ? std::string(text) : Printable(text, text.size());
}

std::string JsonQuote(absl::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    switch (c) {
      case '"':
        out += "\\\"";
        break;
      case '\\':
        out += "\\\\";
        break;
      case '\b':
        out += "\\b";
        break;
      case '\f':
        out += "\\f";
        break;
      case '\n':
        out += "\\n";
        break;
      case '\r':
        out += "\\r";
        break;
      case '\t':
        out += "\\t";
        break;
      default:
        if (static_cast<unsigned char>(c) < 0x20) {
          absl::StrAppendFormat(&out, "\\u%04x", c);
        } else {
          out += c;
        }
    }
  }
  out += '"';
  return out;
}

bool IsDigits(absl::string_view text) {
  return !text.empty() && std::all_of(text.begin(), text.end(), absl::ascii_isdigit);
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
