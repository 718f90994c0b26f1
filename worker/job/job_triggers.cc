#include "worker/job/job_triggers.h"

#include <algorithm>
#include <functional>
#include <utility>
#include <vector>

#include "ATen/ops/tensor.h"
#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "c10/util/Exception.h"
#include "worker/collective/comm_checks.h"
#include "worker/job/stop_signal.h"

namespace muster {
namespace {

constexpr char kStop[] = "stop";
// The same on all ranks: the coordinator treats triggers that many raise with the same words as
// one.
constexpr char kSigterm[] = "SIGTERM";
// The same limit as the coordinator's.
constexpr size_t kMaxName = 128;
constexpr size_t kMaxPayload = 64 << 10;
constexpr absl::Duration kPollTimeout = absl::Seconds(5);

}  // namespace

JobTriggers::JobTriggers(std::shared_ptr<CoordinatorClient> coordinator, Comm* comm,
                         Options options)
    : coordinator_(std::move(coordinator)), comm_(comm), options_(options) {}

absl::Status JobTriggers::Raise(const std::string& name, const std::string& payload) {
  if (name.empty() || name.size() > kMaxName) {
    return absl::InvalidArgumentError(
        absl::StrCat("a trigger's name has 1 to ", kMaxName, " bytes, not ", name.size()));
  }
  if (payload.size() > kMaxPayload) {
    return absl::InvalidArgumentError(absl::StrCat("the payload of trigger '", name, "' has ",
                                                   payload.size(), " bytes: at most ",
                                                   kMaxPayload));
  }
  if (coordinator_ != nullptr) return coordinator_->RaiseTrigger(name, payload).status();
  MutexLock lock(&mu_);
  raised_.push_back({name, payload, comm_->rank()});
  return absl::OkStatus();
}

void JobTriggers::Close() {
  if (watch_ == nullptr) return;
  coordinator_->BeginExit();
  watch_.reset();
}

void JobTriggers::RaiseForSignal() {
  if (signal_told_ || !watch_signal_ || !StopSignal::Received()) return;
  const absl::Status status = Raise(kStop, kSigterm);
  // If the coordinator is away, the next poll tries again.
  signal_told_ = status.ok() || !absl::IsUnavailable(status);
  if (!status.ok()) MUSTER_LOG(Warning) << "SIGTERM arrived, but " << status.message();
}

std::optional<Trigger> JobTriggers::Check(const std::string& name, int64_t finished) {
  if (coordinator_ == nullptr) {
    RaiseForSignal();
    return CheckTogether(name);
  }
  if (watch_ == nullptr) {
    TriggerWatch::Options options = TriggerWatch::OptionsFor(comm_->size());
    options.before_poll = [this] { RaiseForSignal(); };
    watch_ = std::make_unique<TriggerWatch>(
        finished,
        [this](const TriggerPoll& poll) { return coordinator_->PollTriggers(poll, kPollTimeout); },
        std::move(options));
  }
  const absl::StatusOr<std::optional<TriggerInfo>> told = watch_->Check(name, finished);
  TORCH_CHECK(told.ok(), std::string(told.status().message()));
  if (!told->has_value()) return std::nullopt;
  return Trigger{(*told)->name, (*told)->payload, (*told)->raised_by_rank};
}

std::optional<Trigger> JobTriggers::CheckTogether(const std::string& name) {
  std::optional<Trigger> mine;
  {
    MutexLock lock(&mu_);
    const auto it = std::find_if(raised_.begin(), raised_.end(),
                                 [&](const Trigger& trigger) { return trigger.name == name; });
    if (it != raised_.end()) mine = *it;
  }
  std::optional<Trigger> next = mine;
  if (comm_->size() > 1) {
    // The last two are maxima of one number and of its negative: if ranks have different names, the
    // maxima differ.
    const auto hash = static_cast<int64_t>(std::hash<std::string>()(name) >> 2);
    const int64_t rank = mine.has_value() ? comm_->rank() : comm_->size();
    at::Tensor all = at::tensor({-rank, hash, -hash}, at::kLong);
    comm_->AllReduce(all, ReduceOp::kMax);
    const auto* const numbers = all.const_data_ptr<int64_t>();
    if (numbers[1] != -numbers[2]) {
      TORCH_CHECK(false, "check_trigger(): ",
                  comm_checks::ByRanks(comm_->AllGatherBytes(name), "checks", "check"),
                  "; without a coordinator all processes must check the same triggers in the same "
                  "order");
    }
    const int from = static_cast<int>(-numbers[0]);
    if (from == comm_->size()) return std::nullopt;
    const std::string payload =
        comm_->BroadcastBytes(from == comm_->rank() ? mine->payload : "", from);
    next = Trigger{name, payload, from};
  }
  if (!next.has_value()) return std::nullopt;
  // As with a coordinator, triggers that were raised with the same words are the same trigger.
  MutexLock lock(&mu_);
  std::erase_if(raised_, [&](const Trigger& trigger) {
    return trigger.name == name && trigger.payload == next->payload;
  });
  return next;
}

bool JobTriggers::ShouldStop(int64_t finished) {
  if (stop_.has_value()) return true;
  if (options_.stop_on_sigterm && !watch_signal_) {
    StopSignal::Install();
    watch_signal_ = true;
  }
  stop_ = Check(kStop, finished);
  return stop_.has_value();
}

}  // namespace muster
