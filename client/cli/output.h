#ifndef MUSTER_CLIENT_CLI_OUTPUT_H_
#define MUSTER_CLIENT_CLI_OUTPUT_H_

#include <nlohmann/json_fwd.hpp>
#include <string>
#include <vector>

#include "absl/strings/string_view.h"

namespace muster::client {

// Returns the columns of the terminal that `fd` is; 0: `fd` is no terminal, or it does not know.
size_t ColumnsIfTerminal(int fd);

// Makes a line of a program's output safe for the terminal on which it is shown: control characters
// except tabs, and escapes except those of colours (ESC [ 31 m), become printable, and so do bytes
// that are not UTF-8. Colours end with the line; ESC [ K, which accompanies them, is left out.
std::string ForTerminal(absl::string_view line);

// Formats rows as columns two blanks apart; the first row is the heading. Foreign text is made
// printable. If `width` is not 0, the text of the last column is broken between words into lines of
// at most `width` bytes: below itself, or, if less than a third of the width is left for it, below
// its row.
std::string TableText(const std::vector<std::vector<std::string>>& rows, size_t width = 0);

// Formats JSON as a YAML document that reads as the same value.
std::string YamlText(const nlohmann::ordered_json& value);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_OUTPUT_H_
