#ifndef MUSTER_WORKER_PARALLEL_TEST_NET_H_
#define MUSTER_WORKER_PARALLEL_TEST_NET_H_

#include <string>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/Tensor.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/mse_loss.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/tanh.h"
#include "ATen/ops/zeros.h"

namespace muster {

inline at::Tensor Randn(at::IntArrayRef sizes, uint64_t seed) {
  return at::randn(sizes, at::make_generator<at::CPUGeneratorImpl>(seed), at::kFloat);
}

// A small network without a module, for tests of data parallelism: 6 -> 16 -> 3, and a bias that a
// forward pass may leave unused. A buffer counts forward passes.
struct TestNet {
  explicit TestNet(uint64_t seed)
      : parameters{Randn({16, 6}, seed).div_(4), Randn({16}, seed + 1),
                   Randn({3, 16}, seed + 2).div_(4), Randn({3}, seed + 3)},
        buffers{at::zeros({1})} {
    for (at::Tensor& parameter : parameters) parameter.requires_grad_(true);
  }

  at::Tensor Forward(const at::Tensor& x, bool use_last_bias = true) {
    buffers[0].add_(1);
    const at::Tensor hidden = at::tanh(at::linear(x, parameters[0], parameters[1]));
    if (use_last_bias) return at::linear(hidden, parameters[2], parameters[3]);
    return at::linear(hidden, parameters[2]);
  }

  std::vector<at::Tensor> parameters;
  std::vector<std::string> names = {"fc1.weight", "fc1.bias", "fc2.weight", "fc2.bias"};
  std::vector<at::Tensor> buffers;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_TEST_NET_H_
