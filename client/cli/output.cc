#include "client/cli/output.h"

#include <sys/ioctl.h>
#include <unistd.h>

#include <algorithm>
#include <nlohmann/json.hpp>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/string_view.h"
#include "base/columns.h"
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

// Breaks `text` into lines of at most `width` bytes (more if a character is longer): at blanks, and
// longer words anywhere.
std::vector<std::string> Broken(absl::string_view text, size_t width) {
  std::vector<std::string> lines;
  while (text.size() > width) {
    size_t end = text.rfind(' ', width);
    size_t next = end == absl::string_view::npos ? 0 : end + 1;
    if (end == absl::string_view::npos || end == 0) {
      end = next = std::max(Utf8Prefix(text, width).size(), size_t{1});
    }
    lines.emplace_back(text.substr(0, end));
    text.remove_prefix(next);
  }
  lines.emplace_back(text);
  return lines;
}

// Escapes each character separately: a byte that is not UTF-8 does not make others unreadable.
std::string PrintableCharacters(absl::string_view text) {
  std::string shown;
  while (!text.empty()) {
    const size_t bytes = CharacterBytes(text);
    absl::StrAppend(&shown, Printable(text.substr(0, bytes)));
    text.remove_prefix(bytes);
  }
  return shown;
}

}  // namespace

size_t ColumnsIfTerminal(int fd) {
  winsize size = {};
  return isatty(fd) != 0 && ioctl(fd, TIOCGWINSZ, &size) == 0 ? size.ws_col : 0;
}

std::string ForTerminal(absl::string_view line) {
  std::string shown;
  size_t plain = 0;  // the end of the finished part
  bool coloured = false;
  const auto keep = [&](size_t begin, size_t end) {
    absl::StrAppend(&shown, PrintableCharacters(line.substr(plain, begin - plain)),
                    line.substr(begin, end - begin));
    plain = end;
  };
  for (size_t at = 0; at < line.size(); ++at) {
    if (line[at] == '\t') keep(at, at + 1);
    if (!absl::StartsWith(line.substr(at), "\x1b[")) continue;
    const size_t end = line.find_first_not_of("0123456789;:", at + 2);
    if (end == line.npos || (line[end] != 'm' && line[end] != 'K')) continue;
    if (line[end] == 'm') {
      keep(at, end + 1);
      coloured = line.substr(at + 2, end - at - 2).find_first_not_of("0;") != line.npos;
    } else {
      // Clears the rest of the line, after each colour of gcc and grep.
      keep(at, at);
      plain = end + 1;
    }
    at = end;
  }
  keep(line.size(), line.size());
  // Ends the colour with this line, because the next one may be another rank's.
  if (coloured) absl::StrAppend(&shown, "\x1b[m");
  return shown;
}

std::string TableText(const std::vector<std::vector<std::string>>& rows, size_t width) {
  std::vector<size_t> widths;
  std::vector<std::vector<std::string>> shown = rows;
  for (std::vector<std::string>& row : shown) {
    widths.resize(std::max(widths.size(), row.size()));
    for (size_t i = 0; i < row.size(); ++i) {
      row[i] = row[i].empty() ? "-" : Printable(row[i]);
      widths[i] = std::max(widths[i], row[i].size());
    }
  }
  size_t last_begins = 0;
  for (size_t i = 0; i + 1 < widths.size(); ++i) last_begins += widths[i] + 2;
  // A narrower column is harder to read than lines below the row.
  const bool below = last_begins + width / 3 > width;
  const size_t indent = below ? 4 : last_begins;
  std::string text;
  for (const std::vector<std::string>& row : shown) {
    std::string line;
    for (size_t i = 0; i + 1 < row.size(); ++i) {
      absl::StrAppend(&line, row[i]);
      line.append(widths[i] - row[i].size() + 2, ' ');
    }
    const std::string last = row.empty() ? "" : row.back();
    if (width == 0 || line.size() + last.size() <= width || row.size() < widths.size() ||
        indent >= width) {
      absl::StrAppend(&text, line, last, "\n");
      continue;
    }
    if (below) {
      line.resize(line.find_last_not_of(' ') + 1);
      absl::StrAppend(&text, line, "\n", std::string(indent, ' '));
    } else {
      absl::StrAppend(&text, line);
    }
    absl::StrAppend(
        &text, absl::StrJoin(Broken(last, width - indent), "\n" + std::string(indent, ' ')), "\n");
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
