#include "coordinator/service/unary_call.h"

#include <chrono>

namespace muster::coordinator {

absl::Status CheckDeadline(const grpc::CallbackServerContext& context) {
  // gRPC says "no deadline" with the end of time.
  if (context.deadline() < std::chrono::system_clock::now() + std::chrono::hours(24 * 365 * 5)) {
    return absl::OkStatus();
  }
  return rpc::ErrorWithReason(absl::StatusCode::kInvalidArgument,
                              "the call has no deadline: set one, so that it cannot wait for ever",
                              v1::ERROR_REASON_DEADLINE_REQUIRED);
}

}  // namespace muster::coordinator
