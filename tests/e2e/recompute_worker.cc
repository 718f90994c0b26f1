// Trains a model with dropout twice, with and without activation checkpointing, and fails unless
// both end with the same weights, to the bit: recompute_worker [static_graph] [windows]. Every
// process has random numbers of its own. windows: two micro-steps for each step.
#include <cstdint>
#include <map>
#include <memory>
#include <string>

#include "ATen/Functions.h"
#include "absl/strings/str_cat.h"
#include "muster/accelerator.h"
#include "muster/nn.h"
#include "muster/optim.h"
#include "muster/utils.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/dropout.h"
#include "torch/nn/modules/linear.h"

namespace muster {
namespace {

struct NetImpl : torch::nn::Module {
  explicit NetImpl(bool checkpointed) : checkpointed(checkpointed) {
    first = register_module("first", torch::nn::Linear(6, 16));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int i = 0; i < 3; ++i) {
      blocks->push_back(torch::nn::Sequential(torch::nn::Linear(16, 32), torch::nn::Dropout(0.3),
                                              torch::nn::Linear(32, 16)));
    }
  }
  at::Tensor forward(const at::Tensor& in) {
    at::Tensor x = first(in);
    for (const auto& each : *blocks) {
      auto* const block = each->as<torch::nn::SequentialImpl>();
      x = x + at::tanh(checkpointed ? activation_checkpoint(block, x) : block->forward(x));
    }
    return x;
  }
  const bool checkpointed;
  torch::nn::Linear first{nullptr};
  torch::nn::ModuleList blocks{nullptr};
};

std::map<std::string, at::Tensor> Weights(Accelerator& a, bool checkpointed, uint64_t seed) {
  set_seed(1);
  auto net = std::make_shared<NetImpl>(checkpointed);
  FusedAdamW adam(net->parameters(), {.lr = 0.01});
  auto [model, optimizer] = a.prepare(net, adam);
  set_seed(a, seed, /*device_specific=*/true);
  for (int step = 0; step < 8; ++step) {
    auto scope = a.accumulate();
    a.backward(model(at::randn({4, 6})).square().mean());
    optimizer.step();
    optimizer.zero_grad();
  }
  return a.get_state_dict(model);
}

absl::Status Train(Accelerator& a) {
  const auto plain = Weights(a, false, 7);
  const auto again = Weights(a, true, 7);
  const auto other = Weights(a, true, 8);
  if (!a.is_main_process()) return absl::OkStatus();
  bool differ = false;
  for (const auto& [name, tensor] : plain) {
    if (!at::equal(tensor, again.at(name))) {
      return absl::InternalError(absl::StrCat(name, " differs by ",
                                              (tensor - again.at(name)).abs().max().item<double>(),
                                              " with activation checkpointing"));
    }
    differ = differ || !at::equal(tensor, other.at(name));
  }
  if (!differ) return absl::InternalError("the seed has no effect");
  a.print("equal: %ld tensors\n", static_cast<long>(plain.size()));
  return absl::OkStatus();
}

}  // namespace
}  // namespace muster

int main(int argc, char** argv) {
  muster::AcceleratorOptions options;
  for (int i = 1; i < argc; ++i) {
    const std::string word = argv[i];
    if (word == "static_graph") options.data_parallel.static_graph = true;
    if (word == "windows") options.gradient_accumulation_steps = 2;
  }
  return muster::run(argc, argv, options, [](muster::Accelerator& a, const muster::Arguments&) {
    return muster::Train(a);
  });
}
