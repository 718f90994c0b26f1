#include "worker/models/layers.h"

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

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
  // 4 * 300^2 is not exact in bfloat16.
  EXPECT_TRUE(at::equal(norm(x).to(c10::kFloat), at::ones({4})));
}

// Generation on a GPU relies on this.
TEST(RmsNorm, LibTorchsOwnWithoutAWeight_RoundsAsOurs) {
  at::manual_seed(1);
  for (const c10::ScalarType type : {c10::kFloat, c10::kBFloat16}) {
    RmsNorm norm(64, 1e-5);
    {
      const at::NoGradGuard no_grad;
      norm->weight.uniform_(0.5, 1.5);
    }
    norm->to(type);
    const at::Tensor x = at::randn({3, 5, 64}).to(type);
    EXPECT_TRUE(at::allclose(norm(x), norm->weight * at::rms_norm(x, {64}, {}, 1e-5), 1e-6, 1e-6));
  }
}

TEST(Activate, GeluNew_IsTheTanhFormulaInEveryPrecision) {
  const at::Tensor x = at::arange(-4, 4, 0.25);
  const at::Tensor fused = at::gelu(x, "tanh");
  EXPECT_TRUE(at::equal(Activate(Activation::kGeluNew, x), fused));
  const at::Tensor low = Activate(Activation::kGeluNew, x.to(c10::kBFloat16));
  EXPECT_EQ(low.scalar_type(), c10::kBFloat16);
  EXPECT_TRUE(at::allclose(low.to(c10::kFloat), fused, 0.05, 0.05));
}

// The values of transformers.activations for x, and the gradients.
TEST(Activate, Each_HasTheValuesAndGradientsOfTransformers) {
  struct Case {
    Activation activation;
    std::vector<float> values, gradients;
  };
  const std::vector<Case> cases = {
      {Activation::kGeluErf,
       {-0, -0.100211, 0.580029, 5, 12},
       {-2.57564e-31, -0.127469, 0.999226, 1.00001, 1}},
      {Activation::kGeluFast, {-0, -0.100428, 0.579961, 5, 12}, {0, -0.127711, 0.998938, 1, 1}},
      {Activation::kGeluClipped,
       {-0, -0.100211, 0.580029, 5, 10},
       {0, -0.127469, 0.999226, 1.00001, 0}},
      {Activation::kQuickGelu,
       {-1.61864e-08, -0.108338, 0.58639, 4.99899, 12},
       {-2.62004e-08, -0.0988481, 0.999572, 1.00151, 1}},
      {Activation::kRelu2, {0, 0, 0.5625, 25, 144}, {0, 0, 1.5, 10, 24}},
      {Activation::kRelu6, {0, 0, 0.75, 5, 6}, {0, 0, 1, 1, 0}},
      {Activation::kLeakyRelu, {-0.12, -0.015, 0.75, 5, 12}, {0.01, 0.01, 1, 1, 1}},
      {Activation::kHardswish, {-0, -0.375, 0.46875, 5, 12}, {0, 0, 0.75, 1, 1}},
      {Activation::kMish,
       {-7.37303e-05, -0.2981, 0.610018, 4.99955, 12},
       {-6.75859e-05, -0.0640978, 0.985758, 1.0008, 1}},
      {Activation::kSigmoid,
       {6.14417e-06, 0.182426, 0.679179, 0.993307, 0.999994},
       {6.14414e-06, 0.149146, 0.217895, 0.00664803, 6.19884e-06}},
      {Activation::kLaplace, {0, 0, 0.560427, 1, 1}, {0, 7.20949e-14, 1.39796, 0, 0}},
      {Activation::kSqrtSoftplus,
       {0.00247875, 0.448791, 1.06624, 2.23757, 3.4641},
       {0.00123937, 0.203241, 0.318492, 0.221961, 0.144337}},
      {Activation::kLinear, {-12, -1.5, 0.75, 5, 12}, {1, 1, 1, 1, 1}},
  };
  for (const Case& each : cases) {
    SCOPED_TRACE(static_cast<int>(each.activation));
    const at::Tensor x = at::tensor({-12.0F, -1.5F, 0.75F, 5.0F, 12.0F}).requires_grad_(true);
    const at::Tensor y = Activate(each.activation, x);
    y.sum().backward();
    EXPECT_TRUE(at::allclose(y, at::tensor(each.values), 1e-5, 1e-6)) << y;
    EXPECT_TRUE(at::allclose(x.grad(), at::tensor(each.gradients), 1e-5, 1e-6)) << x.grad();
    const at::Tensor low = Activate(each.activation, x.detach().to(c10::kBFloat16));
    EXPECT_EQ(low.scalar_type(), c10::kBFloat16);
    EXPECT_TRUE(at::allclose(low.to(c10::kFloat), y, 0.05, 0.05)) << low;
  }
}

TEST(CrossEntropy, IgnoredLabels_DoNotCount) {
  const at::Tensor logits = at::randn({3, 5});
  const at::Tensor loss = CrossEntropy(logits, at::tensor({2, -100, 4}, c10::kLong));
  const at::Tensor log = at::log_softmax(logits, -1);
  EXPECT_NEAR(loss.item<double>(), -(log[0][2].item<double>() + log[2][4].item<double>()) / 2,
              1e-6);
}

// In transformers it is 0/0, and one optimizer step with it destroys all weights (quirk
// hf_train/s004).
TEST(CrossEntropy, NoLabelAtAll_IsZeroWithGradientsOfZero) {
  const at::Tensor logits = at::randn({3, 5}).requires_grad_(true);
  const at::Tensor loss = CrossEntropy(logits, at::full({3}, -100, c10::kLong));
  loss.backward();
  EXPECT_EQ(loss.item<double>(), 0);
  EXPECT_EQ(logits.grad().abs().max().item<double>(), 0);
}

}  // namespace
}  // namespace muster::models
