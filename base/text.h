#ifndef MUSTER_BASE_TEXT_H_
#define MUSTER_BASE_TEXT_H_

#include <cstddef>
#include <string>

#include "absl/strings/string_view.h"

namespace muster {

// Returns how many bytes at the start of `text`, which is not empty, are one character of UTF-8; 0:
// none.
size_t Utf8CharacterBytes(absl::string_view text);

// Appends the character `c`, which is at most U+10FFFF and no surrogate, in UTF-8.
void AppendUtf8(std::string& out, char32_t c);

// Whether the bytes are UTF-8: no overlong forms, no surrogates, nothing beyond U+10FFFF.
bool IsValidUtf8(absl::string_view text);

// Returns the longest start of `text`, at most `max_bytes` long, that does not cut a character of
// UTF-8.
absl::string_view Utf8Prefix(absl::string_view text, size_t max_bytes);

// Makes foreign text fit for a message: one line of valid UTF-8. Control characters, and all bytes
// beyond ASCII if the text is not UTF-8, become \xNN. Longer texts are cut at a character within
// `max_bytes` and end in "...".
std::string Printable(absl::string_view text, size_t max_bytes = 200);

// Returns `text` if it is UTF-8, else what Printable makes of all of it: for formats whose texts
// are UTF-8.
std::string Utf8Text(absl::string_view text);

// Returns the text as a JSON string with its quotes: the shortest escapes, other characters
// unchanged. `text` must be valid UTF-8.
std::string JsonQuote(absl::string_view text);

// Whether `text` consists of ASCII digits, of at least one.
bool IsDigits(absl::string_view text);

// The first line of `text` that is not blank, without white space around it; empty if there is
// none.
absl::string_view FirstLine(absl::string_view text);

// Quotes a word so that a POSIX shell reads it back unchanged: in single quotes unless it is plain.
std::string ShellWord(absl::string_view word);

}  // namespace muster

#endif  // MUSTER_BASE_TEXT_H_
