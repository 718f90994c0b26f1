#ifndef MUSTER_RPC_SESSION_ANSWER_H_
#define MUSTER_RPC_SESSION_ANSWER_H_

#include <string>

#include "absl/strings/string_view.h"
#include "proto/muster/v1/session.pb.h"

namespace muster::rpc {

// A finished result, as the bytes that are sent. Immutable, so any thread may read it; shared by
// all calls that get the same result (the ranks of a barrier).
class Answer {
 public:
  // The op_id of `result` must not be set: it differs from call to call.
  explicit Answer(const v1::OpResult& result)
      : kind_(result.kind_case()), bytes_(result.SerializeAsString()) {}

  // Returns the result from which this answer was made.
  v1::OpResult Parse() const;
  // KIND_NOT_SET for an error.
  v1::OpResult::KindCase kind() const { return kind_; }
  // The serialized result. The OpResult of one call is `op_id` as field 1 followed by these bytes.
  const std::string& bytes() const { return bytes_; }
  // The serialized reply inside bytes(): what a unary call gets. Not for errors.
  absl::string_view reply() const;

 private:
  const v1::OpResult::KindCase kind_;
  const std::string bytes_;
};

}  // namespace muster::rpc

#endif  // MUSTER_RPC_SESSION_ANSWER_H_
