#ifndef MUSTER_WORKER_TRACK_JSONL_H_
#define MUSTER_WORKER_TRACK_JSONL_H_

#include <string>

#include "worker/track/append_file.h"
#include "worker/track/tracker.h"

namespace muster {

// One JSON object a line in LOGGING_DIR/PROJECT/metrics.jsonl, appended to existing lines. Entries
// without a step continue the numbers from the last one of this rank there:
//   {"time": 1700000000.125, "run": "mnist", "rank": 0, "config": {"lr": 0.1}}
//   {"time": 1700000001.5, "run": "mnist", "rank": 0, "step": 10, "values": {"loss": 0.25}}
class JsonlTracker final : public GeneralTracker {
 public:
  explicit JsonlTracker(const TrackerContext& context);

  std::string name() const override { return "jsonl"; }
  absl::Status start() override;
  absl::Status store_init_configuration(const TrackerValues& config) override;
  absl::Status log(const TrackerEntry& entry) override;
  int64_t next_step() const override { return next_step_; }
  absl::Status finish() override;

  const std::string& path() const { return path_; }

 private:
  absl::Status Write(absl::Time time, const std::string& rest);

  const TrackerContext context_;
  const std::string path_;
  AppendFile file_;
  int64_t next_step_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_JSONL_H_
