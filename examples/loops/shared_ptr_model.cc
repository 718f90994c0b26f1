// A program as LibTorch's tutorials write it: a struct derived from torch::nn::Module in a
// std::shared_ptr, a torch::data data set with the Stack transform, a schedule of torch::optim's.
#include <memory>
#include <optional>

#include "examples/loops/result.h"
#include "muster/muster.h"

namespace {

struct Net : torch::nn::Module {
  Net() {
    fc1 = register_module("fc1", torch::nn::Linear(16, 32));
    fc2 = register_module("fc2", torch::nn::Linear(32, 4));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(fc1->forward(x));
    return torch::log_softmax(fc2->forward(x), /*dim=*/1);
  }

  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};

// Points around four centres, classified by centre.
class Points : public torch::data::datasets::Dataset<Points> {
 public:
  explicit Points(size_t count) : labels_(torch::arange(static_cast<int64_t>(count)) % 4) {
    points_ = torch::randn({4, 16}).index({labels_}) + 0.5 * torch::randn({labels_.size(0), 16});
  }
  torch::data::Example<> get(size_t index) override {
    return {points_[static_cast<int64_t>(index)], labels_[static_cast<int64_t>(index)]};
  }
  std::optional<size_t> size() const override { return labels_.size(0); }

  const torch::Tensor& points() const { return points_; }
  const torch::Tensor& labels() const { return labels_; }

 private:
  torch::Tensor labels_;
  torch::Tensor points_;
};

absl::Status Train(muster::Accelerator& accelerator) {
  torch::manual_seed(1);
  auto net = std::make_shared<Net>();
  torch::optim::SGD sgd(net->parameters(), torch::optim::SGDOptions(0.1).momentum(0.9));
  torch::optim::StepLR step_lr(sgd, /*step_size=*/32, /*gamma=*/0.5);
  const Points data(1024);

  auto [model, optimizer, schedule, data_loader] =
      accelerator.prepare(net, sgd, step_lr,
                          muster::batches(Points(data).map(torch::data::transforms::Stack<>()),
                                          64 / accelerator.num_processes())
                              .shuffle(true));

  for ([[maybe_unused]] int64_t epoch : accelerator.epochs(4)) {
    for (auto& batch : data_loader) {
      auto scope = accelerator.accumulate();
      optimizer.zero_grad();
      torch::Tensor prediction = model(batch->data);
      torch::Tensor loss = torch::nll_loss(prediction, batch->target);
      accelerator.backward(loss);
      optimizer.step();
      schedule.step();
    }
  }

  torch::NoGradGuard no_grad;
  const torch::Tensor loss = torch::nll_loss(model(data.points().to(accelerator.device())),
                                             data.labels().to(accelerator.device()));
  return Report(accelerator, "shared_ptr model: loss", loss.item<double>(), 0.2,
                model->parameters());
}

}  // namespace

int main(int argc, char** argv) { return muster::run(argc, argv, Train); }
