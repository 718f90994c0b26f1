#ifndef MUSTER_COORDINATOR_ANSWER_H_
#define MUSTER_COORDINATOR_ANSWER_H_

#include <cstdint>
#include <string>
#include <utility>

#include "proto/muster/v1/session.pb.h"

namespace muster::coordinator {

// The server's name for one call that the core may hold open. Never reused while the process lives.
using CallId = uint64_t;

// A finished result. Immutable, so any thread may read it; shared by all calls that get the same
// bytes (the ranks of a barrier).
class Answer {
 public:
  // With `shared`, the bytes are made at once, so that N senders need not serialise N times.
  Answer(v1::OpResult result, bool shared)
      : result_(std::move(result)),
        shared_(shared),
        bytes_(shared ? result_.SerializeAsString() : "") {}

  // op_id is not set: it differs from call to call.
  const v1::OpResult& result() const { return result_; }
  bool shared() const { return shared_; }
  // Serialised result(); empty unless shared(). The OpResult of one call is `op_id` as field 1
  // followed by these.
  const std::string& bytes() const { return bytes_; }

 private:
  const v1::OpResult result_;
  const bool shared_;
  const std::string bytes_;
};

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_ANSWER_H_
