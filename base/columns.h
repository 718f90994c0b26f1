#ifndef MUSTER_BASE_COLUMNS_H_
#define MUSTER_BASE_COLUMNS_H_

#include <cstddef>

#include "absl/strings/string_view.h"

namespace muster {

// Returns the number of bytes of the first character of `text`, which is not empty; 1 if it does
// not begin with valid UTF-8.
size_t CharacterBytes(absl::string_view text);

// Columns that a terminal needs for one line of UTF-8: two for East Asian wide characters and
// emoji, none for combining marks, one for all others and for bytes that are not UTF-8. Roughly as
// wcwidth(), which knows no wide characters in the C locale. Control characters count as one. All
// are thread-safe.
int Columns(absl::string_view text);

// The longest start of `text` that takes at most `columns`, marks that combine with its last
// character included.
absl::string_view FitColumns(absl::string_view text, int columns);

// The width of the terminal on the descriptor `fd`; 80 if `fd` is not a terminal, such as a file.
int TerminalColumns(int fd);

}  // namespace muster

#endif  // MUSTER_BASE_COLUMNS_H_
