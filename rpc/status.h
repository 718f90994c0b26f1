#ifndef MUSTER_RPC_STATUS_H_
#define MUSTER_RPC_STATUS_H_

#include <grpcpp/support/status.h>

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "proto/muster/v1/barrier.pb.h"
#include "proto/muster/v1/error.pb.h"

namespace muster::rpc {

// The only place that converts an absl::Status to a gRPC status or an OpError, and back. Codes map
// one to one. A v1::ErrorDetail travels as a payload of the absl::Status, as the binary details of
// the gRPC status, and as a field of the OpError. All functions are thread-safe and do not block.

// The payload key under which an absl::Status carries a serialized v1::ErrorDetail.
inline constexpr absl::string_view kErrorDetailUrl = "type.googleapis.com/muster.v1.ErrorDetail";

// Returns `status` with `detail` added. An OK status is returned as it is.
absl::Status WithDetail(absl::Status status, const v1::ErrorDetail& detail);

// Returns a status of `code` with `message` and a detail that has only a reason and whether to
// retry.
absl::Status ErrorWithReason(absl::StatusCode code, absl::string_view message,
                             v1::ErrorReason reason, bool retryable = false);

// Returns the detail in `status`; nullopt if it has none (or bytes that are not an ErrorDetail).
std::optional<v1::ErrorDetail> GetDetail(const absl::Status& status);

// Returns the reason in `status`; ERROR_REASON_UNSPECIFIED if it has none.
v1::ErrorReason GetReason(const absl::Status& status);

// Returns how long `status` asks its caller to wait before the call is repeated, cut at a minute;
// 0: it does not ask.
absl::Duration RetryAfter(const absl::Status& status);

// Returns whether `status`, of a call that its caller did not cancel, says that the call got lost,
// rather than its outcome: UNAVAILABLE, or the bare CANCELLED with which gRPC's server drops the
// calls that reach it while it stops.
bool IsLost(const absl::Status& status);

// Returns how a barrier ended whose error has this reason; UNSPECIFIED: the error says nothing
// about the instance.
v1::BarrierState BarrierVerdict(v1::ErrorReason reason);

// Converts to a gRPC status. Trailers over 8 KiB break peers, so the message is cut at 2 KiB (as
// gRPC encodes it), and a larger detail loses first its stacks, then its longest lists from the
// end, until it fits 4 KiB: Barrier.Describe returns the whole report.
grpc::Status ToGrpc(const absl::Status& status);
absl::Status FromGrpc(const grpc::Status& status);

// Converts to an OpError. Frames have room, so nothing is cut.
v1::OpError ToOpError(const absl::Status& status);
// Converts an OpError. Never returns OK: numbers that are not the code of an error become UNKNOWN.
absl::Status FromOpError(const v1::OpError& error);

// Returns ToGrpc(FromOpError(error)).
grpc::Status OpErrorToGrpc(const v1::OpError& error);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_STATUS_H_
