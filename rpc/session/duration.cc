#include "rpc/session/duration.h"

#include <algorithm>
#include <cstdint>

namespace muster::rpc {

absl::Duration FromProto(const google::protobuf::Duration& duration) {
  return absl::Seconds(duration.seconds()) + absl::Nanoseconds(duration.nanos());
}

google::protobuf::Duration ToProto(absl::Duration duration) {
  google::protobuf::Duration result;
  absl::Duration rest;
  result.set_seconds(absl::IDivDuration(duration, absl::Seconds(1), &rest));
  result.set_nanos(static_cast<int32_t>(absl::ToInt64Nanoseconds(rest)));
  return result;
}

absl::Duration RestOf(absl::Duration timeout, const google::protobuf::Duration& waited,
                      absl::Duration least) {
  if (timeout == absl::InfiniteDuration()) return timeout;
  return std::clamp(timeout - FromProto(waited), std::min(timeout, least), timeout);
}

}  // namespace muster::rpc
