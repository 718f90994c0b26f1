#include "coordinator/errors.h"

#include <utility>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/time/time.h"
#include "base/text.h"

namespace muster::coordinator {

v1::OpError MakeError(absl::StatusCode code, v1::ErrorReason reason, std::string message) {
  v1::OpError error;
  error.set_code(static_cast<int>(code));
  error.set_message(std::move(message));
  error.mutable_detail()->set_reason(reason);
  error.mutable_detail()->set_retryable(
      reason == v1::ERROR_REASON_STARTING || reason == v1::ERROR_REASON_STOPPING ||
      reason == v1::ERROR_REASON_OVERLOADED || reason == v1::ERROR_REASON_JOURNAL_FAILED);
  return error;
}

v1::OpError BadField(absl::string_view field, std::string message) {
  v1::OpError error =
      MakeError(absl::StatusCode::kInvalidArgument, v1::ERROR_REASON_BAD_FIELD, std::move(message));
  error.mutable_detail()->set_field(field.data(), field.size());
  return error;
}

v1::OpError TooLarge(absl::string_view field, std::string message) {
  v1::OpError error =
      MakeError(absl::StatusCode::kInvalidArgument, v1::ERROR_REASON_LIMIT, std::move(message));
  error.mutable_detail()->set_field(field.data(), field.size());
  return error;
}

std::string Quoted(absl::string_view name) {
  constexpr size_t kMax = 80;
  const bool cut = name.size() > kMax;
  return absl::StrCat("\"", absl::CHexEscape(name.substr(0, kMax)), cut ? "..." : "", "\"");
}

std::string Cut(absl::string_view text, size_t max) { return std::string(Utf8Prefix(text, max)); }

std::string CulpritText(const v1::Culprit& culprit) {
  std::string text = culprit.rank() >= 0 ? absl::StrCat("rank ", culprit.rank(), " (") : "worker (";
  absl::StrAppend(&text,
                  culprit.worker_id().empty() ? "unknown" : absl::CHexEscape(culprit.worker_id()));
  if (!culprit.host().empty()) absl::StrAppend(&text, " on ", absl::CHexEscape(culprit.host()));
  if (culprit.pid() > 0) absl::StrAppend(&text, ", pid ", culprit.pid());
  if (!culprit.process_state().empty())
    absl::StrAppend(&text, ", ", absl::CHexEscape(culprit.process_state()));
  if (culprit.last_step() > 0) absl::StrAppend(&text, ", step ", culprit.last_step());
  if (!culprit.last_collective().empty()) {
    absl::StrAppend(&text, ", last collective ", absl::CHexEscape(culprit.last_collective()));
  }
  if (!culprit.waiting_in().empty()) absl::StrAppend(&text, ", waits in ", culprit.waiting_in());
  if (culprit.has_heartbeat_age()) {
    absl::StrAppend(&text, ", last heard of ",
                    absl::FormatDuration(
                        absl::Trunc(FromProto(culprit.heartbeat_age()), absl::Milliseconds(1))),
                    " ago");
  }
  return text + ")";
}

}  // namespace muster::coordinator
