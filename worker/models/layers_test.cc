#include "worker/models/layers.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"

namespace muster::models {
namespace {

TEST(ScopedWeights, Meta_AllocatesNothing) {
  const ScopedWeights weights(c10::kMeta, c10::kBFloat16);
  const Linear huge(int64_t{1} << 24, int64_t{1} << 24, true);
  EXPECT_TRUE(huge->weight.is_meta());
  EXPECT_EQ(huge->weight.scalar_type(), c10::kBFloat16);
}

TEST(ScopedWeights, Nested_GivesBackWhatWas) {
  const ScopedWeights outer(c10::kMeta, c10::kHalf);
  { const ScopedWeights inner(c10::kCPU, c10::kDouble); }
  EXPECT_EQ(Linear(2, 2, false)->weight.scalar_type(), c10::kHalf);
}

TEST(Conv1D, Forward_IsALinearLayerWithItsWeightTransposed) {
  Conv1D conv(3, 5);
  conv->InitWeights(1);
  const at::Tensor x = at::randn({2, 4, 3});
  EXPECT_TRUE(at::allclose(conv(x), at::linear(x, conv->weight.t(), conv->bias), 1e-5, 1e-6));
}

TEST(Embedding, RowOfPadding_HasNoGradientFromLookups) {
  Embedding embedding(4, 2, 1);
  embedding->InitWeights(1);
  embedding(at::tensor({0, 1, 1, 3}, c10::kLong)).sum().backward();
  const at::Tensor want = at::tensor({1., 1., 0., 0., 0., 0., 1., 1.}, c10::kFloat).view({4, 2});
  EXPECT_TRUE(at::equal(embedding->weight.grad(), want));
}

TEST(RmsNorm, Bfloat16_DividesInFloat32) {
  RmsNorm norm(4, 0);
  norm->InitWeights();
  const at::Tensor x = at::full({4}, 300, c10::kBFloat16);
  // 4 * 300^2 has no exact bfloat16.
  EXPECT_TRUE(at::equal(norm(x).to(c10::kFloat), at::ones({4})));
}

TEST(Activate, GeluNew_IsTheTanhFormulaInEveryPrecision) {
  const at::Tensor x = at::arange(-4, 4, 0.25);
  const at::Tensor fused = at::gelu(x, "tanh");
  EXPECT_TRUE(at::equal(Activate(Activation::kGeluNew, x), fused));
  const at::Tensor low = Activate(Activation::kGeluNew, x.to(c10::kBFloat16));
  EXPECT_EQ(low.scalar_type(), c10::kBFloat16);
  EXPECT_TRUE(at::allclose(low.to(c10::kFloat), fused, 0.05, 0.05));
}

TEST(CrossEntropy, IgnoredLabels_DoNotCount) {
  const at::Tensor logits = at::randn({3, 5});
  const at::Tensor loss = CrossEntropy(logits, at::tensor({2, -100, 4}, c10::kLong));
  const at::Tensor log = at::log_softmax(logits, -1);
  EXPECT_NEAR(loss.item<double>(), -(log[0][2].item<double>() + log[2][4].item<double>()) / 2,
              1e-6);
}

// transformers: 0/0, and one optimizer step with it destroys all weights (quirk hf_train/s004).
TEST(CrossEntropy, NoLabelAtAll_IsZeroWithGradientsOfZero) {
  const at::Tensor logits = at::randn({3, 5}).requires_grad_(true);
  const at::Tensor loss = CrossEntropy(logits, at::full({3}, -100, c10::kLong));
  loss.backward();
  EXPECT_EQ(loss.item<double>(), 0);
  EXPECT_EQ(logits.grad().abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace muster::models
