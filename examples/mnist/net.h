#ifndef MUSTER_EXAMPLES_MNIST_NET_H_
#define MUSTER_EXAMPLES_MNIST_NET_H_

#include <torch/torch.h>

// A small convolutional classifier: [N, 1, 28, 28] float images to [N, 10] log-probabilities.
struct NetImpl : torch::nn::Module {
  NetImpl() {
    conv1 = register_module("conv1", torch::nn::Conv2d(1, 16, 5));
    conv2 = register_module("conv2", torch::nn::Conv2d(16, 32, 3));
    fc1 = register_module("fc1", torch::nn::Linear(32 * 5 * 5, 128));
    fc2 = register_module("fc2", torch::nn::Linear(128, 10));
  }

  torch::Tensor forward(torch::Tensor x) {
    x = torch::relu(torch::max_pool2d(conv1(x), 2));
    x = torch::relu(torch::max_pool2d(conv2(x), 2));
    x = torch::relu(fc1(x.flatten(1)));
    return torch::log_softmax(fc2(x), 1);
  }

  torch::nn::Conv2d conv1{nullptr}, conv2{nullptr};
  torch::nn::Linear fc1{nullptr}, fc2{nullptr};
};
TORCH_MODULE(Net);

#endif  // MUSTER_EXAMPLES_MNIST_NET_H_
