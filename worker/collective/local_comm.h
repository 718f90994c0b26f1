#ifndef MUSTER_WORKER_COLLECTIVE_LOCAL_COMM_H_
#define MUSTER_WORKER_COLLECTIVE_LOCAL_COMM_H_

#include <string>
#include <vector>

#include "worker/collective/comm.h"

namespace muster {

// The Comm of a job of one process: every collective is the identity and returns at once. It checks
// its arguments as the others do (root, parts, a mean of integers), so that a program which runs
// alone does not first fail on a cluster. Thread-safe.
class LocalComm : public Comm {
 public:
  int rank() const override { return 0; }
  int size() const override { return 1; }
  void AllReduce(at::Tensor& tensor, ReduceOp op) override;
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override;
  void AllGatherParts(at::Tensor& flat) override;
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override;
  void Broadcast(at::Tensor& tensor, int root) override;
  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override;
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override;
  std::string BroadcastBytes(const std::string& bytes, int root) override;
  void Barrier() override {}
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_LOCAL_COMM_H_
