#include "worker/job/trigger_watch.h"

#include <algorithm>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/clock.h"
#include "base/log.h"

namespace muster {
namespace {

// The limit of kept triggers that the program does not check.
constexpr size_t kMaxKept = 256;

// Whether the same poll would be refused again.
bool IsRefusal(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kUnauthenticated:
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnimplemented:
      return true;
    default:
      return false;
  }
}

bool IsFinal(const absl::Status& status) {
  return IsRefusal(status) || status.code() == absl::StatusCode::kAborted ||
         status.code() == absl::StatusCode::kFailedPrecondition;
}

}  // namespace

TriggerWatch::Options TriggerWatch::OptionsFor(int world_size) {
  Options options;
  options.period = std::clamp(absl::Milliseconds(1) * world_size, options.period, absl::Seconds(2));
  options.pending_period =
      std::clamp(absl::Microseconds(500) * world_size, options.pending_period, absl::Seconds(1));
  return options;
}

TriggerWatch::TriggerWatch(int64_t finished, PollFunction poll, Options options)
    : poll_(std::move(poll)),
      options_(std::move(options)),
      finished_(finished),
      begun_(finished),
      thread_([this] { Loop(); }) {}

TriggerWatch::~TriggerWatch() {
  {
    MutexLock lock(&mu_);
    stop_ = true;
    wake_.SignalAll();
  }
  thread_.join();
}

void TriggerWatch::Hurry() {
  MutexLock lock(&mu_);
  hurry_ = true;
  wake_.SignalAll();
}

absl::StatusOr<std::optional<TriggerInfo>> TriggerWatch::Check(const std::string& name,
                                                               int64_t finished) {
  const int64_t next = finished + 1;
  MutexLock lock(&mu_);
  finished_ = finished;
  checked_.insert(name);
  const auto waits = [&]() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_) {
    return ended_.ok() && (!polled_ || (promised_.has_value() && next >= *promised_));
  };
  absl::Time warn_at = absl::InfinitePast();  // not yet set
  bool warned = false;
  bool polled = polled_;
  while (waits()) {
    // Start a new warning period when the wait is for something else.
    if (warn_at == absl::InfinitePast() || polled_ != polled) {
      polled = polled_;
      warned = false;
      warn_at = Clock::Real().Now() + options_.warn_after;
    }
    const absl::Duration left = warned ? absl::InfiniteDuration() : warn_at - Clock::Real().Now();
    if (left > absl::ZeroDuration()) {
      changed_.WaitWithTimeout(&mu_, left);
      continue;
    }
    warned = true;
    Warn(absl::StrCat("step ", next, " waits: ", WhyWaiting()));
  }
  if (!ended_.ok()) return ended_;
  std::optional<TriggerInfo> told;
  for (auto it = decided_.begin(); it != decided_.end(); ++it) {
    if (it->second.name != name || it->second.effective_step > next) continue;
    told = std::move(it->second);
    acknowledge_.insert(it->first);
    decided_.erase(it);
    hurry_ = true;
    wake_.SignalAll();
    break;
  }
  begun_ = std::max(begun_, next);
  return told;
}

void TriggerWatch::Warn(const std::string& text) {
  if (options_.warn) {
    options_.warn(text);
  } else {
    MUSTER_LOG(Warning) << text;
  }
}

std::string TriggerWatch::WhyWaiting() {
  std::string why;
  if (!polled_) {
    why = "the coordinator has not answered the first poll for triggers";
  } else {
    why = "trigger";
    for (const auto& [id, name] : pending_names_) absl::StrAppend(&why, " '", name, "'");
    absl::StrAppend(
        &why, " waits for a rank that has not polled (all must check for triggers as they train)");
  }
  if (!last_poll_.ok()) absl::StrAppend(&why, "; the last poll: ", last_poll_.message());
  return why;
}

TriggerPoll TriggerWatch::NextPoll() {
  TriggerPoll poll;
  // Step counts may restart after a checkpoint is loaded; steps that have begun stay begun.
  poll.step = std::min(finished_, begun_);
  if (!pending_.empty()) {
    // The promise holds from here on: the coordinator may rely on it before we know that it was
    // received.
    if (!promised_.has_value()) promised_ = begun_ + 1;
    poll.horizon = *promised_;
    poll.pending.assign(pending_.begin(), pending_.end());
  }
  poll.acknowledged.assign(acknowledge_.begin(), acknowledge_.end());
  return poll;
}

void TriggerWatch::Take(const TriggerPoll& poll, const std::vector<TriggerInfo>& triggers) {
  polled_ = true;
  for (const uint64_t id : poll.acknowledged) acknowledge_.erase(id);
  pending_.clear();
  pending_names_.clear();
  for (const TriggerInfo& trigger : triggers) {
    if (!trigger.decided) {
      pending_.insert(trigger.id);
      pending_names_[trigger.id] = trigger.name;
      continue;
    }
    if (seen_.insert(trigger.id).second) {
      decided_[trigger.id] = trigger;
      continue;
    }
    // A coordinator that restarted has forgotten the acknowledgements. A trigger that the program
    // does not check is acknowledged after its step, because it must not stay at the coordinator
    // forever. It is still kept here, in case the program asks later.
    const bool acted = decided_.count(trigger.id) == 0;
    const bool unheard = trigger.effective_step <= finished_ && checked_.count(trigger.name) == 0;
    if (acted || unheard) acknowledge_.insert(trigger.id);
  }
  while (decided_.size() > kMaxKept) decided_.erase(decided_.begin());
  if (pending_.empty()) promised_.reset();
  changed_.SignalAll();
}

void TriggerWatch::Loop() {
  const Clock& clock = Clock::Real();
  bool last = false;
  while (!last) {
    {
      MutexLock lock(&mu_);
      if (stop_ && acknowledge_.empty()) return;
      last = stop_;
    }
    // A process that is ending raises no more triggers.
    if (!last && options_.before_poll) options_.before_poll();
    TriggerPoll poll;
    {
      MutexLock lock(&mu_);
      if (stop_ && acknowledge_.empty()) return;
      last = stop_;
      hurry_ = false;
      poll = NextPoll();
    }
    const absl::StatusOr<std::vector<TriggerInfo>> triggers = poll_(poll);
    MutexLock lock(&mu_);
    last_poll_ = triggers.status();
    if (triggers.ok()) {
      const bool news = pending_.empty();
      Take(poll, *triggers);
      // The promise is sent at once, with the next poll.
      if (news && !pending_.empty()) hurry_ = true;
    } else if (IsFinal(triggers.status())) {
      if (IsRefusal(triggers.status())) {
        Warn(absl::StrCat("no more triggers: ", triggers.status().message()));
      }
      ended_ = triggers.status();
      changed_.SignalAll();
      return;
    } else {
      // There is no coordinator for now, so no other rank can learn of a decision either.
      if (stop_) return;
      MUSTER_LOG(Debug) << triggers.status().message();
    }
    const absl::Time next =
        clock.Now() + (pending_.empty() ? options_.period : options_.pending_period);
    while (!stop_ && !(hurry_ && triggers.ok()) && clock.Now() < next) {
      wake_.WaitWithTimeout(&mu_, next - clock.Now());
    }
  }
}

}  // namespace muster
