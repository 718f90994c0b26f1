#include "coordinator/service/error_answer.h"

#include <string>
#include <utility>

#include "coordinator/errors.h"
#include "proto/muster/v1/session.pb.h"
#include "rpc/status.h"

namespace muster::coordinator {

std::shared_ptr<const Answer> ErrorAnswer(absl::StatusCode code, absl::string_view message,
                                          v1::ErrorReason reason, bool retryable) {
  v1::OpResult result;
  *result.mutable_error() = rpc::ToOpError(rpc::ErrorWithReason(code, message, reason, retryable));
  return std::make_shared<Answer>(result);
}

std::shared_ptr<const Answer> OverloadedAnswer(absl::string_view message) {
  v1::OpError error =
      MakeError(absl::StatusCode::kUnavailable, v1::ERROR_REASON_OVERLOADED, std::string(message));
  *error.mutable_detail()->mutable_retry_after() = ToProto(absl::Milliseconds(100));
  v1::OpResult result;
  *result.mutable_error() = std::move(error);
  return std::make_shared<Answer>(result);
}

}  // namespace muster::coordinator
