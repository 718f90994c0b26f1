#ifndef MUSTER_WORKER_TEXT_UNICODE_H_
#define MUSTER_WORKER_TEXT_UNICODE_H_

#include <cstddef>
#include <cstdint>
#include <string>

#include "absl/container/inlined_vector.h"
#include "absl/strings/string_view.h"

namespace muster::text {

// Characters and their properties, as the tokenizers library reads them. Where its tables are of an
// older Unicode than ICU's, characters that this older Unicode lacks are left unchanged. All
// functions are pure and thread-safe; texts are valid UTF-8.

// Returns the character at `at`, and moves `at` behind it.
inline char32_t NextCharacter(absl::string_view text, size_t& at) {
  const auto byte = [&](size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  if (first < 0x80) {
    ++at;
    return first;
  }
  if (first < 0xE0) {
    at += 2;
    return static_cast<char32_t>((first & 0x1F) << 6 | (byte(at - 1) & 0x3F));
  }
  if (first < 0xF0) {
    at += 3;
    return static_cast<char32_t>((first & 0x0F) << 12 | (byte(at - 2) & 0x3F) << 6 |
                                 (byte(at - 1) & 0x3F));
  }
  at += 4;
  return static_cast<char32_t>((first & 0x07) << 18 | (byte(at - 3) & 0x3F) << 12 |
                               (byte(at - 2) & 0x3F) << 6 | (byte(at - 1) & 0x3F));
}

// Returns the character that ends at `end`, and moves `end` before it.
inline char32_t PreviousCharacter(absl::string_view text, size_t& end) {
  --end;
  while ((static_cast<unsigned char>(text[end]) & 0xC0) == 0x80) --end;
  size_t at = end;
  return NextCharacter(text, at);
}

inline size_t Utf8Bytes(char32_t c) { return c < 0x80 ? 1 : c < 0x800 ? 2 : c < 0x10000 ? 3 : 4; }

size_t CountCharacters(absl::string_view text);

// Appends bytes as UTF-8, with every ill-formed maximal part replaced by one U+FFFD. If `final` is
// false, an incomplete character at the end is left in `pending`, which comes before the next
// `bytes`.
void AppendUtf8Lossy(std::string& out, std::string& pending, absl::string_view bytes, bool final);

bool IsWhitespace(char32_t c);      // White_Space
bool IsNumeric(char32_t c);         // general category N
bool IsPunctuation(char32_t c);     // ASCII punctuation and symbols, general category P
bool IsControl(char32_t c);         // Cc, Cf, Co
bool IsMark(char32_t c);            // general category M
bool IsNonspacingMark(char32_t c);  // Mn
bool IsWord(char32_t c);            // letter, mark, digit, connector, joiner
bool IsLetter(char32_t c);          // general category L
// Returns a number that distinguishes scripts, 0 for none; Hiragana, Katakana and Han count as one.
int ScriptOf(char32_t c);

using Characters = absl::InlinedVector<char32_t, 4>;

// Returns the full lower case mapping without conditions.
Characters Lowercase(char32_t c);

// Returns the full canonical or compatibility decomposition.
Characters Decompose(char32_t c, bool compatibility);
int CombiningClass(char32_t c);
// Returns the character to which the two compose; 0 if they do not.
char32_t Compose(char32_t a, char32_t b);
// Whether NFC, NFD, NFKC and NFKD all leave the character unchanged and it never joins with one
// before it. May return false for some characters for which that holds.
bool IsInertInNormalization(char32_t c);
// The same for NFC only.
bool IsInertInComposition(char32_t c);

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_UNICODE_H_
