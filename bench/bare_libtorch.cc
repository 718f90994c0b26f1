// examples/cmake_consumer without Muster: what bench/header_cost.py compares its compile time with.
#include <torch/torch.h>

#include <cstdio>
#include <optional>

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    return torch::log_softmax(out(torch::relu(in(x.flatten(1)))), 1);
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(64, 32))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(32, 10))};
};
TORCH_MODULE(Net);

class Digits : public torch::data::datasets::Dataset<Digits> {
 public:
  explicit Digits(bool train) {
    torch::Generator random = at::detail::createCPUGenerator(1);
    const torch::Tensor patterns = torch::randn({10, 8, 8}, random);
    if (!train) random.set_current_seed(2);
    const int64_t count = train ? 2000 : 500;
    labels_ = torch::arange(count) % 10;
    images_ = patterns.index({labels_}) + 0.8 * torch::randn({count, 8, 8}, random);
  }
  torch::data::Example<> get(size_t i) override { return {images_[i], labels_[i]}; }
  std::optional<size_t> size() const override { return images_.size(0); }

 private:
  torch::Tensor images_, labels_;
};

int main() {
  torch::manual_seed(42);
  Net net;
  torch::optim::AdamW optimizer(net->parameters(), /*lr=*/1e-2);
  auto train_set = torch::data::make_data_loader<torch::data::samplers::RandomSampler>(
      Digits(true).map(torch::data::transforms::Stack<>()), 32);
  auto test_set = torch::data::make_data_loader<torch::data::samplers::SequentialSampler>(
      Digits(false).map(torch::data::transforms::Stack<>()), 128);
  for (int64_t epoch = 0; epoch < 3; ++epoch) {
    net->train();
    for (auto& batch : *train_set) {
      torch::Tensor loss = torch::nll_loss(net(batch.data), batch.target);
      loss.backward();
      torch::nn::utils::clip_grad_norm_(net->parameters(), 1.0);
      optimizer.step();
      optimizer.zero_grad();
    }
    net->eval();
    torch::NoGradGuard no_grad;
    int64_t correct = 0, seen = 0;
    for (auto& batch : *test_set) {
      correct += net(batch.data).argmax(1).eq(batch.target).sum().item<int64_t>();
      seen += batch.target.size(0);
    }
    std::printf("epoch %ld: %ld of %ld right\n", epoch, correct, seen);
    torch::save(net, "net.pt");
  }
}
