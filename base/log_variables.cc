#include "base/log_variables.h"

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "base/text.h"

namespace muster {
namespace {

bool IsLevel(const std::string& text) {
  LogLevel level;
  return ParseLogLevel(text, &level);
}

bool IsFormat(const std::string& text) { return text == "text" || text == "json"; }

struct LogVariable {
  const char* name;
  bool (*is_right)(const std::string& text);
  const char* values;
};

constexpr LogVariable kLogVariables[] = {
    {"MUSTER_LOG_LEVEL", IsLevel, "debug, info, warning, error"},
    {"MUSTER_LOG_FORMAT", IsFormat, "text, json"},
};

}  // namespace

absl::Status CheckLogVariables(const std::map<std::string, std::string>& variables) {
  for (const LogVariable& one : kLogVariables) {
    const auto it = variables.find(one.name);
    if (it == variables.end() || it->second.empty() || one.is_right(it->second)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(one.name, "='", Printable(it->second), "' is not one of ", one.values));
  }
  return absl::OkStatus();
}

}  // namespace muster
