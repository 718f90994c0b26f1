#include "base/variable_list.h"

#include <unistd.h>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/text.h"

namespace muster {

std::map<std::string, std::string> ProcessVariables() {
  std::map<std::string, std::string> variables;
  for (char** entry = environ; entry != nullptr && *entry != nullptr; ++entry) {
    const absl::string_view text = *entry;
    const size_t equals = text.find('=');
    if (equals == absl::string_view::npos) continue;
    variables.emplace(text.substr(0, equals), text.substr(equals + 1));
  }
  return variables;
}

std::string VariableList(const std::map<std::string, std::string>& variables) {
  std::string text;
  for (const auto& [name, value] : variables) {
    absl::StrAppend(&text, name, "=", value);
    text.push_back('\0');
  }
  return text;
}

absl::StatusOr<std::map<std::string, std::string>> ParseVariableList(absl::string_view text,
                                                                     absl::string_view source) {
  std::map<std::string, std::string> variables;
  // A list of lines would be read as one variable, and a file that was cut may end in half an
  // entry.
  if (!text.empty() && text.back() != '\0') {
    return absl::InvalidArgumentError(
        absl::StrCat(source,
                     " has no null byte at its end: write its NAME=VALUE as env -0 prints "
                     "them, each with a null byte at its end"));
  }
  for (const absl::string_view entry : absl::StrSplit(text, '\0', absl::SkipEmpty())) {
    const size_t equals = entry.find('=');
    if (equals == absl::string_view::npos || equals == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": ", Printable(entry),
                       " is no NAME=VALUE with a null byte at its end, as env -0 prints them"));
    }
    variables[std::string(entry.substr(0, equals))] = std::string(entry.substr(equals + 1));
  }
  return variables;
}

}  // namespace muster
