#ifndef MUSTER_WORKER_TRACK_CSV_H_
#define MUSTER_WORKER_TRACK_CSV_H_

#include <string>
#include <vector>

#include "worker/track/append_file.h"
#include "worker/track/tracker.h"

namespace muster {

// A table in LOGGING_DIR/PROJECT/metrics.csv (RFC 4180): columns time, step, and one for each name
// in the order of appearance. A new name adds a column: the header is then rewritten, earlier rows
// stay shorter, which readers of CSV take for empty cells. The table continues that of an earlier
// run, and entries without a step are numbered on from its last row. Several processes may write
// one table: each takes over the columns of the others (where the file system has no locks, rows
// that are written while a column is added may be lost).
class CsvTracker final : public GeneralTracker {
 public:
  explicit CsvTracker(const TrackerContext& context);

  std::string name() const override { return "csv"; }
  absl::Status start() override;
  absl::Status log(const TrackerEntry& entry) override;
  int64_t next_step() const override { return next_step_; }
  absl::Status finish() override;

  const std::string& path() const { return path_; }

 private:
  // Reads the header of the open file, which it gets if it is empty.
  absl::Status ReadHeader();
  // Opens the file at the path and reads its header.
  absl::Status Reopen();
  // The file is locked, and that at the path.
  absl::Status LogLocked(const TrackerEntry& entry, int64_t step);
  // Puts a file with the columns, the rows that are there and `row` into the place of the open one.
  absl::Status RewriteHeader(const std::string& row);

  const std::string path_;
  AppendFile file_;
  bool started_ = false;
  std::vector<std::string> columns_;
  // Of the open file.
  int64_t header_bytes_ = 0;
  int64_t next_step_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_CSV_H_
