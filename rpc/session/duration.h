#ifndef MUSTER_RPC_SESSION_DURATION_H_
#define MUSTER_RPC_SESSION_DURATION_H_

#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"

namespace muster::rpc {

// Any bytes are fine: values beyond absl's range become infinite.
absl::Duration FromProto(const google::protobuf::Duration& duration);
google::protobuf::Duration ToProto(absl::Duration duration);

// Less than the 5 s or more after their timeout at which callers give up, so that they hear the
// verdict.
inline constexpr absl::Duration kLeastRest = absl::Seconds(3);

// What is left of `timeout` for a call that comes again after it has `waited`, as by its message.
// At least `least`, or `timeout` if that is less: what it waits for may be on its way back, too.
absl::Duration RestOf(absl::Duration timeout, const google::protobuf::Duration& waited,
                      absl::Duration least = kLeastRest);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_SESSION_DURATION_H_
