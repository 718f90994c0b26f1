#include "worker/train/autocast.h"

#include "ATen/autocast_mode.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/conv2d.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/mse_loss.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

at::Tensor Weight() { return at::randn({3, 4}).requires_grad_(true); }

TEST(AutocastGuard, Bf16OnCpu_RunsMatmulsInBf16AndGradientsInFp32) {
  at::Tensor weight = Weight();
  at::Tensor loss;
  {
    AutocastGuard guard(MixedPrecision::kBf16, c10::kCPU);
    const at::Tensor out = at::linear(at::randn({2, 4}), weight);
    EXPECT_EQ(out.scalar_type(), at::kBFloat16);
    loss = at::mse_loss(ConvertToFp32(out), at::zeros({2, 3}));
  }
  EXPECT_EQ(loss.scalar_type(), at::kFloat);
  loss.backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_FALSE(at::autocast::is_autocast_enabled(c10::kCPU));
}

TEST(AutocastGuard, D33_Fp16OnCpu_IsDoneForReal) {
  CheckMixedPrecision(MixedPrecision::kFp16, c10::kCPU);
  EXPECT_TRUE(NeedsGradScaler(MixedPrecision::kFp16));
  at::Tensor weight = Weight(), kernel = at::randn({2, 1, 3, 3}).requires_grad_(true);
  at::Tensor loss;
  {
    AutocastGuard guard(MixedPrecision::kFp16, c10::kCPU);
    const at::Tensor out = at::linear(at::randn({2, 4}), weight);
    const at::Tensor image = at::conv2d(at::randn({1, 1, 5, 5}), kernel);
    EXPECT_EQ(out.scalar_type(), at::kHalf);
    EXPECT_EQ(image.scalar_type(), at::kHalf);
    loss = ConvertToFp32(out).sum().add(ConvertToFp32(image).sum());
  }
  loss.backward();
  EXPECT_EQ(weight.grad().scalar_type(), at::kFloat);
  EXPECT_GT(kernel.grad().abs().sum().item<float>(), 0);
}

TEST(AutocastGuard, Nested_RestoresWhatItFound) {
  at::Tensor weight = Weight();
  const auto run = [&] { return at::linear(at::randn({2, 4}), weight).scalar_type(); };
  {
    AutocastGuard outer(MixedPrecision::kBf16, c10::kCPU);
    {
      AutocastGuard inner(MixedPrecision::kNo, c10::kCPU);
      EXPECT_EQ(run(), at::kFloat);
      AutocastGuard innermost(MixedPrecision::kFp16, c10::kCPU, {.cache_enabled = false});
      EXPECT_EQ(run(), at::kHalf);
      EXPECT_FALSE(at::autocast::is_autocast_cache_enabled());
    }
    EXPECT_EQ(run(), at::kBFloat16);
    EXPECT_TRUE(at::autocast::is_autocast_cache_enabled());
    AutocastGuard off(MixedPrecision::kBf16, c10::kCPU, {.enabled = false});
    EXPECT_EQ(run(), at::kFloat);
  }
  EXPECT_EQ(run(), at::kFloat);
}

TEST(AutocastGuard, AfterWeightUpdate_UsesTheNewWeight) {
  at::Tensor weight = at::zeros({1, 1}).requires_grad_(true);
  const at::Tensor one = at::zeros({1, 1}).add_(1);
  const auto run = [&] {
    AutocastGuard guard(MixedPrecision::kBf16, c10::kCPU);
    return at::linear(one, weight).item<float>();
  };
  EXPECT_EQ(run(), 0);
  {
    at::NoGradGuard no_grad;
    weight.fill_(2);
  }
  EXPECT_EQ(run(), 2);
}

TEST(MixedPrecision, UnsupportedCombinations_AreRefused) {
  EXPECT_THROW(CheckMixedPrecision(MixedPrecision::kBf16, c10::DeviceType::Meta), c10::Error);
  EXPECT_NO_THROW(CheckMixedPrecision(MixedPrecision::kNo, c10::DeviceType::Meta));
  EXPECT_EQ(ParseMixedPrecision("bf16"), MixedPrecision::kBf16);
  EXPECT_THROW(ParseMixedPrecision("fp8"), c10::Error);
  EXPECT_THROW(ParseMixedPrecision("half"), c10::Error);
  EXPECT_STREQ(MixedPrecisionName(MixedPrecision::kNo), "no");
}

TEST(ConvertToFp32, Nests_KeepTheirShapeAndIntegers) {
  const at::Tensor half = at::zeros({2}, at::kHalf), ids = at::zeros({2}, at::kLong);
  const auto out = ConvertToFp32(std::make_tuple(
      half, std::vector<at::Tensor>{ids, half}, std::map<std::string, at::Tensor>{{"a", half}},
      std::optional<at::Tensor>(), std::make_pair(7, at::Tensor())));
  EXPECT_EQ(std::get<0>(out).scalar_type(), at::kFloat);
  EXPECT_EQ(std::get<1>(out)[0].scalar_type(), at::kLong);
  EXPECT_EQ(std::get<1>(out)[1].scalar_type(), at::kFloat);
  EXPECT_EQ(std::get<2>(out).at("a").scalar_type(), at::kFloat);
  EXPECT_EQ(std::get<4>(out).first, 7);
}

}  // namespace
}  // namespace muster
