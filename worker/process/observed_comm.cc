#include "worker/process/observed_comm.h"

#include <string>
#include <utility>
#include <vector>

#include "c10/core/ScalarType.h"

namespace muster {
namespace {

class ObservedComm : public Comm {
 public:
  ObservedComm(std::unique_ptr<Comm> inner, std::shared_ptr<ProgressBoard> board)
      : inner_(std::move(inner)), board_(std::move(board)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  c10d::ProcessGroup* process_group() override { return inner_->process_group(); }

  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    const CollectiveOnBoard going_on = Show("AllReduce", tensor);
    inner_->AllReduce(tensor, op);
  }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    const CollectiveOnBoard going_on = Show("AllGather", tensor);
    return inner_->AllGather(tensor);
  }
  void Broadcast(at::Tensor& tensor, int root) override {
    const CollectiveOnBoard going_on = Show("Broadcast", tensor);
    inner_->Broadcast(tensor, root);
  }
  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override {
    const CollectiveOnBoard going_on = Show("Scatter", out);
    inner_->Scatter(parts, out, root);
  }
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    const CollectiveOnBoard going_on(*board_, "AllGatherBytes", Size(bytes), "bytes");
    return inner_->AllGatherBytes(bytes);
  }
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    const CollectiveOnBoard going_on(*board_, "BroadcastBytes", Size(bytes), "bytes");
    return inner_->BroadcastBytes(bytes, root);
  }
  void Barrier() override {
    const CollectiveOnBoard going_on(*board_, "Barrier", 0, "bytes");
    inner_->Barrier();
  }

 private:
  static int64_t Size(const std::string& bytes) { return static_cast<int64_t>(bytes.size()); }
  CollectiveOnBoard Show(const char* name, const at::Tensor& tensor) {
    if (!tensor.defined()) return CollectiveOnBoard(*board_, name, 0, "undefined");
    return CollectiveOnBoard(*board_, name, tensor.numel(), c10::toString(tensor.scalar_type()));
  }

  const std::unique_ptr<Comm> inner_;
  const std::shared_ptr<ProgressBoard> board_;
};

}  // namespace

std::unique_ptr<Comm> MakeObservedComm(std::unique_ptr<Comm> inner,
                                       std::shared_ptr<ProgressBoard> board) {
  return std::make_unique<ObservedComm>(std::move(inner), std::move(board));
}

}  // namespace muster
