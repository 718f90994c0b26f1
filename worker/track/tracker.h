#ifndef MUSTER_WORKER_TRACK_TRACKER_H_
#define MUSTER_WORKER_TRACK_TRACKER_H_

#include <cstdint>
#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <utility>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

// A tracked number, boolean or text. Converts from all of them, so that {{"loss", 0.5}, {"epoch",
// 3}} works.
class TrackerValue {
 public:
  // uint64_t: only for numbers that int64_t cannot hold.
  using Variant = std::variant<bool, int64_t, uint64_t, double, std::string>;

  template <typename T, std::enable_if_t<std::is_arithmetic_v<T>, int> = 0>
  TrackerValue(T value) : value_(Widen(value)) {}  // NOLINT(google-explicit-constructor)
  TrackerValue(const char* text)
      : value_(std::string(text)) {}  // NOLINT(google-explicit-constructor)
  TrackerValue(std::string text)
      : value_(std::move(text)) {}  // NOLINT(google-explicit-constructor)

  const Variant& get() const { return value_; }
  bool is_text() const { return std::holds_alternative<std::string>(value_); }
  // Booleans are 0 and 1; a text is not a number.
  double number() const;
  // The value for people: the shortest form that gives the same number.
  std::string text() const;
  // The value as JSON; numbers that JSON lacks become "nan", "inf", "-inf".
  std::string json() const;

 private:
  template <typename T>
  static Variant Widen(T value) {
    if constexpr (std::is_same_v<T, bool>) {
      return value;
    } else if constexpr (std::is_integral_v<T>) {
      if constexpr (std::is_unsigned_v<T> && sizeof(T) >= sizeof(int64_t)) {
        if (value > T{std::numeric_limits<int64_t>::max()}) return static_cast<uint64_t>(value);
      }
      return static_cast<int64_t>(value);
    } else {
      return static_cast<double>(value);
    }
  }
  Variant value_;
};

using TrackerValues = std::vector<std::pair<std::string, TrackerValue>>;

// Returns `values` with each name once, at its first place and with its last value: for formats in
// which a name cannot occur twice.
TrackerValues LastOfEachName(const TrackerValues& values);

struct TrackerEntry {
  TrackerValues values;
  // Always set by accelerator.log(), which numbers entries that the program logs without a step.
  // Absent only if the program calls log() of a tracker itself; the trackers here then continue
  // from their last entry.
  std::optional<int64_t> step;
  absl::Time time;
};

// The destination of a run's metrics: a file format or a service. Implement it for your own
// tracker:
//
//   class Mine : public muster::GeneralTracker {
//     std::string name() const override { return "mine"; }
//     absl::Status start() override { ... }
//     absl::Status log(const muster::TrackerEntry& entry) override { ... }
//   };
//
// Calls come from one thread at a time, with start first and finish last. An error of start or of
// store_init_configuration becomes one of init_trackers(); finish is then called if start has
// succeeded. An error of log is logged once and never stops training.
class GeneralTracker {
 public:
  virtual ~GeneralTracker() = default;

  virtual std::string name() const = 0;

  // Whether only rank 0 has this tracker.
  virtual bool main_process_only() const { return true; }

  // Opens its output.
  virtual absl::Status start() = 0;

  // Receives the settings of the run, once, before the first entry.
  virtual absl::Status store_init_configuration(const TrackerValues& /*config*/) {
    return absl::OkStatus();
  }

  virtual absl::Status log(const TrackerEntry& entry) = 0;

  // The step that follows the last one in its output, for a tracker that continues that of an
  // earlier run; called once, after start(). Entries that the program logs without a step are
  // numbered from the largest of all trackers on, so that all trackers get the same steps.
  virtual int64_t next_step() const { return 0; }

  // Flushes and closes. Called once.
  virtual absl::Status finish() { return absl::OkStatus(); }
};

// The arguments of a tracker factory.
struct TrackerContext {
  std::string project_name;
  // The folder for files of all projects. The trackers here write to LOGGING_DIR/PROJECT_NAME/.
  std::string logging_dir;
  int rank = 0;
  // When the run began.
  absl::Time start_time;
};

// Makes a tracker. Called on every rank, even if the tracker is for the main process only and never
// started: open files and connections in start().
using TrackerFactory =
    std::function<absl::StatusOr<std::unique_ptr<GeneralTracker>>(const TrackerContext&)>;

// Adds a kind of tracker under a name, for MakeTracker; warns if it replaces one. Thread-safe.
void RegisterTrackerClass(const std::string& name, TrackerFactory factory);

// Makes a tracker of a registered kind: "tensorboard", "jsonl", "csv", or the program's own.
// Never null. Errors: NOT_FOUND listing the known kinds; INVALID_ARGUMENT if it needs a logging_dir
// and has none, or if the factory returns null; those of the factory.
absl::StatusOr<std::unique_ptr<GeneralTracker>> MakeTracker(const std::string& kind,
                                                            const TrackerContext& context);

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_TRACKER_H_
