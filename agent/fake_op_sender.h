#ifndef MUSTER_AGENT_FAKE_OP_SENDER_H_
#define MUSTER_AGENT_FAKE_OP_SENDER_H_

#include <map>
#include <utility>
#include <vector>

#include "agent/op_sender.h"
#include "base/mutex.h"

namespace muster::agent {

// Keeps submitted operations until the test answers them. Thread-safe.
class FakeOpSender final : public OpSender {
 public:
  uint64_t Submit(v1::Op op, Done done) override {
    MutexLock lock(&mu_);
    op.set_op_id(++last_);
    waiting_[last_] = {std::move(op), std::move(done)};
    changed_.SignalAll();
    return last_;
  }
  void Forget(uint64_t op_id) override {
    MutexLock lock(&mu_);
    waiting_.erase(op_id);
  }

  // The operations that have not been answered, in order.
  std::vector<v1::Op> ops() const {
    MutexLock lock(&mu_);
    std::vector<v1::Op> ops;
    for (const auto& [id, waiting] : waiting_) ops.push_back(waiting.first);
    return ops;
  }
  // Blocks until an operation waits, and returns the first one.
  v1::Op WaitForOp() {
    MutexLock lock(&mu_);
    while (waiting_.empty()) changed_.Wait(&mu_);
    return waiting_.begin()->second.first;
  }
  // Answers the first operation that waits.
  void Answer(v1::OpResult result) {
    Done done;
    {
      MutexLock lock(&mu_);
      if (waiting_.empty()) return;
      result.set_op_id(waiting_.begin()->first);
      done = std::move(waiting_.begin()->second.second);
      waiting_.erase(waiting_.begin());
    }
    if (done) done(result);
  }

 private:
  mutable Mutex mu_;
  CondVar changed_;
  uint64_t last_ ABSL_GUARDED_BY(mu_) = 0;
  std::map<uint64_t, std::pair<v1::Op, Done>> waiting_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_FAKE_OP_SENDER_H_
