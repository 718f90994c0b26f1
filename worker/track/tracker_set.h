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
// that a burst is slow but whole. A tracker that hangs, or is far slower than training, must not
// hold it, which costs more than a metric: if a full queue has not moved on by half its length
// within `patience`, Log says which tracker is in its way, and from then on drops entries, instead
// of waiting, whenever the queue is full, until it has fallen to half. Dropped entries are counted,
// and their steps are not given to others, so that the gap can be seen.
class TrackerSet {
 public:
  struct Options {
    size_t queue_limit = 4096;
    // How long a full queue may take to move on by half, and how often waits are reported.
    absl::Duration patience = absl::Minutes(1);
    const Clock* clock = &Clock::Real();
    // Receives warnings, with no lock held; null: the log.
    std::function<void(const std::string& text)> warn = nullptr;
  };

  // Starts the trackers (on ranks other than 0, those that are not for the main process only) and
  // gives them `config`. Errors: the first tracker's that does not start, naming it; those that
  // have started are then finished. INVALID_ARGUMENT for a null tracker and for two of one name.
  static absl::StatusOr<std::unique_ptr<TrackerSet>> Start(
      std::vector<std::unique_ptr<GeneralTracker>> trackers, int rank, const TrackerValues& config,
      const Options& options);

  // Finishes, unless that has happened.
  ~TrackerSet();
  TrackerSet(const TrackerSet&) = delete;
  TrackerSet& operator=(const TrackerSet&) = delete;

  // Queues an entry for all trackers; without a step it gets that after the entry before, which
  // goes on from the largest next_step() of the trackers. Waits while the queue is full, as said
  // above, but on the set's own thread, where it drops the entry. After Finish entries are lost,
  // with one warning.
  void Log(TrackerValues values, std::optional<int64_t> step = std::nullopt);

  // Returns the tracker of that name, once everything queued so far has been written; on a rank
  // that does not have it, a tracker that does nothing. The caller may use it until the next Log:
  // then the set's thread uses it too, so call Get again. Does not wait when called on the set's
  // thread. Errors: NOT_FOUND, with the names that exist, for a name that no rank has.
  absl::StatusOr<GeneralTracker*> Get(const std::string& name);

  // Returns when everything queued so far is written. Warns while that takes long.
  void Flush();

  // Writes queued entries, finishes the trackers, ends the thread. Warns while that takes long. The
  // first error of a tracker, also an earlier one of Log. A second call does nothing.
  absl::Status Finish();

  // Entries that were dropped because the queue was full.
  int64_t dropped() const;

  // Calls of Log that wait for room now.
  int64_t waiting() const;

 private:
  TrackerSet(std::vector<std::unique_ptr<GeneralTracker>> trackers, std::vector<std::string> names,
             const Options& options);
  void Run();
  bool Full() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Whether the queue has room; waits for it. Warns, and releases the lock for it.
  bool WaitForRoom() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Waits until everything queued is written, and warns meanwhile.
  void WaitUntilIdle() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Which tracker is in a call, and for how long.
  std::string DescribeCall() const ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Warn(const std::string& text) ABSL_LOCKS_EXCLUDED(mu_);
  // Warn from where the lock is held.
  void WarnUnlocked(const std::string& text) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);

  const Options options_;
  const std::vector<std::unique_ptr<GeneralTracker>> trackers_;
  // Of trackers_: while one is in log(), other threads must not call it.
  const std::vector<std::string> own_names_;
  // Of all ranks' trackers.
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
  // A Log has found the queue full, and it has not fallen to half since: since when that is so, or
  // since when it has moved on by half its length.
  absl::Time full_since_ ABSL_GUARDED_BY(mu_) = absl::InfiniteFuture();
  // Entries that have been taken since then.
  size_t taken_ ABSL_GUARDED_BY(mu_) = 0;
  // That has lasted for `patience`.
  bool stuck_ ABSL_GUARDED_BY(mu_) = false;
  bool said_stuck_ ABSL_GUARDED_BY(mu_) = false;
  // Of all Logs together.
  absl::Duration waited_ ABSL_GUARDED_BY(mu_);
  bool said_slow_ ABSL_GUARDED_BY(mu_) = false;
  bool said_late_ ABSL_GUARDED_BY(mu_) = false;
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  bool finished_ ABSL_GUARDED_BY(mu_) = false;
  int64_t dropped_ ABSL_GUARDED_BY(mu_) = 0;
  absl::Status first_error_ ABSL_GUARDED_BY(mu_);

  std::thread thread_;  // last: starts after, and is joined before, the rest
};

}  // namespace muster

#endif  // MUSTER_WORKER_TRACK_TRACKER_SET_H_
