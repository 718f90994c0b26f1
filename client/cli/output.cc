#include "client/cli/output.h"

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/str_cat.h"
#include "base/text.h"

namespace muster::client {
namespace {

using nlohmann::ordered_json;

// Texts are quoted: JSON's quotes are also YAML's.
std::string Scalar(const ordered_json& value) {
  return value.dump(-1, ' ', false, ordered_json::error_handler_t::replace);
}

void Append(const ordered_json& value, int depth, std::string* text) {
  const std::string indent(2 * depth, ' ');
  const auto child = [&](const ordered_json& item) {
    if (item.is_structured() && !item.empty()) {
      absl::StrAppend(text, "\n");
      Append(item, depth + 1, text);
    } else {
      absl::StrAppend(text, " ", Scalar(item), "\n");
    }
  };
  if (value.is_object()) {
    for (const auto& [key, item] : value.items()) {
      absl::StrAppend(text, indent, Scalar(ordered_json(key)), ":");
      child(item);
    }
  } else {
    for (const ordered_json& item : value) {
      absl::StrAppend(text, indent, "-");
      child(item);
    }
  }
}

}  // namespace

std::string TableText(const std::vector<std::vector<std::string>>& rows) {
  std::vector<size_t> widths;
  std::vector<std::vector<std::string>> shown = rows;
  for (std::vector<std::string>& row : shown) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = row[i].empty() ? "-" : Printable(row[i]);
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  std::string text;
  for (const std::vector<std::string>& row : shown) {
    for (size_t i = 0; i < row.size(); ++i) {
      absl::StrAppend(&text, row[i]);
      if (i + 1 < row.size()) text.append(widths[i] - row[i].size() + 2, ' ');
    }
    absl::StrAppend(&text, "\n");
  }
  return text;
}

std::string YamlText(const ordered_json& value) {
  if (!value.is_structured() || value.empty()) return Scalar(value) + "\n";
  std::string text;
  Append(value, 0, &text);
  return text;
}

}  // namespace muster::client
