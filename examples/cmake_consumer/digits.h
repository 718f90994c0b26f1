// A data set and a net small enough for a first look: ten noisy patterns, classified by two layers.
#ifndef MUSTER_EXAMPLES_CMAKE_CONSUMER_DIGITS_H_
#define MUSTER_EXAMPLES_CMAKE_CONSUMER_DIGITS_H_

#include "muster/muster.h"

struct NetImpl : torch::nn::Module {
  torch::Tensor forward(torch::Tensor x) {
    return torch::log_softmax(out(torch::relu(in(x.flatten(1)))), 1);
  }
  torch::nn::Linear in{register_module("in", torch::nn::Linear(64, 32))};
  torch::nn::Linear out{register_module("out", torch::nn::Linear(32, 10))};
};
TORCH_MODULE(Net);

// Images [N, 8, 8] and labels [N], the same on every process.
inline muster::TensorDataset<torch::Tensor, torch::Tensor> Digits(bool train) {
  torch::Generator random = at::detail::createCPUGenerator(1);
  const torch::Tensor patterns = torch::randn({10, 8, 8}, random);
  if (!train) random.set_current_seed(2);
  const int64_t count = train ? 2000 : 500;
  torch::Tensor labels = torch::arange(count) % 10;
  torch::Tensor images = patterns.index({labels}) + 0.8 * torch::randn({count, 8, 8}, random);
  return muster::TensorDataset<torch::Tensor, torch::Tensor>(images, labels);
}

#endif  // MUSTER_EXAMPLES_CMAKE_CONSUMER_DIGITS_H_
