#include "worker/track/tracker_set.h"

#include <algorithm>
#include <exception>
#include <utility>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/log.h"
#include "base/status_macros.h"

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

}  // namespace

absl::StatusOr<std::unique_ptr<TrackerSet>> TrackerSet::Start(
    std::vector<std::unique_ptr<GeneralTracker>> trackers, int rank, const TrackerValues& config,
    const Options& options) {
  std::vector<std::string> names;
  for (const auto& tracker : trackers) names.push_back(tracker->name());
  trackers.erase(std::remove_if(trackers.begin(), trackers.end(),
                                [rank](const std::unique_ptr<GeneralTracker>& tracker) {
                                  return rank != 0 && tracker->main_process_only();
                                }),
                 trackers.end());
  for (const auto& tracker : trackers) {
    MUSTER_RETURN_IF_ERROR(Guarded(*tracker, [&] { return tracker->start(); }));
    if (config.empty()) continue;
    MUSTER_RETURN_IF_ERROR(
        Guarded(*tracker, [&] { return tracker->store_init_configuration(config); }));
  }
  return std::unique_ptr<TrackerSet>(
      new TrackerSet(std::move(trackers), std::move(names), options));
}

TrackerSet::TrackerSet(std::vector<std::unique_ptr<GeneralTracker>> trackers,
                       std::vector<std::string> names, const Options& options)
    : options_(options),
      trackers_(std::move(trackers)),
      names_(std::move(names)),
      blank_(std::make_unique<BlankTracker>()),
      thread_([this] { Run(); }) {}

TrackerSet::~TrackerSet() { Finish().IgnoreError(); }

void TrackerSet::Log(TrackerValues values, std::optional<int64_t> step) {
  if (trackers_.empty()) return;
  TrackerEntry entry{.values = std::move(values), .step = step, .time = options_.clock->WallNow()};
  MutexLock lock(&mu_);
  if (stop_) return;
  if (queue_.size() >= options_.queue_limit) {
    queue_.pop_front();
    ++dropped_;
  }
  queue_.push_back(std::move(entry));
  work_.Signal();
}

absl::StatusOr<GeneralTracker*> TrackerSet::Get(const std::string& name) {
  for (const auto& tracker : trackers_) {
    if (tracker->name() != name) continue;
    // A tracker that asks for another one, within its own call, would wait for itself.
    if (std::this_thread::get_id() != thread_.get_id()) Flush();
    return tracker.get();
  }
  if (std::find(names_.begin(), names_.end(), name) != names_.end()) return blank_.get();
  return absl::NotFoundError(absl::StrCat("this run has no tracker \"", name, "\"; it has ",
                                          names_.empty() ? "none" : absl::StrJoin(names_, ", ")));
}

void TrackerSet::Flush() {
  MutexLock lock(&mu_);
  while (!queue_.empty() || busy_) idle_.Wait(&mu_);
}

absl::Status TrackerSet::Finish() {
  {
    MutexLock lock(&mu_);
    if (std::exchange(finished_, true)) return absl::OkStatus();
    stop_ = true;
    work_.SignalAll();
  }
  thread_.join();
  // The thread is gone and nothing is queued any more: the trackers are ours.
  absl::Status finished;
  for (const auto& tracker : trackers_) {
    finished.Update(Guarded(*tracker, [&] { return tracker->finish(); }));
  }
  MutexLock lock(&mu_);
  first_error_.Update(finished);
  if (dropped_ > 0) {
    MUSTER_LOG(Warning) << dropped_ << " tracked entries were dropped: the trackers were too slow";
  }
  return first_error_;
}

int64_t TrackerSet::dropped() const {
  MutexLock lock(&mu_);
  return dropped_;
}

void TrackerSet::Run() {
  std::vector<bool> reported(trackers_.size());
  while (true) {
    std::deque<TrackerEntry> entries;
    {
      MutexLock lock(&mu_);
      busy_ = false;
      if (queue_.empty()) idle_.SignalAll();
      while (queue_.empty() && !stop_) work_.Wait(&mu_);
      if (queue_.empty()) return;
      entries.swap(queue_);
      busy_ = true;
    }
    for (const TrackerEntry& entry : entries) {
      for (size_t i = 0; i < trackers_.size(); ++i) {
        const absl::Status status =
            Guarded(*trackers_[i], [&] { return trackers_[i]->log(entry); });
        if (status.ok()) continue;
        if (!reported[i]) {
          reported[i] = true;
          MUSTER_LOG(Warning) << status.message() << " (further errors of it are not shown)";
        }
        MutexLock lock(&mu_);
        first_error_.Update(status);
      }
    }
  }
}

}  // namespace muster
