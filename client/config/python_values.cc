#include "client/config/python_values.h"

#include <algorithm>
#include <string>

#include "absl/strings/ascii.h"
#include "absl/strings/numbers.h"

namespace muster::client {
namespace {

std::string WithoutUnderscores(absl::string_view text) {
  std::string digits;
  for (size_t i = 0; i < text.size(); ++i) {
    const bool between = text[i] == '_' && i > 0 && absl::ascii_isdigit(text[i - 1]) &&
                         i + 1 < text.size() && absl::ascii_isdigit(text[i + 1]);
    if (!between) digits += text[i];
  }
  return digits;
}

}  // namespace

std::optional<int64_t> ParsePythonInt(absl::string_view text) {
  int64_t number = 0;
  if (!absl::SimpleAtoi(WithoutUnderscores(text), &number)) return std::nullopt;
  return number;
}

std::optional<double> ParsePythonFloat(absl::string_view text) {
  // Abseil also reads C's hexadecimal floats; no float of Python has an x.
  if (text.find_first_of("xX") != absl::string_view::npos) return std::nullopt;
  double number = 0;
  if (!absl::SimpleAtod(WithoutUnderscores(text), &number)) return std::nullopt;
  return number;
}

bool IsPythonTrue(const nlohmann::json& value) {
  if (value.is_boolean()) return value.get<bool>();
  if (value.is_number()) return value.get<double>() != 0;
  return !value.empty() && value != "";
}

bool IsPythonEqual(const nlohmann::json& a, const nlohmann::json& b) {
  if (a.is_array() && b.is_array()) {
    return std::equal(a.begin(), a.end(), b.begin(), b.end(), IsPythonEqual);
  }
  const auto plain = [](const nlohmann::json& value) {
    return value.is_boolean() ? nlohmann::json(value.get<bool>() ? 1 : 0) : value;
  };
  return plain(a) == plain(b);
}

}  // namespace muster::client
