#include "worker/track/csv.h"

#include <algorithm>
#include <filesystem>
#include <system_error>
#include <utility>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_replace.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "worker/track/step_after.h"

namespace muster {
namespace {

// The bytes of a table, which may be larger than memory, that are read at a time.
constexpr size_t kPiece = size_t{1} << 20;

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

// Returns the cells of the first row; `bytes` is set to its length with the line's end, or to all
// of `text` if it does not end there.
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

// The positions of the rows of a table.
struct Scan {
  // The offsets of the last row, and of the one before it.
  int64_t last = 0;
  int64_t before = 0;
  // Whether the table ends inside quotes, or inside a line, because of a crash.
  bool in_quotes = false;
  bool in_line = false;
};

absl::StatusOr<Scan> ScanRows(const AppendFile& file, int64_t begin, int64_t end) {
  Scan scan = {.last = begin, .before = begin, .in_quotes = false, .in_line = false};
  while (begin < end) {
    MUSTER_ASSIGN_OR_RETURN(const std::string piece, file.Read(begin, kPiece));
    if (piece.empty()) break;
    size_t quote = piece.find('"');
    size_t newline = piece.find('\n');
    size_t at = 0;
    // Not at the end of the table, where there is no row.
    while (at < piece.size()) {
      if (!scan.in_line) {
        scan.before = std::exchange(scan.last, begin + static_cast<int64_t>(at));
        scan.in_line = true;
      }
      const size_t next = std::min(quote, newline);
      if (next == std::string::npos) break;
      if (next == quote) {
        scan.in_quotes = !scan.in_quotes;
        quote = piece.find('"', next + 1);
      } else {
        scan.in_line = scan.in_quotes;
        newline = piece.find('\n', next + 1);
      }
      at = next + 1;
    }
    begin += static_cast<int64_t>(piece.size());
  }
  return scan;
}

// Returns the step after that of the last complete row; 0 if there is none. `columns`: of the
// table.
absl::StatusOr<int64_t> NextStep(const AppendFile& file, const Scan& scan, size_t columns) {
  for (const int64_t begin : {scan.last, scan.before}) {
    // kPiece bytes are more than the first cells need.
    MUSTER_ASSIGN_OR_RETURN(const std::string row, file.Read(begin, kPiece));
    size_t bytes = 0;
    const std::vector<std::string> cells = FirstRow(row, &bytes);
    int64_t step = 0;
    // A crash may have cut the number, so skip the row.
    if (cells.size() < std::min<size_t>(columns, 3)) continue;
    if (cells.size() > 1 && absl::SimpleAtoi(cells[1], &step)) return StepAfter(step);
  }
  return 0;
}

// Returns the file to which `path` leads through links, which a new file must not replace.
std::string EndOfLinks(const std::string& path) {
  std::error_code error;
  const std::filesystem::path end = std::filesystem::canonical(path, error);
  return error ? path : end.string();
}

class FileLock {
 public:
  explicit FileLock(AppendFile* file) : file_(file) { file_->Lock(); }
  ~FileLock() {
    if (file_->is_open()) file_->Unlock();
  }
  FileLock(const FileLock&) = delete;
  FileLock& operator=(const FileLock&) = delete;

 private:
  AppendFile* const file_;
};

}  // namespace

CsvTracker::CsvTracker(const TrackerContext& context)
    : path_(JoinPath(JoinPath(context.logging_dir, context.project_name), "metrics.csv")) {}

absl::Status CsvTracker::start() {
  started_ = true;
  MUSTER_RETURN_IF_ERROR(file_.Open(path_, /*lines=*/false));
  const FileLock lock(&file_);
  MUSTER_RETURN_IF_ERROR(ReadHeader());
  MUSTER_ASSIGN_OR_RETURN(const int64_t size, file_.Size());
  MUSTER_ASSIGN_OR_RETURN(const Scan scan, ScanRows(file_, header_bytes_, size));
  MUSTER_ASSIGN_OR_RETURN(next_step_, NextStep(file_, scan, columns_.size()));
  if (!scan.in_line) return absl::OkStatus();
  // End the row that a crash has cut, so that the next one does not become a part of it.
  return file_.Append(scan.in_quotes ? "\"\n" : "\n");
}

absl::Status CsvTracker::ReadHeader() {
  columns_.clear();
  std::string head;
  size_t bytes = 0;
  bool ours = true;
  while (ours) {
    MUSTER_ASSIGN_OR_RETURN(const std::string piece,
                            file_.Read(static_cast<int64_t>(head.size()), kPiece));
    head += piece;
    columns_ = FirstRow(head, &bytes);
    ours = columns_.size() >= 2 && columns_[0] == "time" && columns_[1] == "step";
    if (bytes < head.size() || piece.size() < kPiece) break;
  }
  if (head.empty()) {
    columns_ = {"time", "step"};
    const std::string row = Row(columns_);
    header_bytes_ = static_cast<int64_t>(row.size());
    return file_.Append(row);
  }
  header_bytes_ = static_cast<int64_t>(bytes);
  if (!ours) {
    // The file is not ours to log to.
    finish().IgnoreError();
    return absl::FailedPreconditionError(
        absl::StrCat(path_, ": its first line does not begin with time,step; move the file away"));
  }
  if (head[bytes - 1] == '\n') return absl::OkStatus();
  // A crash has cut the header.
  const bool in_quotes = std::count(head.begin(), head.end(), '"') % 2 == 1;
  const absl::string_view end = in_quotes ? "\"\n" : "\n";
  header_bytes_ += static_cast<int64_t>(end.size());
  return file_.Append(end);
}

absl::Status CsvTracker::RewriteHeader(const std::string& row) {
  MUSTER_ASSIGN_OR_RETURN(AtomicFile written, AtomicFile::Create(EndOfLinks(path_)));
  MUSTER_RETURN_IF_ERROR(written.Append(Row(columns_)));
  int64_t at = header_bytes_;
  while (true) {
    MUSTER_ASSIGN_OR_RETURN(const std::string piece, file_.Read(at, kPiece));
    if (piece.empty()) break;
    MUSTER_RETURN_IF_ERROR(written.Append(piece));
    at += static_cast<int64_t>(piece.size());
  }
  MUSTER_RETURN_IF_ERROR(written.Append(row));
  return written.Commit();
}

absl::Status CsvTracker::log(const TrackerEntry& entry) {
  const int64_t step = entry.step.value_or(next_step_);
  // Another writer may replace the table by one with more columns at any moment, except while we
  // hold the lock of the current file. Each look that fails means that a writer has added a column,
  // or that inode numbers change (some network file systems): in the end the row is written anyway.
  constexpr int kLooks = 20;
  for (int looks = 1;; ++looks) {
    if (!started_) return file_.Append("");
    if (!file_.is_open()) MUSTER_RETURN_IF_ERROR(Reopen());
    {
      const FileLock lock(&file_);
      if (looks >= kLooks || file_.IsAtPath()) {
        MUSTER_RETURN_IF_ERROR(LogLocked(entry, step));
        next_step_ = StepAfter(step);
        return absl::OkStatus();
      }
    }
    MUSTER_RETURN_IF_ERROR(Reopen());
  }
}

absl::Status CsvTracker::Reopen() {
  MUSTER_RETURN_IF_ERROR(file_.Open(path_, /*lines=*/false));
  const FileLock lock(&file_);
  return ReadHeader();
}

absl::Status CsvTracker::LogLocked(const TrackerEntry& entry, int64_t step) {
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
  if (columns_.size() == known) return file_.Append(Row(cells));
  // Write the row into the new file with its header, because the lock is that of the old one.
  const absl::Status rewritten = RewriteHeader(Row(cells));
  if (!rewritten.ok()) {
    columns_.resize(known);
    return rewritten;
  }
  return Reopen();
}

absl::Status CsvTracker::finish() {
  started_ = false;
  columns_.clear();
  return file_.Close();
}

}  // namespace muster
