#ifndef MUSTER_AGENT_OP_SENDER_H_
#define MUSTER_AGENT_OP_SENDER_H_

#include <cstdint>
#include <functional>

#include "proto/muster/v1/session.pb.h"

namespace muster::agent {

// Returns whether `txn` changes nothing, so that it may be run again, or not at all.
inline bool OnlyReads(const v1::TxnRequest& txn) {
  for (const auto* ops : {&txn.then(), &txn.otherwise()}) {
    for (const v1::KvOp& op : *ops) {
      if (!op.has_get()) return false;
    }
  }
  return true;
}

// Sends operations to the coordinator. Thread-safe, does not block.
class OpSender {
 public:
  using Done = std::function<void(const v1::OpResult&)>;

  virtual ~OpSender() = default;
  // `done` is called exactly once unless Forget comes first, on any thread, possibly from within
  // Submit; it must not block. The sender gives the operation its op_id, which is returned.
  virtual uint64_t Submit(v1::Op op, Done done) = 0;
  // Tells that the caller no longer waits for the result. The operation may have been done, or may
  // yet be done.
  virtual void Forget(uint64_t op_id) = 0;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_OP_SENDER_H_
