#ifndef MUSTER_RPC_UTF8_CHECK_H_
#define MUSTER_RPC_UTF8_CHECK_H_

#include <google/protobuf/message.h>

#include "absl/status/status.h"

namespace muster::rpc {

// Returns OK if every string in `message` is UTF-8, as proto3 requires; else INVALID_ARGUMENT /
// BAD_FIELD that names the first field that is not ("cause.last_log_lines[3]") and shows its text.
// Such a message can be written, but no program can read it: parsers refuse the whole message, and
// the frame that contains it. Fields of type bytes may have any content. Thread-safe, does not
// block.
absl::Status CheckUtf8(const google::protobuf::Message& message);

}  // namespace muster::rpc

#endif  // MUSTER_RPC_UTF8_CHECK_H_
