#ifndef MUSTER_MUSTER_TEST_MODEL_H_
#define MUSTER_MUSTER_TEST_MODEL_H_

#include <string>

#include "ATen/Functions.h"
#include "base/test_folder.h"
#include "torch/nn/modules/linear.h"

// The models and losses of the tests in this folder.
namespace muster {

inline std::string TestDir(const std::string& name) { return TestPath(name); }

// A single weight 0, whose gradient under Loss() is -x of the batch.
inline torch::nn::Linear OneWeight() {
  torch::nn::Linear net(torch::nn::LinearOptions(1, 1).bias(false));
  at::NoGradGuard no_grad;
  net->weight.zero_();
  return net;
}

inline at::Tensor Loss(const at::Tensor& out) { return -out.mean(); }

}  // namespace muster

#endif  // MUSTER_MUSTER_TEST_MODEL_H_
