#include "base/bool_word.h"

#include <string>

#include "absl/strings/ascii.h"

namespace muster {

std::optional<bool> ParseBoolWord(absl::string_view text) {
  const std::string word = absl::AsciiStrToLower(text);
  for (const char* yes : {"1", "y", "yes", "t", "true", "on"}) {
    if (word == yes) return true;
  }
  for (const char* no : {"0", "n", "no", "f", "false", "off"}) {
    if (word == no) return false;
  }
  return std::nullopt;
}

}  // namespace muster
