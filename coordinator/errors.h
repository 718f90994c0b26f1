#ifndef MUSTER_COORDINATOR_ERRORS_H_
#define MUSTER_COORDINATOR_ERRORS_H_

#include <cstddef>
#include <string>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "proto/muster/v1/error.pb.h"
#include "rpc/session/duration.h"

namespace muster::coordinator {

// Returns an error with its reason; `retryable` follows from the reason. `message` is one line that
// names the thing at fault and the way out.
v1::OpError MakeError(absl::StatusCode code, v1::ErrorReason reason, std::string message);

// INVALID_ARGUMENT / BAD_FIELD: `field` of the request is at fault.
v1::OpError BadField(absl::string_view field, std::string message);
// INVALID_ARGUMENT / LIMIT: `field` is too large.
v1::OpError TooLarge(absl::string_view field, std::string message);

using rpc::FromProto;
using rpc::kLeastRest;
using rpc::RestOf;
using rpc::ToProto;

// "barrier" -> "\"barrier\"", cut at 80 bytes, non-printing bytes escaped: for names in messages.
std::string Quoted(absl::string_view name);

// Returns at most `max` bytes of `text`, whole UTF-8 characters only: half a character would make
// the message unreadable.
std::string Cut(absl::string_view text, size_t max);

// "rank 3 (w3 on host7, pid 4711, stopped, step 41, last heard of 3.1s ago)", as far as known.
std::string CulpritText(const v1::Culprit& culprit);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_ERRORS_H_
