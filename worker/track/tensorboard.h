#ifndef MUSTER_WORKER_TRACK_TENSORBOARD_H_
#define MUSTER_WORKER_TRACK_TENSORBOARD_H_

#include <cstdint>
#include <string>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/track/append_file.h"
#include "worker/track/tracker.h"

namespace muster {

// Writes what TensorBoard reads: LOGGING_DIR/PROJECT/events.out.tfevents.<time>.<host>.<pid>.<n>,
// one file a run; entries without a step continue the numbers from the last one of the newest
// existing file. Numbers and truth values become scalars, texts go to the text dashboard, the
// configuration to the HParams dashboard and to hparams.yml next to the file (as Accelerate does).
//
// The file is a sequence of frames: length (8 bytes, little-endian), masked CRC-32C of those bytes,
// the bytes of an Event protobuf, their masked CRC-32C. The first Event holds file_version
// "brain.Event:2".
class TensorBoardTracker final : public GeneralTracker {
 public:
  explicit TensorBoardTracker(const TrackerContext& context);

  std::string name() const override { return "tensorboard"; }
  absl::Status start() override;
  absl::Status store_init_configuration(const TrackerValues& config) override;
  absl::Status log(const TrackerEntry& entry) override;
  int64_t next_step() const override { return next_step_; }
  absl::Status finish() override;

  const std::string& path() const { return path_; }

 private:
  // `summary`: the bytes of a Summary message, or empty for the version event.
  absl::Status WriteEvent(absl::Time time, int64_t step, absl::string_view summary);

  const TrackerContext context_;
  const std::string folder_;
  const std::string path_;
  AppendFile file_;
  bool has_config_ = false;
  int64_t next_step_ = 0;
  absl::Time last_time_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_TENSORBOARD_H_
