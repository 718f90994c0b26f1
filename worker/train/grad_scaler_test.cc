#include "worker/train/grad_scaler.h"

#include <limits>
#include <optional>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/sparse_coo_tensor.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/zeros.h"
#include "gtest/gtest.h"
#include "torch/optim/sgd.h"
#include "worker/train/optimizer.h"
#include "worker/train/torch_optimizer.h"

namespace muster {
namespace {

namespace optim = torch::optim;

const float kInf = std::numeric_limits<float>::infinity();

struct OneWeight {
  explicit OneWeight(double lr = 1) : sgd({weight}, {.lr = lr}) {}
  at::Tensor weight = at::zeros({2}).requires_grad_(true);
  FusedSGD sgd;
  void Backward(GradScaler& scaler, float gradient) {
    weight.mutable_grad() = at::Tensor();
    scaler.Scale(weight.mul(at::tensor({1.0f, gradient})).sum()).backward();
  }
};

TEST(GradScaler, GoodSteps_StepUnscaledAndGrowTheScale) {
  GradScaler scaler({.init_scale = 8, .growth_interval = 2});
  OneWeight one;
  for (int i = 0; i < 4; ++i) {
    one.Backward(scaler, 0.5);
    EXPECT_EQ(one.weight.grad()[0].item<double>(), scaler.scale());
    scaler.Step(one.sgd);
    EXPECT_FALSE(scaler.step_was_skipped(one.sgd));
    scaler.Update();
  }
  EXPECT_FLOAT_EQ(one.weight[1].item<float>(), -2);
  EXPECT_EQ(scaler.scale(), 32);
  EXPECT_EQ(scaler.growth_tracker(), 0);
}

TEST(GradScaler, Overflow_SkipsTheStepAndBacksOff) {
  GradScaler scaler;
  OneWeight one;
  for (const float bad : {kInf, std::numeric_limits<float>::quiet_NaN()}) {
    one.Backward(scaler, bad);
    scaler.Step(one.sgd);
    EXPECT_TRUE(scaler.step_was_skipped(one.sgd));
    scaler.Update();
    EXPECT_TRUE(scaler.step_was_skipped(one.sgd));
  }
  EXPECT_EQ(one.weight.abs().sum().item<float>(), 0);
  EXPECT_EQ(scaler.scale(), 16384);
  one.Backward(scaler, 1);
  scaler.Step(one.sgd);
  EXPECT_FALSE(scaler.step_was_skipped(one.sgd));
}

// One step each: the scale after it.
std::vector<double> Scales(GradScaler& scaler, OneWeight& one, const std::vector<float>& steps) {
  std::vector<double> scales;
  for (const float gradient : steps) {
    one.Backward(scaler, gradient);
    scaler.Step(one.sgd);
    EXPECT_EQ(scaler.step_was_skipped(one.sgd), gradient == kInf);
    scaler.Update();
    scales.push_back(scaler.scale());
  }
  return scales;
}

// As DeepSpeed's DynamicLossScaler of the same settings, step by step.
TEST(GradScaler, Hysteresis_BacksOffAtTheLastOverflowAndCountsAnewWhenItGrows) {
  GradScaler scaler({.init_scale = 64, .growth_interval = 2, .hysteresis = 3});
  OneWeight one;
  EXPECT_EQ(Scales(scaler, one, {kInf, 1, kInf, kInf, kInf}),
            (std::vector<double>{64, 64, 64, 32, 16}));
  EXPECT_EQ(Scales(scaler, one, {1, kInf, 1, 1}), (std::vector<double>{16, 8, 8, 16}));
  EXPECT_EQ(Scales(scaler, one, {kInf, kInf}), (std::vector<double>{16, 16}));
  // It goes on where it was.
  GradScaler resumed({.init_scale = 64, .growth_interval = 2, .hysteresis = 3});
  resumed.LoadState(scaler.SaveState());
  EXPECT_EQ(Scales(resumed, one, {kInf}), (std::vector<double>{8}));
  // A state without one begins to count.
  GradScaler other({.init_scale = 64, .hysteresis = 2});
  other.LoadState(GradScaler().SaveState());
  EXPECT_EQ(Scales(other, one, {kInf, kInf}), (std::vector<double>{65536, 32768}));
}

TEST(GradScaler, SmallestScale_ThrowsWhenItOverflows) {
  GradScaler scaler({.init_scale = 4, .growth_interval = 10, .min_scale = 1.5});
  OneWeight one;
  EXPECT_EQ(Scales(scaler, one, {kInf, kInf, 1}), (std::vector<double>{2, 1.5, 1.5}));
  one.Backward(scaler, kInf);
  scaler.Step(one.sgd);
  EXPECT_THROW(scaler.Update(), c10::Error);
  EXPECT_THROW(GradScaler({.init_scale = 1, .min_scale = 2}), c10::Error);
  EXPECT_THROW(GradScaler({.hysteresis = 0}), c10::Error);
}

TEST(GradScaler, FixedScale_StaysAndSkipsOverflows) {
  GradScaler scaler({.init_scale = 128, .growth_interval = 1, .dynamic = false});
  OneWeight one;
  EXPECT_EQ(Scales(scaler, one, {1, kInf, 1}), (std::vector<double>{128, 128, 128}));
}

TEST(GradScaler, StateOfAnotherRun_DoesNotReplaceWhatTheOptionsFix) {
  GradScaler grown({.init_scale = 1048576, .growth_interval = 3});
  OneWeight one;
  Scales(grown, one, {1, 1});
  GradScaler fixed({.init_scale = 128, .dynamic = false});
  fixed.LoadState(grown.SaveState());
  EXPECT_EQ(fixed.scale(), 128);
  EXPECT_EQ(fixed.growth_tracker(), 0);
  EXPECT_EQ(Scales(fixed, one, {1, kInf}), (std::vector<double>{128, 128}));
  // One that is not fixed goes on from there.
  GradScaler dynamic({.growth_interval = 3});
  dynamic.LoadState(fixed.SaveState());
  EXPECT_EQ(Scales(dynamic, one, {1, 1, 1}), (std::vector<double>{128, 128, 256}));

  GradScaler small({.init_scale = 0.25});
  GradScaler limited({.init_scale = 64, .min_scale = 1});
  limited.LoadState(small.SaveState());
  EXPECT_EQ(limited.scale(), 1);
}

TEST(GradScaler, D32_UnscaleTwice_DividesOnce) {
  GradScaler scaler({.init_scale = 4});
  OneWeight one;
  one.Backward(scaler, 0.5);
  scaler.Unscale(one.sgd);
  scaler.Unscale(one.sgd);
  EXPECT_FLOAT_EQ(one.weight.grad()[1].item<float>(), 0.5);
  scaler.Step(one.sgd);
  EXPECT_FLOAT_EQ(one.weight[1].item<float>(), -0.5);
}

TEST(GradScaler, TwoOptimizers_OnlyTheOverflownOneSkips) {
  GradScaler scaler({.init_scale = 4});
  OneWeight good, bad;
  good.Backward(scaler, 1);
  bad.Backward(scaler, kInf);
  scaler.Step(good.sgd);
  scaler.Step(bad.sgd);
  EXPECT_FALSE(scaler.step_was_skipped(good.sgd));
  EXPECT_TRUE(scaler.step_was_skipped(bad.sgd));
  scaler.Update();
  EXPECT_EQ(scaler.scale(), 2);
}

TEST(GradScaler, Rescale_ContinuesTheSumOfScaledGradients) {
  GradScaler scaler({.init_scale = 4});
  OneWeight one;
  one.Backward(scaler, 0.5);
  scaler.Unscale(one.sgd);
  EXPECT_EQ(one.weight.grad()[1].item<double>(), 0.5);
  scaler.Rescale(one.sgd);
  scaler.Scale(one.weight.sum()).backward();
  scaler.Step(one.sgd);
  EXPECT_FLOAT_EQ(one.weight[1].item<float>(), -1.5);
}

TEST(GradScaler, ReopenAfterAnOverflow_IsSteppedAgainAndBacksOff) {
  GradScaler scaler({.init_scale = 4});
  OneWeight one;
  for (const float gradient : {kInf, 1.0f}) {
    one.Backward(scaler, gradient);
    scaler.Step(one.sgd);
    EXPECT_EQ(scaler.step_was_skipped(one.sgd), gradient == kInf);
    scaler.Reopen(one.sgd);
  }
  EXPECT_FLOAT_EQ(one.weight[1].item<float>(), -1);
  EXPECT_TRUE(scaler.pending());
  scaler.Update();
  EXPECT_EQ(scaler.scale(), 2);
  EXPECT_FALSE(scaler.pending());
}

// As a program that looks at the norm of the unscaled gradients, and zeroes them where it is none.
TEST(GradScaler, ReopenAfterAnOverflowWithoutAStep_BacksOff) {
  GradScaler scaler({.init_scale = 4});
  OneWeight one;
  one.Backward(scaler, kInf);
  scaler.Unscale(one.sgd);
  scaler.Reopen(one.sgd);
  EXPECT_TRUE(scaler.pending());
  scaler.Update();
  EXPECT_EQ(scaler.scale(), 2);
}

TEST(GradScaler, StepUnscaledAfterAnUpdate_DividesNoMoreAndCountsNoOverflowAgain) {
  for (const bool reset : {false, true}) {
    GradScaler scaler({.init_scale = 8});
    OneWeight one, other;
    EXPECT_THROW(scaler.StepUnscaled(one.sgd), c10::Error);
    one.Backward(scaler, 1);
    other.Backward(scaler, kInf);
    scaler.Unscale(one.sgd);
    scaler.Unscale(other.sgd);
    scaler.Update();
    EXPECT_EQ(scaler.scale(), 4);
    if (reset) scaler.Reset();
    scaler.StepUnscaled(one.sgd);
    scaler.StepUnscaled(other.sgd);
    EXPECT_EQ(one.weight[1].item<float>(), -1);
    EXPECT_EQ(other.weight[0].item<float>(), 0);
    EXPECT_FALSE(scaler.step_was_skipped(one.sgd));
    EXPECT_TRUE(scaler.step_was_skipped(other.sgd));
    EXPECT_THROW(scaler.StepUnscaled(one.sgd), c10::Error);
    scaler.Update();
    EXPECT_EQ(scaler.scale(), 4);
    // The same gradients once more, and then others.
    scaler.StepUnscaled(one.sgd);
    EXPECT_EQ(one.weight[1].item<float>(), -2);
    scaler.Update();
    scaler.Reopen(one.sgd);
    EXPECT_THROW(scaler.StepUnscaled(one.sgd), c10::Error);
  }
}

TEST(GradScaler, WrongOrder_IsAnError) {
  GradScaler scaler;
  OneWeight one;
  EXPECT_THROW(scaler.Update(), c10::Error);
  one.Backward(scaler, 1);
  scaler.Step(one.sgd);
  EXPECT_THROW(scaler.Unscale(one.sgd), c10::Error);
  EXPECT_THROW(scaler.Step(one.sgd), c10::Error);
  scaler.Update();
  EXPECT_THROW(GradScaler({.backoff_factor = 1}), c10::Error);
}

TEST(GradScaler, Fp16Parameters_AreRefused) {
  GradScaler scaler;
  at::Tensor weight = at::zeros({1}, at::kHalf).requires_grad_(true);
  FusedSGD sgd({weight});
  weight.mutable_grad() = at::zeros({1}, at::kHalf);
  EXPECT_THROW(scaler.Unscale(sgd), c10::Error);
}

TEST(GradScaler, Disabled_PassesThrough) {
  GradScaler scaler({.enabled = false});
  OneWeight one;
  one.Backward(scaler, 0.5);
  scaler.Unscale(one.sgd);
  scaler.Step(one.sgd);
  scaler.Update();
  EXPECT_FLOAT_EQ(one.weight[1].item<float>(), -0.5);
  EXPECT_EQ(scaler.scale(), 1);
}

TEST(GradScaler, SaveAndLoad_KeepScaleAndTracker) {
  GradScaler first({.init_scale = 4, .growth_interval = 3});
  OneWeight one;
  for (int i = 0; i < 2; ++i) {
    one.Backward(first, 1);
    first.Step(one.sgd);
    first.Update();
  }
  GradScaler second({.growth_interval = 3});
  second.LoadState(first.SaveState());
  EXPECT_EQ(second.scale(), 4);
  EXPECT_EQ(second.growth_tracker(), 2);
  one.Backward(second, 1);
  second.Step(one.sgd);
  second.Update();
  EXPECT_EQ(second.scale(), 8);
  EXPECT_THROW(second.LoadState({{"scale", {0}}, {"growth_tracker", {0}}}), c10::Error);
}

// Stands for a rank whose peer overflowed.
class OverflownPeer : public Comm {
 public:
  int rank() const override { return 0; }
  int size() const override { return 2; }
  void AllReduce(at::Tensor& tensor, ReduceOp op) override {
    EXPECT_EQ(op, ReduceOp::kMax);
    tensor.fill_(1);
  }
  std::vector<at::Tensor> AllGather(const at::Tensor& tensor) override { return {tensor, tensor}; }
  void AllGatherParts(at::Tensor&) override {}
  at::Tensor ReduceScatter(const at::Tensor& flat, ReduceOp) override { return flat; }
  void Broadcast(at::Tensor&, int) override {}
  void Scatter(const std::vector<at::Tensor>&, at::Tensor&, int) override {}
  std::vector<std::string> AllGatherBytes(const std::string& b) override { return {b, b}; }
  std::string BroadcastBytes(const std::string& b, int) override { return b; }
  void Barrier() override {}
};

TEST(GradScaler, OverflowOnAnotherRank_SkipsHereToo) {
  OverflownPeer comm;
  GradScaler scaler({}, &comm);
  OneWeight one;
  one.Backward(scaler, 1);
  scaler.Step(one.sgd);
  EXPECT_TRUE(scaler.step_was_skipped(one.sgd));
}

TEST(GradScaler, HalfLoss_IsScaledInFloat) {
  for (const at::ScalarType type : {at::kHalf, at::kBFloat16}) {
    GradScaler scaler;
    const at::Tensor weight = at::full({1}, 2.0f).requires_grad_(true);
    const at::Tensor loss = weight.to(type).sum();
    const at::Tensor scaled = scaler.Scale(loss);
    EXPECT_EQ(scaled.item<double>(), 2 * 65536.0);
  }
  GradScaler scaler;
  EXPECT_EQ(scaler.Scale(at::full({}, 1.0, at::kDouble)).scalar_type(), at::kDouble);
}

TEST(GradScaler, SparseGradients_AreUnscaledAndChecked) {
  GradScaler scaler({.init_scale = 8});
  const at::Tensor weight = at::zeros({4, 2}).requires_grad_(true);
  optim::SGD sgd(std::vector<at::Tensor>{weight}, optim::SGDOptions(1));
  const auto handle = WrapTorchOptimizer(sgd);
  const auto set_grad = [&](float value) {
    weight.mutable_grad() = at::sparse_coo_tensor(at::tensor({1, 1}, at::kLong).view({1, 2}),
                                                  at::full({2, 2}, value), {4, 2});
  };
  scaler.Scale(at::zeros({}));
  set_grad(8);
  scaler.Step(*handle);
  EXPECT_FALSE(scaler.step_was_skipped(*handle));
  scaler.Update();
  EXPECT_EQ(weight[1][0].item<float>(), -2);
  set_grad(kInf);
  scaler.Step(*handle);
  EXPECT_TRUE(scaler.step_was_skipped(*handle));
  EXPECT_EQ(weight[1][0].item<float>(), -2);
}

TEST(GradScaler, NextOptimizerAtTheSameAddress_StartsAfresh) {
  GradScaler scaler;
  std::optional<OneWeight> fold;
  fold.emplace();
  fold->Backward(scaler, 1);
  scaler.Step(fold->sgd);
  fold.emplace();
  fold->Backward(scaler, 1);
  scaler.Step(fold->sgd);
  EXPECT_EQ(fold->weight[0].item<float>(), -1);
}

}  // namespace
}  // namespace muster
