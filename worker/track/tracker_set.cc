#include "worker/track/tracker_set.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/units.h"
#include "worker/track/step_after.h"

namespace muster {
namespace {

class BlankTracker final : public GeneralTracker {
 public:
  std::string name() const override { return "blank"; }
  absl::Status start() override { return absl::OkStatus(); }
  absl::Status log(const TrackerEntry&) override { return absl::OkStatus(); }
};

absl::Status Named(const GeneralTracker& tracker, const absl::Status& status) {
  if (status.ok()) return status;
  return absl::Status(status.code(),
                      absl::StrCat("tracker ", tracker.name(), ": ", status.message()));
}

// A program's own tracker may throw; that must not end training either.
template <typename Call>
absl::Status Guarded(const GeneralTracker& tracker, Call call) {
  try {
    return Named(tracker, call());
  } catch (const std::exception& error) {
    return Named(tracker, absl::InternalError(error.what()));
  } catch (...) {
    return Named(tracker, absl::InternalError("what it threw is no exception"));
  }
}

int64_t NextStep(const std::vector<std::unique_ptr<GeneralTracker>>& trackers) {
  int64_t next = 0;
  for (const auto& tracker : trackers) next = std::max(next, tracker->next_step());
  return next;
}

std::vector<std::string> NamesOf(const std::vector<std::unique_ptr<GeneralTracker>>& trackers) {
  std::vector<std::string> names;
  for (const auto& tracker : trackers) names.push_back(tracker->name());
  return names;
}

}  // namespace

absl::StatusOr<std::unique_ptr<TrackerSet>> TrackerSet::Start(
    std::vector<std::unique_ptr<GeneralTracker>> trackers, int rank, const TrackerValues& config,
    const Options& options) {
  std::vector<std::string> names;
  for (const auto& tracker : trackers) {
    if (tracker == nullptr) {
      return absl::InvalidArgumentError("init_trackers() was given a null tracker");
    }
    if (std::find(names.begin(), names.end(), tracker->name()) != names.end()) {
      return absl::InvalidArgumentError(
          absl::StrCat("init_trackers() was given two trackers named \"", tracker->name(),
                       "\": give it one of them, or another name to one"));
    }
    names.push_back(tracker->name());
  }
  trackers.erase(std::remove_if(trackers.begin(), trackers.end(),
                                [rank](const std::unique_ptr<GeneralTracker>& tracker) {
                                  return rank != 0 && tracker->main_process_only();
                                }),
                 trackers.end());
  absl::Status status;
  size_t started = 0;
  while (status.ok() && started < trackers.size()) {
    GeneralTracker& tracker = *trackers[started];
    status = Guarded(tracker, [&] { return tracker.start(); });
    if (!status.ok()) break;
    ++started;
    if (config.empty()) continue;
    status = Guarded(tracker, [&] { return tracker.store_init_configuration(config); });
  }
  if (!status.ok()) {
    for (size_t i = 0; i < started; ++i) {
      Guarded(*trackers[i], [&] { return trackers[i]->finish(); }).IgnoreError();
    }
    return status;
  }
  return std::unique_ptr<TrackerSet>(
      new TrackerSet(std::move(trackers), std::move(names), options));
}

TrackerSet::TrackerSet(std::vector<std::unique_ptr<GeneralTracker>> trackers,
                       std::vector<std::string> names, const Options& options)
    : options_(options),
      trackers_(std::move(trackers)),
      own_names_(NamesOf(trackers_)),
      names_(std::move(names)),
      blank_(std::make_unique<BlankTracker>()),
      next_step_(NextStep(trackers_)),
      thread_([this] { Run(); }) {}

TrackerSet::~TrackerSet() { Finish().IgnoreError(); }

void TrackerSet::Log(TrackerValues values, std::optional<int64_t> step) {
  if (trackers_.empty()) return;
  TrackerEntry entry{.values = std::move(values), .step = step, .time = options_.clock->WallNow()};
  bool late = false;
  {
    MutexLock lock(&mu_);
    // Number it before it waits or is dropped: the steps say when it was logged.
    if (!entry.step.has_value()) entry.step = next_step_;
    next_step_ = StepAfter(*entry.step);
    if (!WaitForRoom()) {
      ++dropped_;
      return;
    }
    if (stop_) {
      late = !std::exchange(said_late_, true);
    } else {
      queue_.push_back(std::move(entry));
      work_.Signal();
    }
  }
  if (late) {
    Warn("log() after end_training(), which has finished the trackers: what it logs is lost");
  }
}

bool TrackerSet::Full() const { return queue_.size() >= options_.queue_limit && !stop_; }

bool TrackerSet::WaitForRoom() {
  if (!Full()) return true;
  // A tracker that logs within its own call would wait for itself.
  if (stuck_ || std::this_thread::get_id() == thread_.get_id()) return false;
  const absl::Time begin = options_.clock->Now();
  ++waiting_;
  while (Full() && !stuck_) {
    const absl::Time now = options_.clock->Now();
    if (full_since_ == absl::InfiniteFuture()) {
      full_since_ = now;
      taken_ = 0;
    }
    const absl::Duration left = full_since_ + options_.patience - now;
    if (left <= absl::ZeroDuration()) break;
    room_.WaitWithTimeout(&mu_, left);
  }
  --waiting_;
  if (Full()) {
    stuck_ = true;
    if (!std::exchange(said_stuck_, true)) {
      WarnUnlocked(absl::StrCat("the queue of tracked entries has been full for ",
                                HumanDuration(options_.clock->Now() - full_since_),
                                ", and training waits no longer: ", DescribeCall(),
                                "; entries are dropped while the queue is full"));
    }
    return false;
  }
  waited_ += options_.clock->Now() - begin;
  if (waited_ >= options_.patience && !std::exchange(said_slow_, true)) {
    WarnUnlocked(absl::StrCat("training has waited ", HumanDuration(waited_),
                              " in all for slow trackers (", DescribeCall(),
                              "): log less often, or in fewer trackers"));
  }
  return true;
}

std::string TrackerSet::DescribeCall() const {
  if (!busy_) return "no tracker has begun to write";
  return absl::StrCat("tracker ", own_names_[called_], " has been writing an entry for ",
                      HumanDuration(options_.clock->Now() - called_at_));
}

void TrackerSet::WarnUnlocked(const std::string& text) {
  mu_.Unlock();
  Warn(text);
  mu_.Lock();
}

void TrackerSet::Warn(const std::string& text) {
  if (options_.warn) {
    options_.warn(text);
  } else {
    MUSTER_LOG(Warning) << text;
  }
}

absl::StatusOr<GeneralTracker*> TrackerSet::Get(const std::string& name) {
  for (size_t i = 0; i < trackers_.size(); ++i) {
    if (own_names_[i] != name) continue;
    // A tracker that asks for another one, within its own call, would wait for itself.
    if (std::this_thread::get_id() != thread_.get_id()) Flush();
    return trackers_[i].get();
  }
  if (std::find(names_.begin(), names_.end(), name) != names_.end()) return blank_.get();
  return absl::NotFoundError(absl::StrCat("this run has no tracker \"", name, "\"; it has ",
                                          names_.empty() ? "none" : absl::StrJoin(names_, ", ")));
}

void TrackerSet::Flush() {
  MutexLock lock(&mu_);
  WaitUntilIdle();
}

void TrackerSet::WaitUntilIdle() {
  while (!queue_.empty() || busy_) {
    if (!idle_.WaitWithTimeout(&mu_, options_.patience)) continue;
    if (queue_.empty() && !busy_) return;
    WarnUnlocked(absl::StrCat("still waiting until ", queue_.size() + (busy_ ? 1 : 0),
                              " tracked entries are written: ", DescribeCall()));
  }
}

absl::Status TrackerSet::Finish() {
  {
    MutexLock lock(&mu_);
    if (std::exchange(finished_, true)) return absl::OkStatus();
    stop_ = true;
    work_.SignalAll();
    room_.SignalAll();
    WaitUntilIdle();
  }
  thread_.join();
  // The thread has ended and nothing is queued any more, so the trackers may be called here.
  absl::Status finished;
  for (const auto& tracker : trackers_) {
    finished.Update(Guarded(*tracker, [&] { return tracker->finish(); }));
  }
  int64_t dropped = 0;
  absl::Status first_error;
  {
    MutexLock lock(&mu_);
    first_error_.Update(finished);
    first_error = first_error_;
    dropped = dropped_;
  }
  if (dropped > 0) {
    Warn(absl::StrCat(dropped, " tracked entries were dropped: the trackers were too slow"));
  }
  return first_error;
}

int64_t TrackerSet::dropped() const {
  MutexLock lock(&mu_);
  return dropped_;
}

int64_t TrackerSet::waiting() const {
  MutexLock lock(&mu_);
  return waiting_;
}

void TrackerSet::Run() {
  std::vector<bool> reported(trackers_.size());
  while (true) {
    TrackerEntry entry;
    {
      MutexLock lock(&mu_);
      busy_ = false;
      if (queue_.empty()) idle_.SignalAll();
      while (queue_.empty() && !stop_) work_.Wait(&mu_);
      if (queue_.empty()) return;
      entry = std::move(queue_.front());
      queue_.pop_front();
      busy_ = true;
      if (queue_.size() <= options_.queue_limit / 2) {
        full_since_ = absl::InfiniteFuture();
        stuck_ = false;
        said_stuck_ = false;
      } else if (full_since_ < absl::InfiniteFuture() && ++taken_ >= options_.queue_limit / 2) {
        // If the trackers catch up, a burst stays complete, however long it is.
        full_since_ = options_.clock->Now();
        taken_ = 0;
      }
      room_.Signal();
    }
    for (size_t i = 0; i < trackers_.size(); ++i) {
      {
        MutexLock lock(&mu_);
        called_ = i;
        called_at_ = options_.clock->Now();
      }
      const absl::Status status = Guarded(*trackers_[i], [&] { return trackers_[i]->log(entry); });
      if (status.ok()) continue;
      if (!reported[i]) {
        reported[i] = true;
        Warn(absl::StrCat(status.message(), " (further errors of it are not shown)"));
      }
      MutexLock lock(&mu_);
      first_error_.Update(status);
    }
  }
}

}  // namespace muster
