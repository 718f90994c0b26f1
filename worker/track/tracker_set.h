#ifndef MUSTER_WORKER_TRACK_TRACKER_SET_H_
#define MUSTER_WORKER_TRACK_TRACKER_SET_H_

#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "worker/track/tracker.h"

namespace muster {

// The trackers of one rank, fed by a separate thread, so that a slow disk or service does not slow
// training: Log queues and returns. Thread-safe. If the queue is full the oldest entry is dropped
// and counted. A tracker that fails is reported once in the log.
class TrackerSet {
 public:
  struct Options {
    size_t queue_limit = 4096;
    const Clock* clock = &Clock::Real();
  };

  // Starts the trackers (on ranks other than 0, those that are not for the main process only) and
  // gives them `config`. Errors: the first tracker's that does not start, naming it.
  static absl::StatusOr<std::unique_ptr<TrackerSet>> Start(
      std::vector<std::unique_ptr<GeneralTracker>> trackers, int rank, const TrackerValues& config,
      const Options& options);

  // Finishes, unless that has happened.
  ~TrackerSet();
  TrackerSet(const TrackerSet&) = delete;
  TrackerSet& operator=(const TrackerSet&) = delete;

  // Queues an entry for all trackers. After Finish it is dropped.
  void Log(TrackerValues values, std::optional<int64_t> step = std::nullopt);

  // Returns the tracker of that name, once everything queued so far has been written; on a rank
  // that does not have it, a tracker that does nothing. The caller may use it until the next Log:
  // then the set's thread uses it too, so call Get again. Does not wait when called on the set's
  // thread. Errors: NOT_FOUND, with the names that exist, for a name that no rank has.
  absl::StatusOr<GeneralTracker*> Get(const std::string& name);

  // Returns when everything queued so far is written.
  void Flush();

  // Writes queued entries, finishes the trackers, ends the thread. The first error of a tracker,
  // also an earlier one of Log. A second call does nothing.
  absl::Status Finish();

  // Entries that were dropped because the queue was full.
  int64_t dropped() const;

 private:
  TrackerSet(std::vector<std::unique_ptr<GeneralTracker>> trackers, std::vector<std::string> names,
             const Options& options);
  void Run();

  const Options options_;
  const std::vector<std::unique_ptr<GeneralTracker>> trackers_;
  // Of all ranks' trackers.
  const std::vector<std::string> names_;
  const std::unique_ptr<GeneralTracker> blank_;

  mutable Mutex mu_;
  CondVar work_;
  CondVar idle_;
  std::deque<TrackerEntry> queue_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  int64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status first_error_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // last: starts after, and is joined before, the rest
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_TRACKER_SET_H_
