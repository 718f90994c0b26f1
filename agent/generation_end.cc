#include "agent/generation_end.h"

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/text.h"
#include "rpc/status.h"

namespace muster::agent {
namespace {

struct CauseWords {
  AttemptEnd::Cause cause;
  v1::EndClass end_class;  // as returned by ClassOf
  const char* words;
};
constexpr CauseWords kCauseWords[] = {
    {AttemptEnd::Cause::kFailed, v1::END_CLASS_PROCESS_FAILED,
     "another attempt begins after a failure: "},
    {AttemptEnd::Cause::kFailed, v1::END_CLASS_OUT_OF_MEMORY,
     "another attempt begins after a process ran out of memory: "},
    {AttemptEnd::Cause::kFailed, v1::END_CLASS_HANG, "another attempt begins after a hang: "},
    {AttemptEnd::Cause::kMachineLost, v1::END_CLASS_NODE_LOST,
     "another attempt begins after a loss: "},
    {AttemptEnd::Cause::kMachineLeft, v1::END_CLASS_UNSPECIFIED,
     "another attempt begins after a machine has left: "},
    {AttemptEnd::Cause::kMachineCame, v1::END_CLASS_UNSPECIFIED,
     "another attempt begins because a machine has come: "},
};
constexpr char kJoinNext[] = "; join the next one";  // added by the coordinator for waiting calls

std::optional<AttemptEnd> EndFromReason(const std::string& reason) {
  for (const CauseWords& one : kCauseWords) {
    const size_t at = reason.find(one.words);
    if (at == std::string::npos) continue;
    AttemptEnd end;
    end.cause = one.cause;
    if (one.cause == AttemptEnd::Cause::kFailed) end.end_class = one.end_class;
    end.why = reason.substr(at + std::string(one.words).size());
    if (absl::EndsWith(end.why, kJoinNext)) end.why.resize(end.why.size() - sizeof(kJoinNext) + 1);
    return end;
  }
  return std::nullopt;
}

// The ranks of the agents' job are machines: "rank 1" would be taken for a process, perhaps a
// living one.
std::string WithMachines(std::string why) {
  const std::string rank_word = "rank ";
  const size_t begin = why.find(rank_word), end = why.find(" (node", begin);
  if (begin == std::string::npos || end == std::string::npos) return why;
  const size_t digits = begin + rank_word.size();
  if (digits < end && IsDigits(absl::string_view(why).substr(digits, end - digits))) {
    why.replace(begin, rank_word.size(), "machine ");
  }
  return why;
}

}  // namespace

std::string AnotherBegins(const AttemptEnd& end) {
  for (const CauseWords& one : kCauseWords) {
    if (one.cause == end.cause && one.end_class == ClassOf(end))
      return absl::StrCat(one.words, end.why);
  }
  return "another attempt begins";
}

AttemptEnd EndOfGeneration(bool elastic, std::string why, bool has_culprit) {
  if (!has_culprit) {
    if (std::optional<AttemptEnd> end = EndFromReason(why)) return *std::move(end);
  }
  if (has_culprit) why = WithMachines(std::move(why));
  return {elastic && has_culprit ? absl::StrCat("a machine is lost: ", why) : why,
          {},
          !elastic      ? AttemptEnd::Cause::kFailed
          : has_culprit ? AttemptEnd::Cause::kMachineLost
                        : AttemptEnd::Cause::kMachineLeft};
}

std::optional<AttemptEnd> EndOfRefused(bool elastic, const absl::Status& status) {
  const v1::ErrorReason reason = rpc::GetReason(status);
  if (reason == v1::ERROR_REASON_GENERATION_ENDED) {
    return EndOfGeneration(elastic, std::string(status.message()), HasCulprit(status));
  }
  if (elastic && IsCutOff(reason)) {
    return AttemptEnd{absl::StrCat("this machine was cut off from the others: ", status.message()),
                      {},
                      AttemptEnd::Cause::kMachineLost};
  }
  return std::nullopt;
}

bool IsCutOff(v1::ErrorReason reason) {
  return reason == v1::ERROR_REASON_STALE_GENERATION || reason == v1::ERROR_REASON_NOT_MEMBER ||
         reason == v1::ERROR_REASON_LEASE_EXPIRED;
}

bool HasCulprit(const absl::Status& status) {
  const std::optional<v1::ErrorDetail> detail = rpc::GetDetail(status);
  return detail.has_value() && detail->culprits_size() > 0;
}

std::string OfMachines(absl::string_view refusal) {
  return absl::StrReplaceAll(refusal, {{"missing: rank ", "missing: machine "},
                                       {", rank ", ", machine "},
                                       {"missing workers or lower min_workers", "missing machines"},
                                       {" workers", " machines"}});
}

}  // namespace muster::agent
