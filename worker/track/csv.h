#ifndef MUSTER_WORKER_TRACK_CSV_H_
#define MUSTER_WORKER_TRACK_CSV_H_

#include <string>
#include <vector>

#include "worker/track/append_file.h"
#include "worker/track/tracker.h"

namespace muster {

// A table in LOGGING_DIR/PROJECT/metrics.csv (RFC 4180): columns time, step, and one for each name
// in the order of appearance. A new name adds a column: the header is then rewritten, and earlier
// rows stay shorter, which readers of CSV treat as empty cells. The table continues that of an
// earlier run, and entries without a step continue the numbers from its last row. Several processes
// may write one table: each adopts the columns of the others (on a file system without locks, rows
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
  // Reads the header of the open file, after writing one if the file is empty.
  absl::Status ReadHeader();
  // Opens the file at the path and reads its header.
  absl::Status Reopen();
  // Logs while the file is locked and is the one at the path.
  absl::Status LogLocked(const TrackerEntry& entry, int64_t step);
  // Replaces the open file by one with the columns, the existing rows and `row`.
  absl::Status RewriteHeader(const std::string& row);

  const std::string path_;
  AppendFile file_;
  bool started_ = false;
  std::vector<std::string> columns_;
  // The size of the open file's header.
  int64_t header_bytes_ = 0;
  int64_t next_step_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_CSV_H_
