#ifndef MUSTER_RPC_SESSION_DURATION_H_
#define MUSTER_RPC_SESSION_DURATION_H_

#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"

namespace muster::rpc {

// Accepts any values: those beyond absl's range become infinite.
absl::Duration FromProto(const google::protobuf::Duration& duration);
google::protobuf::Duration ToProto(absl::Duration duration);

// The least time that a call which is sent again still gets. Callers give up at least 5 s after
// their timeout: this is less, so that they hear the verdict.
inline constexpr absl::Duration kLeastRest = absl::Seconds(3);

// Returns what is left of `timeout` for a call that is sent again after it has `waited`, as its
// message says. At least `least`, or `timeout` if that is less, because what it waits for may be on
// its way back as well.
absl::Duration RestOf(absl::Duration timeout, const google::protobuf::Duration& waited,
                      absl::Duration least = kLeastRest);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_SESSION_DURATION_H_
