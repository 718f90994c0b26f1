#include "agent/agents_job.h"

#include <algorithm>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "agent/coordination_values.h"
#include "base/clock.h"
#include "base/defaults.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "rpc/session/duration.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

constexpr absl::Duration kShortCall = absl::Seconds(5);
constexpr char kFinish[] = "finish";
constexpr char kFinished[] = "finished";

absl::StatusOr<v1::OpResult> ErrorOr(v1::OpResult result) {
  if (result.has_error()) return rpc::FromOpError(result.error());
  return result;
}

// Returns what the key "end" says, if PutUnless has found it.
std::optional<AttemptEnd> EndThatWasFound(const v1::TxnReply& reply) {
  if (reply.succeeded() || reply.results_size() != 1 || reply.results(0).kvs_size() != 1) {
    return std::nullopt;
  }
  return EndFromValue(reply.results(0).kvs(0).value());
}

}  // namespace

AgentsJob::AgentsJob(const Options& options, OpSender* sender,
                     std::shared_ptr<AttemptState> attempt)
    : coordinator_(options.coordinator),
      name_(options.job + kAgentsSuffix),
      worker_id_(options.worker_id),
      incarnation_(options.incarnation),
      sender_(sender),
      attempt_(std::move(attempt)) {}

void AgentsJob::Sit(const v1::JoinReply& reply) {
  generation_ = reply.generation();
  prefix_ = reply.generation_prefix();
}

v1::Fence AgentsJob::Fence() {
  v1::Fence fence;
  fence.set_job_id(name_);
  fence.set_worker_id(worker_id_);
  fence.set_incarnation(incarnation_);
  fence.set_generation(generation_);
  fence.set_request_id(++last_request_);
  return fence;
}

std::string AgentsJob::CountKey(int rank) const { return absl::StrCat(prefix_, "count/", rank); }

v1::Op AgentsJob::Put(const std::string& key, const std::string& value) {
  v1::Op op;
  *op.mutable_txn()->mutable_fence() = Fence();
  v1::PutOp* const put = op.mutable_txn()->add_then()->mutable_put();
  put->set_key(key);
  put->set_value(value);
  return op;
}

v1::Op AgentsJob::Wait(const std::vector<std::string>& keys, absl::Duration timeout) {
  v1::Op op;
  *op.mutable_wait()->mutable_fence() = Fence();
  for (const std::string& key : keys) op.mutable_wait()->add_keys(key);
  *op.mutable_wait()->mutable_timeout() = rpc::ToProto(timeout);
  return op;
}

v1::Op AgentsJob::PutUnless(const std::vector<std::string>& absent, const std::string& key,
                            const std::string& value) {
  v1::Op op = Put(key, value);
  for (const std::string& one : absent) {
    v1::Compare* const compare = op.mutable_txn()->add_compares();
    compare->set_key(one);
    compare->set_target(v1::Compare::EXISTS);
    compare->set_number(0);
  }
  op.mutable_txn()->add_otherwise()->mutable_get()->set_key(EndKey());
  return op;
}

AgentsJob::Pending AgentsJob::Submit(v1::Op op) {
  Pending pending;
  pending.op_id = sender_->Submit(
      std::move(op), [attempt = attempt_, answer = pending.answer](const v1::OpResult& result) {
        attempt->Deliver(result, answer.get());
      });
  return pending;
}

absl::Status AgentsJob::NoAnswer(absl::Duration timeout) const {
  return absl::UnavailableError(absl::StrCat("no answer from the coordinator at ", coordinator_,
                                             " within ", absl::FormatDuration(timeout)));
}

absl::StatusOr<v1::OpResult> AgentsJob::Call(v1::Op op, absl::Duration timeout, Until until,
                                             Late late) {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  const Pending pending = Submit(std::move(op));
  absl::StatusOr<v1::OpResult> result = attempt_->Await(pending.answer.get(), deadline, until);
  if (result.ok()) return ErrorOr(*std::move(result));
  if (late == Late::kForgotten) sender_->Forget(pending.op_id);
  return absl::IsDeadlineExceeded(result.status()) ? NoAnswer(timeout) : result.status();
}

std::optional<absl::StatusOr<v1::OpResult>> AgentsJob::CallUnless(const std::function<bool()>& stop,
                                                                  absl::Duration period, v1::Op op,
                                                                  absl::Duration timeout) {
  const absl::Time deadline = Clock::Real().Now() + timeout;
  const Pending pending = Submit(std::move(op));
  while (true) {
    const absl::Time now = Clock::Real().Now();
    absl::StatusOr<v1::OpResult> result =
        attempt_->Await(pending.answer.get(), std::min(deadline, now + period), Until::kCancelled);
    if (result.ok()) return ErrorOr(*std::move(result));
    const bool timed_out = absl::IsDeadlineExceeded(result.status());
    const bool stopped = timed_out && stop();
    if (timed_out && !stopped && now < deadline) continue;
    sender_->Forget(pending.op_id);
    if (stopped) return std::nullopt;
    return timed_out ? NoAnswer(timeout) : result.status();
  }
}

absl::StatusOr<std::vector<v1::Member>> AgentsJob::Machines(Until until) {
  std::vector<v1::Member> members;
  int32_t first = 0, next = 0;
  do {
    first = next;
    v1::Op op;
    op.mutable_get_members()->set_job_id(name_);
    op.mutable_get_members()->set_first(first);
    MUSTER_ASSIGN_OR_RETURN(const v1::OpResult result, Call(std::move(op), kShortCall, until));
    const v1::GetMembersReply& reply = result.get_members();
    members.insert(members.end(), reply.members().begin(), reply.members().end());
    next = reply.next();
  } while (next > first);
  return members;
}

absl::StatusOr<std::vector<std::string>> AgentsJob::AllSettings() {
  v1::Op op;
  op.mutable_txn()->mutable_fence()->set_job_id(name_);
  v1::GetOp* const get = op.mutable_txn()->add_then()->mutable_get();
  get->set_key("gen/");
  get->set_prefix(true);
  MUSTER_ASSIGN_OR_RETURN(const v1::OpResult result,
                          Call(std::move(op), kShortCall, Until::kCancelled));
  std::vector<std::string> all;
  if (result.txn().results_size() != 1) return all;
  for (const v1::KeyValue& kv : result.txn().results(0).kvs()) {
    if (absl::EndsWith(kv.key(), "/settings")) all.push_back(kv.value());
  }
  return all;
}

std::optional<std::string> AgentsJob::Finished() {
  v1::Op op;
  op.mutable_txn()->mutable_fence()->set_job_id(name_);
  op.mutable_txn()->add_then()->mutable_get()->set_key(kFinished);
  const absl::StatusOr<v1::OpResult> result = Call(std::move(op), kShortCall, Until::kCancelled);
  if (absl::IsNotFound(result.status())) return "";
  if (!result.ok() || result->txn().results_size() != 1) return std::nullopt;
  const v1::KvOpResult& got = result->txn().results(0);
  return got.kvs_size() == 1 ? got.kvs(0).value() : "";
}

void AgentsJob::WriteFinished() {
  // The coordinator may end as soon as its own machine is done.
  const absl::StatusOr<v1::OpResult> result =
      Call(Put(kFinished, prefix_), absl::Seconds(1), Until::kAnswered);
  if (!result.ok()) {
    MUSTER_LOG(Debug) << "cannot tell waiting machines that the job is done: "
                      << result.status().message();
  }
}

absl::Status AgentsJob::AwaitAll(int rank) {
  v1::Op op;
  v1::ArriveRequest& request = *op.mutable_arrive();
  *request.mutable_fence() = Fence();
  request.set_barrier_id(kFinish);
  request.set_counter(0);
  request.set_rank(rank);
  // The payload is not empty, so that the coordinator journals that the barrier passed: see
  // AllHavePassed.
  request.set_payload("done");
  // The slowest machine may take any time.
  *request.mutable_timeout() = rpc::ToProto(absl::Seconds(-1));
  return Call(std::move(op), absl::InfiniteDuration(), Until::kEnded).status();
}

bool AgentsJob::AllHavePassed() {
  v1::Op describe;
  describe.mutable_describe_barrier()->set_job_id(name_);
  describe.mutable_describe_barrier()->set_barrier_id(kFinish);
  const absl::StatusOr<v1::OpResult> described =
      Call(std::move(describe), kShortCall, Until::kCancelled);
  return described.ok() &&
         described->describe_barrier().report().state() == v1::BARRIER_STATE_PASSED;
}

absl::Status AgentsJob::WriteDone() {
  MUSTER_ASSIGN_OR_RETURN(const v1::OpResult result, Call(PutUnless({EndKey()}, DoneKey(), "1"),
                                                          absl::InfiniteDuration(), Until::kEnded));
  if (result.txn().succeeded()) return absl::OkStatus();
  if (std::optional<AttemptEnd> end = EndThatWasFound(result.txn())) {
    attempt_->End(*std::move(end));
  }
  return absl::AbortedError("the attempt has ended");
}

absl::StatusOr<AttemptEnd> AgentsJob::WriteEnd(const AttemptEnd& end, absl::Duration timeout) {
  MUSTER_ASSIGN_OR_RETURN(const v1::OpResult result,
                          Call(PutUnless({EndKey()}, EndKey(), EndToValue(end)), timeout,
                               Until::kAnswered, Late::kHeld));
  return EndThatWasFound(result.txn()).value_or(end);
}

bool AgentsJob::WriteEndUnlessDone(const AttemptEnd& end) {
  const absl::StatusOr<v1::OpResult> result =
      Call(PutUnless({EndKey(), DoneKey()}, EndKey(), EndToValue(end)), kShortCall, Until::kEnded);
  return result.ok() && result->txn().succeeded();
}

void AgentsJob::EndGeneration(absl::string_view reason, absl::Duration timeout, Until until) {
  v1::Op op;
  *op.mutable_end_generation()->mutable_fence() = Fence();
  op.mutable_end_generation()->set_reason(OneLine(reason));
  // Another machine may have ended it already.
  Call(std::move(op), timeout, until, Late::kHeld).IgnoreError();
}

void AgentsJob::Leave(absl::Duration timeout) {
  v1::Op op;
  *op.mutable_leave()->mutable_fence() = Fence();
  op.mutable_leave()->set_reason("the agent ends");
  Call(std::move(op), timeout, Until::kAnswered, Late::kHeld).IgnoreError();
}

}  // namespace muster::agent
