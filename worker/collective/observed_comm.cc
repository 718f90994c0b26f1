#include "worker/collective/observed_comm.h"

#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "c10/core/ScalarType.h"

namespace muster {
namespace {

class ObservedComm : public Comm {
 public:
  ObservedComm(std::unique_ptr<Comm> inner, std::shared_ptr<ProgressBoard> board,
               CollectiveExplainer explain)
      : inner_(std::move(inner)), board_(std::move(board)), explain_(std::move(explain)) {}

  int rank() const override { return inner_->rank(); }
  int size() const override { return inner_->size(); }
  c10d::ProcessGroup* process_group() override { return inner_->process_group(); }
  ProgressBoard* board() override { return board_.get(); }

  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    Show("AllReduce", tensor, [&] { inner_->AllReduce(tensor, op); });
  }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override {
    return Show("AllGather", tensor, [&] { return inner_->AllGather(tensor); });
  }
  void AllGatherParts(at::Tensor& flat) override {
    Show("AllGatherParts", flat, [&] { inner_->AllGatherParts(flat); });
  }
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp op) override {
    return Show("ReduceScatter", flat, [&] { return inner_->ReduceScatter(flat, op); });
  }
  void Broadcast(at::Tensor& tensor, int root) override {
    Show("Broadcast", tensor, [&] { inner_->Broadcast(tensor, root); });
  }
  void Scatter(const std::vector<at::Tensor>& parts, at::Tensor& out, int root) override {
    Show("Scatter", out, [&] { inner_->Scatter(parts, out, root); });
  }
  std::vector<std::string> AllGatherBytes(const std::string& bytes) override {
    return Show("AllGatherBytes", Size(bytes), "bytes",
                [&] { return inner_->AllGatherBytes(bytes); });
  }
  std::string BroadcastBytes(const std::string& bytes, int root) override {
    return Show("BroadcastBytes", Size(bytes), "bytes",
                [&] { return inner_->BroadcastBytes(bytes, root); });
  }
  void Barrier() override {
    Show("Barrier", 0, "bytes", [&] { inner_->Barrier(); });
  }

 private:
  static int64_t Size(const std::string& bytes) { return static_cast<int64_t>(bytes.size()); }

  template <typename Fn>
  std::invoke_result_t<Fn> Show(const char* name, const at::Tensor& tensor, Fn collective) {
    if (!tensor.defined()) return Show(name, 0, "undefined", collective);
    return Show(name, tensor.numel(), c10::toString(tensor.scalar_type()), collective);
  }
  template <typename Fn>
  std::invoke_result_t<Fn> Show(const char* name, int64_t elements, const char* dtype,
                                Fn collective) {
    const CollectiveOnBoard going_on(*board_, name, elements, dtype);
    try {
      return collective();
    } catch (...) {
      // Do this while the collective is still on the board, from which other ranks learn that this
      // one waits.
      RethrowExplained(explain_);
    }
  }

  const std::unique_ptr<Comm> inner_;
  const std::shared_ptr<ProgressBoard> board_;
  const CollectiveExplainer explain_;
};

}  // namespace

std::unique_ptr<Comm> MakeObservedComm(std::unique_ptr<Comm> inner,
                                       std::shared_ptr<ProgressBoard> board,
                                       CollectiveExplainer explain) {
  return std::make_unique<ObservedComm>(std::move(inner), std::move(board), std::move(explain));
}

}  // namespace muster
