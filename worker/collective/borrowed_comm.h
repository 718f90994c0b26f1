#ifndef MUSTER_WORKER_COLLECTIVE_BORROWED_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_BORROWED_COMM_H_

#include <string>
#include <vector>

#include "worker/collective/comm.h"

namespace muster {

// A Comm that another object owns and keeps alive: for a second user of the same ranks, where an
// interface requires ownership. Calls of both users are one sequence.
class BorrowedComm : public Comm {
 public:
  explicit BorrowedComm(Comm& comm) : comm_(comm) {}

  int rank() const override { return comm_.rank(); }
  int size() const override { return comm_.size(); }
  void AllReduce(at::Tensor& tensor, ReduceOp op) override { comm_.AllReduce(tensor, op); }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    return comm_.AllGather(tensor);
  }
  void AllGatherParts(at::Tensor& flat) override { comm_.AllGatherParts(flat); }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    return comm_.ReduceScatter(flat, op);
  }
  void Broadcast(at::Tensor& tensor, int root) override { comm_.Broadcast(tensor, root); }
  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override {
    comm_.Scatter(parts, out, root);
  }
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    return comm_.AllGatherBytes(bytes);
  }
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    return comm_.BroadcastBytes(bytes, root);
  }
  void Barrier() override { comm_.Barrier(); }
  c10d::ProcessGroup* process_group() override { return comm_.process_group(); }
  ProgressBoard* board() override { return comm_.board(); }

 private:
  Comm& comm_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_BORROWED_COMM_H_
