#include "worker/collective/ordered_comm.h"

#include <string>
#include <utility>
#include <vector>

#include "c10/util/Exception.h"

namespace muster {
namespace {

class OrderedComm : public Comm {
 public:
  OrderedComm(std::unique_ptr<Comm> inner, std::shared_ptr<CommQueue> queue)
      : queue_(std::move(queue)), inner_(std::move(inner)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  c10d::ProcessGroup* process_group() override { return inner_->process_group(); }
  ProgressBoard* board() override { return inner_->board(); }

  void AllReduce(at::Tensor& tensor, ReduceOp op) override { InOrder().AllReduce(tensor, op); }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    return InOrder().AllGather(tensor);
  }
  void AllGatherParts(at::Tensor& flat) override { InOrder().AllGatherParts(flat); }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    return InOrder().ReduceScatter(flat, op);
  }
  void Broadcast(at::Tensor& tensor, int root) override { InOrder().Broadcast(tensor, root); }
  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override {
    InOrder().Scatter(parts, out, root);
  }
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    return InOrder().AllGatherBytes(bytes);
  }
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    return InOrder().BroadcastBytes(bytes, root);
  }
  void Barrier() override { InOrder().Barrier(); }

 private:
  Comm& InOrder() {
    if (!queue_->IsCurrent()) queue_->Drain();
    return *inner_;
  }

  const std::shared_ptr<CommQueue> queue_;
  const std::unique_ptr<Comm> inner_;
};

}  // namespace

std::unique_ptr<Comm> MakeOrderedComm(std::unique_ptr<Comm> inner,
                                      std::shared_ptr<CommQueue> queue) {
  TORCH_CHECK(inner != nullptr && queue != nullptr, "MakeOrderedComm: no Comm or no queue");
  return std::make_unique<OrderedComm>(std::move(inner), std::move(queue));
}

}  // namespace muster
