#include "coordinator/service/open_calls.h"

#include <utility>

#include "absl/strings/str_cat.h"
#include "coordinator/errors.h"
#include "coordinator/service/error_answer.h"
#include "coordinator/service/op_kinds.h"

namespace muster::coordinator {
namespace {

// ReplyHeader.revision of an answer: the header is field 1 of every reply.
uint64_t RevisionOf(const Answer& answer) {
  const v1::OpResult result = answer.Parse();
  const auto* const kind =
      v1::OpResult::descriptor()->FindFieldByNumber(static_cast<int>(result.kind_case()));
  if (kind == nullptr) return 0;
  const google::protobuf::Message& reply = result.GetReflection()->GetMessage(result, kind);
  const auto* const header = reply.GetDescriptor()->FindFieldByName("header");
  if (header == nullptr) return 0;
  return static_cast<const v1::ReplyHeader&>(reply.GetReflection()->GetMessage(reply, header))
      .revision();
}

// Returns the error without the texts that make it large.
v1::OpResult ShortError(const Answer& answer, size_t max_bytes) {
  v1::OpResult result = answer.Parse();
  v1::ErrorDetail& detail = *result.mutable_error()->mutable_detail();
  for (v1::Culprit& culprit : *detail.mutable_culprits()) culprit.clear_native_stack();
  if (result.ByteSizeLong() > max_bytes) {
    detail.clear_culprits();
    detail.clear_missing_ranks();
  }
  return result;
}

}  // namespace

OpenCalls::OpenCalls(const RunnerLimits& limits)
    : limits_(limits),
      too_many_calls_(TooManyCalls()),
      too_many_bytes_(OverloadedAnswer("the calls that are waiting for an answer hold too many "
                                       "bytes: nothing was done; send smaller "
                                       "payloads and fewer keys at a time, or try again later")) {}

std::shared_ptr<const Answer> OpenCalls::TooManyCalls() {
  return OverloadedAnswer(
      "too many calls are waiting for an answer: nothing was done; try again later");
}

void OpenCalls::Add(CallId id, const v1::Op& op, OpenCall call, absl::Time now) {
  call.kind = op.kind_case();
  call.changes = MayChange(op);
  call.begun = now;
  call.bytes = HeldBytes(op, call.bytes);
  held_bytes_[call.session != nullptr ? 1 : 0].fetch_add(call.bytes, std::memory_order_relaxed);
  if (call.session != nullptr) {
    call.session->calls.insert(id);
    call.session->held_bytes += call.bytes;
  }
  calls_.emplace(id, std::move(call));
  size_.fetch_add(1, std::memory_order_relaxed);
}

std::shared_ptr<const Answer> OpenCalls::Refusal(CallId id, const v1::Op& op) const {
  const OpenCall& call = calls_.at(id);
  const AttachedAgent* const session = call.session.get();
  if (calls_.size() > limits_.calls ||
      (session != nullptr && session->calls.size() > limits_.calls_of_agent)) {
    return too_many_calls_;
  }
  if (!MayBeHeld(op)) return nullptr;
  const size_t share = call.bytes <= kSmallCall ? 2 : 1;  // so that large calls stop no rendezvous
  const bool too_many = session == nullptr
                            ? held_bytes(false) > share * limits_.held_bytes_of_callers
                            : held_bytes(true) > share * limits_.held_bytes_of_agents ||
                                  session->held_bytes > share * limits_.held_bytes_of_agent;
  return too_many ? too_many_bytes_ : nullptr;
}

std::optional<OpenCall> OpenCalls::Remove(CallId id) {
  const auto it = calls_.find(id);
  if (it == calls_.end()) return std::nullopt;
  OpenCall call = std::move(it->second);
  calls_.erase(it);
  size_.fetch_sub(1, std::memory_order_relaxed);
  held_bytes_[call.session != nullptr ? 1 : 0].fetch_sub(call.bytes, std::memory_order_relaxed);
  if (call.session != nullptr) {
    call.session->held_bytes -= call.bytes;
    call.session->calls.erase(id);
  }
  return call;
}

void OpenCalls::Answered(const OpenCall& call, absl::Time now) {
  if (call.kind < kOpKinds) seconds_[call.kind].Observe(now - call.begun);
}

std::shared_ptr<const Answer> OpenCalls::Fit(const OpenCall& call,
                                             std::shared_ptr<const Answer> answer) const {
  const size_t bytes = answer->bytes().size();
  if (bytes <= limits_.answer_bytes) return answer;
  v1::OpResult result;
  if (answer->kind() == v1::OpResult::KIND_NOT_SET) {
    // The failure is still reported, with fewer culprits.
    result = ShortError(*answer, limits_.answer_bytes);
  } else if (call.changes) {
    const uint64_t revision = RevisionOf(*answer);
    *result.mutable_error() = MakeError(
        absl::StatusCode::kOutOfRange, v1::ERROR_REASON_RESULT_TOO_LARGE,
        absl::StrCat("the operation was done (by revision ", revision, "), but its answer has ",
                     bytes, " bytes, more than the ", limits_.answer_bytes,
                     " that one message may have: do not repeat it; read its results in parts"));
    result.mutable_error()->mutable_detail()->set_revision(revision);
  } else {
    *result.mutable_error() = TooLarge(
        "", absl::StrCat("the answer has ", bytes, " bytes, more than the ", limits_.answer_bytes,
                         " that one message may have: ask for less at a time"));
  }
  return std::make_shared<Answer>(result);
}

std::vector<CallId> OpenCalls::Ids() const {
  std::vector<CallId> ids;
  ids.reserve(calls_.size());
  for (const auto& [id, call] : calls_) ids.push_back(id);
  return ids;
}

}  // namespace muster::coordinator
