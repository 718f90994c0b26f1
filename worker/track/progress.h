#ifndef MUSTER_WORKER_TRACK_PROGRESS_H_
#define MUSTER_WORKER_TRACK_PROGRESS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

class Clock;

struct ProgressOptions {
  // Shown before the bar, in one line: control characters are escaped, as in the postfix.
  std::string description;
  // The number of items; 0 if unknown: then there is no bar and no estimate.
  int64_t total = 0;
  // The starting point, for example after a resume.
  int64_t initial = 0;
  // The unit, as in "12.5 it/s".
  std::string unit = "it";
  // False on ranks that are not the local main process: everything then does nothing.
  bool enabled = true;
  // Standard error. Nothing is shown if it is not a terminal.
  int fd = 2;
  // Overrides the check of `fd`, for tests.
  std::optional<bool> terminal;
  // Width in columns; 0: the terminal's.
  int columns = 0;
  // The shortest time between two redraws.
  absl::Duration period = absl::Milliseconds(100);
  const Clock* clock = nullptr;  // null: the real one
};

// One line that shows the progress of a loop:
//
//   epoch 1:  45%|████▌     | 422/938 [00:21<00:26, 19.9it/s, loss=0.0712]
//
// The rate is smoothed: each redraw weights the progress since the last one by 0.3. Not
// thread-safe.
class Progress {
 public:
  explicit Progress(ProgressOptions options);

  // Draws the last state and ends the line.
  ~Progress();
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;

  // Adds finished items. Redraws if the period has passed. Costs one clock reading.
  void Advance(int64_t by = 1);

  // Restarts now at `initial` items: earlier items and time no longer count. Draws.
  void Restart(int64_t initial);

  // Sets what is shown at the end of the line from the next redraw on, in this order, such as
  // {{"loss", "0.07"}}.
  void SetPostfix(std::vector<std::pair<std::string, std::string>> postfix);
  // The same with numbers, of four significant digits.
  void SetPostfix(const std::vector<std::pair<std::string, double>>& postfix);

  void SetDescription(absl::string_view description) {
    options_.description = std::string(description);
  }

  // Ends the line; nothing is drawn after it.
  void Close();

  int64_t done() const { return done_; }

  // The line without control codes, at most `columns` wide.
  std::string Line(int columns) const;

 private:
  void Draw();

  ProgressOptions options_;
  const bool visible_;
  int64_t done_;
  std::vector<std::pair<std::string, std::string>> postfix_;
  absl::Time start_;
  absl::Time drawn_at_;
  int64_t drawn_done_;
  double rate_ = 0;  // per second
  bool closed_ = false;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_PROGRESS_H_
