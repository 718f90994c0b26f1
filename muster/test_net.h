#ifndef MUSTER_MUSTER_TEST_NET_H_
#define MUSTER_MUSTER_TEST_NET_H_

#include <cstdint>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/Functions.h"
#include "torch/nn/modules/activation.h"
#include "torch/nn/modules/container/sequential.h"
#include "torch/nn/modules/linear.h"

// The network of the tests of sharding: the same values on every rank and in every run.
namespace muster {

inline at::Tensor Random(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kFloat);
}

// Maps [n, 5] to [n, 3].
inline torch::nn::Sequential MakeNet() {
  torch::nn::Sequential net(torch::nn::Linear(5, 9), torch::nn::Tanh(), torch::nn::Linear(9, 9),
                            torch::nn::Tanh(), torch::nn::Linear(9, 3));
  at::NoGradGuard no_grad;
  uint64_t seed = 7;
  for (at::Tensor& parameter : net->parameters()) {
    parameter.copy_(Random(parameter.sizes(), ++seed).div_(3));
  }
  return net;
}

}  // namespace muster

#endif  // MUSTER_MUSTER_TEST_NET_H_
