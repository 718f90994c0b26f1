#ifndef MUSTER_WORKER_TRACK_TRACKER_SET_H_
#define MUSTER_WORKER_TRACK_TRACKER_SET_H_

#include <deque>
#include <functional>
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

// The trackers of one rank, fed by a separate thread: Log queues and returns, so that training does
// not wait for a disk or service unless the queue is full. Thread-safe. A tracker that fails is
// reported once in the log.
//
// Memory is bounded: if the queue is full, Log waits until the trackers have taken an entry, so
// that a burst is slow but complete. A tracker that hangs, or is far slower than training, must not
// delay training for long, which costs more than a metric: if the trackers have not taken half of a
// full queue within `patience`, Log warns which tracker is the cause, and from then on drops
// entries, instead of waiting, whenever the queue is full, until it has fallen to half. Dropped
// entries are counted, and their steps are not given to others, so that the gap can be seen.
class TrackerSet {
 public:
  struct Options {
    size_t queue_limit = 4096;
    // How long the trackers may take for half of a full queue, and how often waits are reported.
    absl::Duration patience = absl::Minutes(1);
    const Clock* clock = &Clock::Real();
    // Receives warnings, with no lock held; null: the log.
    std::function<void(const std::string& text)> warn = nullptr;
  };

  // Starts the trackers (on ranks other than 0, those that are not for the main process only) and
  // gives them `config`. Errors: that of the first tracker that does not start, naming it; those
  // that have started are then finished. INVALID_ARGUMENT for a null tracker and for two of one
  // name.
  static absl::StatusOr<std::unique_ptr<TrackerSet>> Start(
      std::vector<std::unique_ptr<GeneralTracker>> trackers, int rank, const TrackerValues& config,
      const Options& options);

  // Calls Finish(), unless that has happened.
  ~TrackerSet();
  TrackerSet(const TrackerSet&) = delete;
  TrackerSet& operator=(const TrackerSet&) = delete;

  // Queues an entry for all trackers; without a step it gets the one after the previous entry's,
  // beginning at the largest next_step() of the trackers. Waits while the queue is full, as
  // described above, except on the set's own thread, where it drops the entry. After Finish entries
  // are lost, with one warning.
  void Log(TrackerValues values, std::optional<int64_t> step = std::nullopt);

  // Returns the tracker of that name, once everything queued so far has been written; on a rank
  // that does not have it, a tracker that does nothing. The caller may use it until the next Log:
  // then the set's thread uses it too, so call Get again. Does not wait when called on the set's
  // thread. Errors: NOT_FOUND, with the names that exist, for a name that no rank has.
  absl::StatusOr<GeneralTracker*> Get(const std::string& name);

  // Returns when everything queued so far is written. Warns while that takes long.
  void Flush();

  // Writes queued entries, finishes the trackers, ends the thread. Warns while that takes long.
  // Returns the first error of a tracker, also an earlier one of Log. A second call does nothing.
  absl::Status Finish();

  // The number of entries that were dropped because the queue was full.
  int64_t dropped() const;

  // The number of calls of Log that now wait for room.
  int64_t waiting() const;

 private:
  TrackerSet(std::vector<std::unique_ptr<GeneralTracker>> trackers, std::vector<std::string> names,
             const Options& options);
  void Run();
  bool Full() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits for room in the queue; returns whether there is any. Warns, and releases the lock
  // meanwhile.
  bool WaitForRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits until everything queued is written, and warns meanwhile.
  void WaitUntilIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Says which tracker is in a call, and for how long.
  std::string DescribeCall() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Warn(const std::string& text) ABSL_LOCKS_EXCLUDED(mu_);
  // Calls Warn from a place where the lock is held.
  void WarnUnlocked(const std::string& text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const std::vector<std::unique_ptr<GeneralTracker>> trackers_;
  // The names of trackers_, since other threads must not call one that is in log().
  const std::vector<std::string> own_names_;
  // The names of all ranks' trackers.
  const std::vector<std::string> names_;
  const std::unique_ptr<GeneralTracker> blank_;

  mutable Mutex mu_;
  CondVar work_;
  CondVar idle_;
  CondVar room_;
  std::deque<TrackerEntry> queue_ ABSL_GUARDED_BY(mu_);
  int64_t next_step_ ABSL_GUARDED_BY(mu_);
  bool busy_ ABSL_GUARDED_BY(mu_) = false;
  // While busy_: the tracker in whose log() the thread is, and since when.
  size_t called_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Time called_at_ ABSL_GUARDED_BY(mu_);
  int64_t waiting_ ABSL_GUARDED_BY(mu_) = 0;
  // Set while a Log has found the queue full and it has not fallen to half since: the time when
  // that began, or when the trackers had last taken half of its length.
  absl::Time full_since_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  // The entries that have been taken since then.
  size_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  // Whether that has lasted for `patience`.
  bool stuck_ ABSL_GUARDED_BY(mu_) = false;
  bool said_stuck_ ABSL_GUARDED_BY(mu_) = false;
  // The time that all Logs together have waited.
  absl::Duration waited_ ABSL_GUARDED_BY(mu_);
  bool said_slow_ ABSL_GUARDED_BY(mu_) = false;
  bool said_late_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  int64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status first_error_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // last member: starts after, and is joined before, the others
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_TRACKER_SET_H_
