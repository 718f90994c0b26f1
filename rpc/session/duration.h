#ifndef MUSTER_RPC_SESSION_DURATION_H_
#define MUSTER_RPC_SESSION_DURATION_H_

#include "absl/time/time.h"
#include "google/protobuf/duration.pb.h"

namespace muster::rpc {

// Any bytes are fine: values beyond absl's range become infinite.
absl::Duration FromProto(const google::protobuf::Duration& duration);
google::protobuf::Duration ToProto(absl::Duration duration);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_SESSION_DURATION_H_
