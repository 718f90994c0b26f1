#include "worker/track/csv.h"

#include <algorithm>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/file.h"
#include "base/status_macros.h"

namespace muster {
namespace {

constexpr int64_t kMaxBytes = int64_t{1} << 30;

std::string Cell(const std::string& text) {
  if (text.find_first_of(",\"\r\n") == std::string::npos) return text;
  return absl::StrCat("\"", absl::StrReplaceAll(text, {{"\"", "\"\""}}), "\"");
}

std::string Row(const std::vector<std::string>& cells) {
  std::string row;
  for (const std::string& cell : cells) {
    if (&cell != &cells.front()) row += ',';
    row += Cell(cell);
  }
  return row + "\n";
}

// The cells of the first row; `bytes` is set to its length with the line's end.
std::vector<std::string> FirstRow(absl::string_view text, size_t* bytes) {
  std::vector<std::string> cells;
  std::string cell;
  bool quoted = false;
  size_t i = 0;
  for (; i < text.size(); ++i) {
    const char c = text[i];
    if (quoted) {
      if (c != '"') {
        cell += c;
      } else if (i + 1 < text.size() && text[i + 1] == '"') {
        cell += text[++i];
      } else {
        quoted = false;
      }
    } else if (c == '"') {
      quoted = true;
    } else if (c == ',') {
      cells.push_back(std::move(cell));
      cell.clear();
    } else if (c == '\n') {
      ++i;
      break;
    } else if (c != '\r') {
      cell += c;
    }
  }
  cells.push_back(std::move(cell));
  *bytes = i;
  return cells;
}

// What follows the step of the last row that is whole; 0 if there is none. `columns`: of the table.
int64_t NextStep(absl::string_view rows, size_t columns) {
  // Of the last row, and of the one before it.
  size_t last = 0, before = 0;
  bool quoted = false;
  for (size_t i = 0; i + 1 < rows.size(); ++i) {
    if (rows[i] == '"') quoted = !quoted;
    if (rows[i] == '\n' && !quoted) {
      before = last;
      last = i + 1;
    }
  }
  for (const size_t begin : {last, before}) {
    size_t bytes = 0;
    const std::vector<std::string> cells = FirstRow(rows.substr(begin), &bytes);
    int64_t step = 0;
    // A crash may have cut the number.
    if (cells.size() < std::min<size_t>(columns, 3)) continue;
    if (cells.size() > 1 && absl::SimpleAtoi(cells[1], &step)) return step + 1;
  }
  return 0;
}

}  // namespace

CsvTracker::CsvTracker(const TrackerContext& context)
    : path_(JoinPath(JoinPath(context.logging_dir, context.project_name), "metrics.csv")) {}

absl::Status CsvTracker::start() {
  columns_ = {"time", "step"};
  MUSTER_RETURN_IF_ERROR(file_.Open(path_, /*lines=*/true));
  MUSTER_ASSIGN_OR_RETURN(const std::string contents, ReadFile(path_, kMaxBytes));
  if (contents.empty()) return file_.Append(Row(columns_));
  size_t header_bytes = 0;
  columns_ = FirstRow(contents, &header_bytes);
  next_step_ = NextStep(absl::string_view(contents).substr(header_bytes), columns_.size());
  if (columns_.size() < 2 || columns_[0] != "time" || columns_[1] != "step") {
    // It is not ours to log to.
    finish().IgnoreError();
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": its first line does not begin with time,step; move the file away"));
  }
  return absl::OkStatus();
}

absl::Status CsvTracker::RewriteHeader() {
  MUSTER_ASSIGN_OR_RETURN(const std::string contents, ReadFile(path_, kMaxBytes));
  size_t header_bytes = 0;
  (void)FirstRow(contents, &header_bytes);
  MUSTER_RETURN_IF_ERROR(
      WriteFileAtomically(path_, absl::StrCat(Row(columns_), contents.substr(header_bytes))));
  return file_.Open(path_, /*lines=*/true);
}

absl::Status CsvTracker::log(const TrackerEntry& entry) {
  // It may have been replaced by one with another header, and not opened then.
  if (!file_.is_open() && !columns_.empty()) MUSTER_RETURN_IF_ERROR(start());
  if (!file_.is_open()) return file_.Append("");
  const int64_t step = entry.step.value_or(next_step_);
  next_step_ = step + 1;
  const size_t known = columns_.size();
  std::vector<std::string> cells(known);
  cells[0] = absl::StrFormat("%.3f", absl::ToUnixMicros(entry.time) / 1e6);
  cells[1] = absl::StrCat(step);
  for (const auto& [name, value] : entry.values) {
    // The first two columns are not the user's.
    const auto place = std::find(columns_.begin() + 2, columns_.end(), name);
    const size_t i = place - columns_.begin();
    if (place == columns_.end()) {
      columns_.push_back(name);
      cells.emplace_back();
    }
    cells[i] = value.text();
  }
  if (columns_.size() > known) {
    const absl::Status rewritten = RewriteHeader();
    if (!rewritten.ok()) {
      columns_.resize(known);
      return rewritten;
    }
  }
  return file_.Append(Row(cells));
}

absl::Status CsvTracker::finish() {
  columns_.clear();
  return file_.Close();
}

}  // namespace muster
