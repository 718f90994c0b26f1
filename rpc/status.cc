#include "rpc/status.h"

#include <algorithm>
#include <string>

#include "absl/strings/cord.h"
#include "base/log.h"
#include "base/text.h"
#include "rpc/session/duration.h"

namespace muster::rpc {
namespace {

constexpr size_t kMaxMessageBytes = 2048;
constexpr size_t kMaxDetailBytes = 4096;

absl::Status FromParts(int code, absl::string_view message, const v1::ErrorDetail* detail) {
  if (code == 0) return absl::OkStatus();
  // A peer may send a number that is no code.
  if (code < 0 || code > static_cast<int>(absl::StatusCode::kUnauthenticated)) {
    code = static_cast<int>(absl::StatusCode::kUnknown);
  }
  absl::Status status(static_cast<absl::StatusCode>(code), message);
  return detail == nullptr ? status : WithDetail(std::move(status), *detail);
}

// The bytes that one byte takes in the trailer: gRPC writes whatever is not plain text as %XX.
size_t EncodedBytes(char c) { return c >= ' ' && c <= '~' && c != '%' ? 1 : 3; }

std::string FitMessage(absl::string_view message) {
  size_t bytes = 0, fits = 0;  // fits: how many leave room for the dots
  for (size_t i = 0; i < message.size(); ++i) {
    bytes += EncodedBytes(message[i]);
    if (bytes + 3 <= kMaxMessageBytes) fits = i + 1;
    if (bytes > kMaxMessageBytes) {
      return std::string(Utf8Prefix(message, fits)) + "...";
    }
  }
  return std::string(message);
}

std::string FitDetail(v1::ErrorDetail detail) {
  if (detail.ByteSizeLong() <= kMaxDetailBytes) return detail.SerializeAsString();
  for (v1::Culprit& culprit : *detail.mutable_culprits()) culprit.clear_native_stack();
  while (detail.ByteSizeLong() > kMaxDetailBytes && detail.culprits_size() > 1) {
    const int keep = detail.culprits_size() / 2;
    detail.mutable_culprits()->DeleteSubrange(keep, detail.culprits_size() - keep);
  }
  while (detail.ByteSizeLong() > kMaxDetailBytes && detail.missing_ranks_size() > 0) {
    detail.mutable_missing_ranks()->Truncate(detail.missing_ranks_size() / 2);
  }
  if (detail.ByteSizeLong() > kMaxDetailBytes) {
    detail.clear_culprits();
    detail.clear_field();
    detail.clear_barrier_id();
  }
  return detail.SerializeAsString();
}

}  // namespace

absl::Status WithDetail(absl::Status status, const v1::ErrorDetail& detail) {
  if (!status.ok()) status.SetPayload(kErrorDetailUrl, absl::Cord(detail.SerializeAsString()));
  return status;
}

absl::Status ErrorWithReason(absl::StatusCode code, absl::string_view message,
                             v1::ErrorReason reason, bool retryable) {
  v1::ErrorDetail detail;
  detail.set_reason(reason);
  detail.set_retryable(retryable);
  return WithDetail(absl::Status(code, message), detail);
}

std::optional<v1::ErrorDetail> GetDetail(const absl::Status& status) {
  const absl::optional<absl::Cord> payload = status.GetPayload(kErrorDetailUrl);
  if (!payload.has_value()) return std::nullopt;
  v1::ErrorDetail detail;
  if (!detail.ParseFromString(std::string(*payload))) return std::nullopt;
  return detail;
}

v1::ErrorReason GetReason(const absl::Status& status) {
  const std::optional<v1::ErrorDetail> detail = GetDetail(status);
  return detail.has_value() ? detail->reason() : v1::ERROR_REASON_UNSPECIFIED;
}

absl::Duration RetryAfter(const absl::Status& status) {
  const std::optional<v1::ErrorDetail> detail = GetDetail(status);
  if (!detail.has_value()) return absl::ZeroDuration();
  return std::clamp(FromProto(detail->retry_after()), absl::ZeroDuration(),
                    absl::Duration(absl::Minutes(1)));
}

bool IsLost(const absl::Status& status) {
  return status.code() == absl::StatusCode::kUnavailable ||
         (status.code() == absl::StatusCode::kCancelled &&
          GetReason(status) == v1::ERROR_REASON_UNSPECIFIED);
}

v1::BarrierState BarrierVerdict(v1::ErrorReason reason) {
  switch (reason) {
    case v1::ERROR_REASON_BARRIER_TIMEOUT:
      return v1::BARRIER_STATE_TIMED_OUT;
    case v1::ERROR_REASON_RANK_FAILED:
      return v1::BARRIER_STATE_FAILED;
    case v1::ERROR_REASON_CANCELLED_BY_PEER:
      return v1::BARRIER_STATE_CANCELLED;
    case v1::ERROR_REASON_DESYNC:
      return v1::BARRIER_STATE_DESYNC;
    case v1::ERROR_REASON_RESULT_TOO_LARGE:  // its payloads do not fit a message
      return v1::BARRIER_STATE_PASSED;
    default:
      return v1::BARRIER_STATE_UNSPECIFIED;
  }
}

grpc::Status ToGrpc(const absl::Status& status) {
  if (status.ok()) return grpc::Status::OK;
  const std::optional<v1::ErrorDetail> detail = GetDetail(status);
  return grpc::Status(static_cast<grpc::StatusCode>(status.code()), FitMessage(status.message()),
                      detail.has_value() ? FitDetail(*detail) : std::string());
}

absl::Status FromGrpc(const grpc::Status& status) {
  v1::ErrorDetail detail;
  const bool has_detail =
      !status.error_details().empty() && detail.ParseFromString(status.error_details());
  return FromParts(static_cast<int>(status.error_code()), status.error_message(),
                   has_detail ? &detail : nullptr);
}

v1::OpError ToOpError(const absl::Status& status) {
  v1::OpError error;
  error.set_code(static_cast<int>(status.code()));
  // Messages quote texts of other programs, but a frame takes only UTF-8.
  error.set_message(IsValidUtf8(status.message()) ? std::string(status.message())
                                                  : OneLine(status.message()));
  if (std::optional<v1::ErrorDetail> detail = GetDetail(status))
    *error.mutable_detail() = *std::move(detail);
  return error;
}

absl::Status FromOpError(const v1::OpError& error) {
  // An OpError means that the operation failed, even if its code is 0.
  const int code = error.code() == 0 ? static_cast<int>(absl::StatusCode::kUnknown) : error.code();
  return FromParts(code, error.message(), error.has_detail() ? &error.detail() : nullptr);
}

grpc::Status OpErrorToGrpc(const v1::OpError& error) { return ToGrpc(FromOpError(error)); }

}  // namespace muster::rpc
