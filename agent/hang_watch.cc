#include "agent/hang_watch.h"

#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

constexpr absl::Duration kCallTimeout = absl::Seconds(10);
constexpr absl::Duration kStackTimeout = absl::Seconds(5);  // for a page of ranks
constexpr absl::Duration kAllStacks = absl::Seconds(30);
constexpr int kStarts = 4;  // for a list that changes while it is read

}  // namespace

std::unique_ptr<HangWatch> HangWatch::Start(Options options) {
  std::unique_ptr<HangWatch> watch(new HangWatch(std::move(options)));
  watch->thread_ = std::thread([raw = watch.get()] { raw->Loop(); });
  return watch;
}

HangWatch::~HangWatch() {
  {
    MutexLock lock(&shared_->mu);
    shared_->stop = true;
    shared_->changed.SignalAll();
  }
  thread_.join();
}

bool HangWatch::Wait(absl::Duration time) {
  const absl::Time deadline = Clock::Real().Now() + time;
  MutexLock lock(&shared_->mu);
  while (!shared_->stop) {
    const absl::Duration left = deadline - Clock::Real().Now();
    if (left <= absl::ZeroDuration()) return true;
    shared_->changed.WaitWithTimeout(&shared_->mu, left);
  }
  return false;
}

absl::StatusOr<v1::OpResult> HangWatch::Call(v1::Op op, absl::Duration timeout) {
  // Guarded by the lock of Shared.
  auto answer = std::make_shared<std::optional<v1::OpResult>>();
  const uint64_t op_id = options_.sender->Submit(
      std::move(op), [shared = shared_, answer](const v1::OpResult& result) {
        MutexLock lock(&shared->mu);
        *answer = result;
        shared->changed.SignalAll();
      });
  const absl::Time deadline = Clock::Real().Now() + timeout;
  absl::Status status;
  {
    MutexLock lock(&shared_->mu);
    while (!answer->has_value()) {
      const absl::Duration left = deadline - Clock::Real().Now();
      if (shared_->stop) status = absl::CancelledError("stopped");
      if (status.ok() && left <= absl::ZeroDuration()) status = absl::UnavailableError("no answer");
      if (!status.ok()) break;
      shared_->changed.WaitWithTimeout(&shared_->mu, left);
    }
    if (status.ok()) {
      if ((*answer)->has_error()) return rpc::FromOpError((*answer)->error());
      return **std::move(answer);
    }
  }
  options_.sender->Forget(op_id);
  return status;
}

absl::StatusOr<v1::GetMembersReply> HangWatch::Members() {
  v1::GetMembersReply all;
  int first = 0;
  for (int starts = 0; starts < kStarts;) {
    v1::Op op;
    op.mutable_get_members()->set_job_id(options_.job);
    op.mutable_get_members()->set_first(first);
    MUSTER_ASSIGN_OR_RETURN(const v1::OpResult result, Call(std::move(op), kCallTimeout));
    const v1::GetMembersReply& page = result.get_members();
    if (first > 0 && page.generation() != all.generation()) {
      ++starts;
      first = 0;
      all.Clear();
      continue;
    }
    all.MergeFrom(page);
    first = page.next();
    if (first == 0) return all;
  }
  return absl::UnavailableError("the job changes");
}

std::vector<v1::RankStack> HangWatch::Stacks() {
  std::vector<v1::RankStack> stacks;
  const absl::Time deadline = Clock::Real().Now() + kAllStacks;
  int first = 0;
  do {
    v1::Op op;
    op.mutable_capture_stacks()->set_job_id(options_.job);
    op.mutable_capture_stacks()->set_first(first);
    *op.mutable_capture_stacks()->mutable_timeout() = rpc::ToProto(kStackTimeout);
    const absl::StatusOr<v1::OpResult> result = Call(std::move(op), kStackTimeout + kCallTimeout);
    if (!result.ok()) {
      MUSTER_LOG(Warning) << "no stacks of ranks from " << first
                          << " on: " << result.status().message();
      break;
    }
    const v1::CaptureStacksReply& reply = result->capture_stacks();
    stacks.insert(stacks.end(), reply.stacks().begin(), reply.stacks().end());
    first = reply.next();
  } while (first > 0 && Clock::Real().Now() < deadline);
  return stacks;
}

void HangWatch::Loop() {
  const absl::Duration period =
      options_.period > absl::ZeroDuration() ? options_.period : HangCore::Period(options_.timeout);
  while (Wait(period)) {
    if (!options_.judges()) {
      core_.LookInVain();
      continue;
    }
    const absl::StatusOr<v1::GetMembersReply> members = Members();
    if (!members.ok()) {
      // Also the case as long as no worker has joined.
      core_.LookInVain();
      continue;
    }
    const std::optional<Hang> hang = core_.Look(*members, Clock::Real().Now());
    if (!hang.has_value()) continue;
    HangReport report{*hang, GroupHungRanks(Stacks(), *members, kMaxReportBytes)};
    // Taking the stacks has taken some time.
    const absl::StatusOr<v1::GetMembersReply> now = Members();
    if (now.ok() && core_.StillHangs(*now)) options_.on_hang(std::move(report));
    if (!now.ok()) core_.LookInVain();
  }
}

}  // namespace muster::agent
