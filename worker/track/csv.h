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
// run, and entries without a step are numbered on from its last row.
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
  absl::Status RewriteHeader();

  const std::string path_;
  AppendFile file_;
  std::vector<std::string> columns_;
  int64_t next_step_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_CSV_H_
