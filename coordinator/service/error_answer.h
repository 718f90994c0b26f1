#ifndef MUSTER_COORDINATOR_SERVICE_ERROR_ANSWER_H_
#define MUSTER_COORDINATOR_SERVICE_ERROR_ANSWER_H_

#include <memory>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "coordinator/answer.h"
#include "proto/muster/v1/error.pb.h"

namespace muster::coordinator {

// Answers that the service gives in place of the core, made once for many calls.
std::shared_ptr<const Answer> ErrorAnswer(absl::StatusCode code, absl::string_view message,
                                          v1::ErrorReason reason, bool retryable);
// UNAVAILABLE / OVERLOADED, to be tried again soon.
std::shared_ptr<const Answer> OverloadedAnswer(absl::string_view message);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_SERVICE_ERROR_ANSWER_H_
