#include "worker/models/sparse_experts.h"

#include <gtest/gtest.h>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"

namespace muster::models {
namespace {

DecoderConfig Config() {
  DecoderConfig config;
  config.hidden_size = 4;
  config.intermediate_size = 6;
  config.num_experts = 3;
  config.num_experts_per_token = 2;
  return config;
}

SparseExperts Experts() {
  SparseExperts experts(Config());
  for (const auto& module : experts->modules()) {
    if (auto* const linear = module->as<LinearImpl>()) linear->InitWeights(0.5);
  }
  return experts;
}

at::Tensor Weight(const SparseExperts& experts, const std::string& name) {
  return experts->named_parameters()[name];
}

TEST(SparseExperts, Forward_IsTheWeightedSumOfTheChosenExperts) {
  SparseExperts experts = Experts();
  const at::Tensor x = at::randn({2, 3, 4});
  const SparseExpertsImpl::Output got = experts(x, false);
  const at::Tensor tokens = x.view({-1, 4});
  for (int64_t t = 0; t < tokens.size(0); ++t) {
    const auto [weights, chosen] = at::softmax(got.router_logits[t], -1).topk(2);
    at::Tensor want = at::zeros({4});
    for (int64_t i = 0; i < 2; ++i) {
      const std::string name = "experts." + std::to_string(chosen[i].item<int64_t>()) + ".";
      const at::Tensor inner =
          at::silu(at::linear(tokens[t], Weight(experts, name + "w1.weight"))) *
          at::linear(tokens[t], Weight(experts, name + "w3.weight"));
      want = want +
             weights[i] / weights.sum() * at::linear(inner, Weight(experts, name + "w2.weight"));
    }
    EXPECT_TRUE(at::allclose(got.x.view({-1, 4})[t], want, 1e-5, 1e-6));
  }
}

// As transformers' grouped and batched experts: the contributions of a token are float32 until they
// are added up.
TEST(SparseExperts, Bfloat16_IsRoundedOnceForAToken) {
  SparseExperts experts = Experts();
  experts->to(at::kBFloat16);
  const at::NoGradGuard no_grad;
  const at::Tensor x = at::randn({1, 64, 4}).to(at::kBFloat16);
  const SparseExpertsImpl::Output got = experts(x, false);
  const auto [weights, chosen] = at::softmax(got.router_logits, -1, at::kFloat).topk(2, -1);
  at::Tensor want = at::zeros({64, 4});
  for (int64_t t = 0; t < 64; ++t) {
    for (int64_t i = 0; i < 2; ++i) {
      const std::string name = "experts." + std::to_string(chosen[t][i].item<int64_t>()) + ".";
      const at::Tensor token = x[0].narrow(0, t, 1);
      const at::Tensor inner = at::silu(at::linear(token, Weight(experts, name + "w1.weight"))) *
                               at::linear(token, Weight(experts, name + "w3.weight"));
      const at::Tensor out = at::linear(inner, Weight(experts, name + "w2.weight"));
      want[t] += (out.to(at::kFloat) * (weights[t][i] / weights[t].sum()))[0];
    }
  }
  // Rounded twice, a third of them differ.
  EXPECT_LE((got.x[0] != want.to(at::kBFloat16)).sum().item<int64_t>(), 8);
}

// Weight decay and moments continue for an expert that no token chose.
TEST(SparseExperts, ExpertWithoutTokens_HasAGradientOfZero) {
  SparseExperts experts = Experts();
  // A router that never prefers the last expert.
  {
    const at::NoGradGuard no_grad;
    Weight(experts, "gate.weight").zero_();
  }
  {
    const at::NoGradGuard no_grad;
    Weight(experts, "gate.weight").narrow(0, 0, 2).fill_(1);
  }
  experts(at::ones({1, 2, 4}), false).x.sum().backward();
  const at::Tensor gradient = Weight(experts, "experts.2.w1.weight").grad();
  ASSERT_TRUE(gradient.defined());
  EXPECT_EQ(gradient.abs().max().item<double>(), 0);
}

TEST(SparseExperts, SkippingIdleExperts_GivesTheSame) {
  SparseExperts experts = Experts();
  const at::Tensor x = at::randn({1, 1, 4});
  EXPECT_TRUE(at::equal(experts(x, true).x, experts(x, false).x));
}

TEST(LoadBalancingLoss, EvenLoad_IsTheNumberOfChosenExperts) {
  // Every token prefers two neighbours equally; each expert is chosen equally often.
  const at::Tensor logits =
      at::tensor({5., 5., 0., 5., 0., 5., 0., 5., 5.}, c10::kFloat).view({3, 3});
  EXPECT_NEAR(LoadBalancingLoss({logits}, 2, {}).item<double>(), 2, 1e-5);
}

TEST(LoadBalancingLoss, Padding_DoesNotCount) {
  const at::Tensor logits = at::randn({4, 3});
  const at::Tensor padding = at::tensor({0, 1, 1, 1}, c10::kLong).to(c10::kBool).unsqueeze(0);
  const at::Tensor with = LoadBalancingLoss({logits, logits}, 2, padding);
  const at::Tensor real = logits.narrow(0, 1, 3);
  EXPECT_NEAR(with.item<double>(), LoadBalancingLoss({real, real}, 2, {}).item<double>(), 1e-6);
}

// A softmax in bfloat16 loses the gradient of a router that is almost even, because that is a
// difference of nearly equal numbers.
TEST(LoadBalancingLoss, Bfloat16_HasTheGradientOfFloat32) {
  at::manual_seed(1);
  const at::Tensor rounded = (0.01 * at::randn({40, 8})).to(c10::kBFloat16);
  const auto gradient = [&rounded](c10::ScalarType type) {
    at::Tensor logits = rounded.to(type).detach().requires_grad_(true);
    LoadBalancingLoss({logits}, 2, {}).backward();
    return logits.grad().to(c10::kFloat);
  };
  const at::Tensor exact = gradient(c10::kFloat);
  const at::Tensor off = gradient(c10::kBFloat16) - exact;
  EXPECT_LT(off.norm().item<double>(), 0.005 * exact.norm().item<double>());
}

}  // namespace
}  // namespace muster::models
