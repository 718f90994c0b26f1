#ifndef MUSTER_RPC_SESSION_ANSWER_H_
#define MUSTER_RPC_SESSION_ANSWER_H_

#include <string>

#include "absl/strings/string_view.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::rpc {

// A finished result, as the bytes that go out. Immutable, so any thread may read it; shared by all
// calls that get the same (the ranks of a barrier).
class Answer {
 public:
  // The op_id of `result` is not set: it differs from call to call.
  explicit Answer(const v1::OpResult& result)
      : kind_(result.kind_case()), bytes_(result.SerializeAsString()) {}

  // The result that it was made from.
  v1::OpResult Parse() const;
  // KIND_NOT_SET: an error.
  v1::OpResult::KindCase kind() const { return kind_; }
  // Serialised. The OpResult of one call is `op_id` as field 1 followed by these.
  const std::string& bytes() const { return bytes_; }
  // The serialized reply inside bytes(): what a unary call gets. Not for an error.
  absl::string_view reply() const;

 private:
  const v1::OpResult::KindCase kind_;
  const std::string bytes_;
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_SESSION_ANSWER_H_
