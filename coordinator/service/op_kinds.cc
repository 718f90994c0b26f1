#include "coordinator/service/op_kinds.h"

#include "coordinator/kv.h"

namespace muster::coordinator {
namespace {

// The core's memory for a key that is waited for, in addition to its bytes.
constexpr size_t kBytesOfKey = 128;

}  // namespace

bool OnlyReads(const v1::Op& op) {
  switch (op.kind_case()) {
    case v1::Op::kGetRankTable:
    case v1::Op::kDescribeBarrier:
    case v1::Op::kListBarriers:
    case v1::Op::kStragglerReport:
    case v1::Op::kGetMembers:
    case v1::Op::kCaptureStacks:
    case v1::Op::kResolveCheckpoint:
    case v1::Op::kListCheckpoints:
    case v1::Op::kGetJob:
    case v1::Op::kListJobs:
    case v1::Op::kReadJobLog:
    case v1::Op::kListNodes:
    case v1::Op::kHeartbeat:
    case v1::Op::kPollTriggers:
      return true;
    default:
      return false;
  }
}

bool MayChange(const v1::Op& op) {
  return !OnlyReads(op) && !op.has_wait() && (!op.has_txn() || KvStore::Writes(op.txn()));
}

bool MayBeHeld(const v1::Op& op) {
  return op.has_join() || op.has_arrive() || op.has_arrive_many() || op.has_wait() ||
         op.has_agree_alive() || op.has_capture_stacks();
}

size_t HeldBytes(const v1::Op& op, size_t bytes) {
  return bytes + (op.has_wait() ? kBytesOfKey * static_cast<size_t>(op.wait().keys_size()) : 0);
}

}  // namespace muster::coordinator
