#include "muster/internal/step_controller.h"

#include <functional>
#include <limits>
#include <memory>
#include <optional>
#include <string>

#include "ATen/ops/ones.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "muster/internal/test_parts.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/optimizer.h"

namespace muster::internal {
namespace {

using ::testing::HasSubstr;

// One weight of 1, stepped by SGD with rate 1.
class StepControllerTest : public testing::Test {
 protected:
  static AcceleratorOptions Options() {
    AcceleratorOptions options;
    options.gradient_accumulation_steps = 2;
    return options;
  }
  // A micro-step whose gradient is `gradient`.
  void MicroStep(double gradient) {
    const AccumulateScope scope = steps_.Accumulate();
    steps_.Backward((weight_ * gradient).sum());
    slot_->Step();
    slot_->ZeroGrad(true);
  }

  const at::Tensor weight_ = at::ones({1}).requires_grad_(true);
  FusedSGD sgd_{{weight_}, {.lr = 1}};
  Parts parts_{Options()};
  StepController& steps_ = parts_.steps;
  const std::shared_ptr<OptimizerSlot> slot_ = parts_.registry.AddOptimizer(
      std::make_shared<OptimizerSlot>(&steps_, &sgd_, nullptr, &sgd_, sgd_.id()));
};

TEST_F(StepControllerTest, Window_StepsOnTheMeanAtItsEnd) {
  MicroStep(0.25);
  EXPECT_FALSE(steps_.sync_gradients());
  EXPECT_EQ(weight_.item<double>(), 1);
  MicroStep(0.75);
  EXPECT_EQ(weight_.item<double>(), 0.5);
  EXPECT_EQ(slot_->steps(), 1);
  EXPECT_TRUE(parts_.registry.stepped());
  EXPECT_TRUE(steps_.between_windows());
}

TEST_F(StepControllerTest, FirstStepWithoutAnyGradient_IsWarnedOf) {
  const auto warned = [&](const std::function<void()>& body) {
    testing::internal::CaptureStderr();
    body();
    const std::string text = testing::internal::GetCapturedStderr();
    return text.find("no parameter of this optimizer has a gradient") != std::string::npos;
  };
  {
    Parts parts{{}};
    const at::Tensor frozen = at::ones({1});
    FusedSGD sgd({frozen}, {.lr = 1});
    const auto slot = parts.registry.AddOptimizer(
        std::make_shared<OptimizerSlot>(&parts.steps, &sgd, nullptr, &sgd, sgd.id()));
    EXPECT_FALSE(warned([&] { slot->Step(); }));
  }
  EXPECT_FALSE(warned([&] {
    MicroStep(0.25);
    MicroStep(0.25);
  }));
  Parts parts{{}};
  const at::Tensor weight = at::ones({1}).requires_grad_(true);
  FusedSGD sgd({weight}, {.lr = 1});
  const auto slot = parts.registry.AddOptimizer(
      std::make_shared<OptimizerSlot>(&parts.steps, &sgd, nullptr, &sgd, sgd.id()));
  EXPECT_TRUE(warned([&] { slot->Step(); }));
  EXPECT_FALSE(warned([&] { slot->Step(); })) << "once";
}

TEST_F(StepControllerTest, Clipping_IsRefusedWithinAWindow) {
  MicroStep(1);
  EXPECT_THROW(steps_.ClipGradNorm({weight_}, 1, 2), c10::Error);
  steps_.Reset();
  EXPECT_TRUE(steps_.between_windows());
}

TEST_F(StepControllerTest, MicroStepInAMicroStep_IsRefused) {
  const AccumulateScope scope = steps_.Accumulate();
  EXPECT_TRUE(steps_.in_micro_step());
  EXPECT_THROW(steps_.Accumulate(), c10::Error);
}

TEST_F(StepControllerTest, GradientsZeroedWithinAWindow_AreMissed) {
  MicroStep(1);
  weight_.mutable_grad().reset();
  EXPECT_THROW(MicroStep(1), c10::Error);
}

// Two weights of 1 and their optimizers, with a loss scale.
class ForgottenOptimizer : public testing::Test {
 protected:
  static AcceleratorOptions Options() {
    AcceleratorOptions options;
    options.mixed_precision = "fp16";
    options.grad_scaler.init_scale = 16;
    return options;
  }
  std::shared_ptr<OptimizerSlot> Add(FusedSGD& sgd) {
    return parts_.registry.AddOptimizer(
        std::make_shared<OptimizerSlot>(&parts_.steps, &sgd, nullptr, &sgd, sgd.id()));
  }
  void Forget(FusedSGD& sgd) {
    parts_.registry.FindOptimizer(&sgd, [](const OptimizerSlot&) { return false; });
    parts_.steps.OptimizerForgotten();
  }

  const at::Tensor weight_ = at::ones({1}).requires_grad_(true);
  const at::Tensor other_weight_ = at::ones({1}).requires_grad_(true);
  FusedSGD sgd_{{weight_}, {.lr = 1}};
  FusedSGD other_sgd_{{other_weight_}, {.lr = 1}};
  Parts parts_{Options()};
  const std::shared_ptr<OptimizerSlot> slot_ = Add(sgd_), other_slot_ = Add(other_sgd_);
};

TEST_F(ForgottenOptimizer, WithUnscaledGradients_IsUnknownToTheScaler) {
  parts_.steps.Backward((weight_ + other_weight_).sum());
  parts_.steps.FinishGradients(slot_.get());
  Forget(sgd_);
  EXPECT_THROW(parts_.steps.scaler()->StepUnscaled(sgd_), c10::Error);
  EXPECT_EQ(parts_.steps.scaler()->scale(), 16);
  EXPECT_EQ(parts_.steps.scaler()->growth_tracker(), 1);
  other_slot_->Step();
  EXPECT_EQ(other_weight_.item<double>(), 0);
}

TEST_F(ForgottenOptimizer, WhileAnotherOneHasUnscaledGradients_LeavesThemToItsStep) {
  parts_.steps.Backward((weight_ + other_weight_).sum());
  parts_.steps.FinishGradients();
  Forget(sgd_);
  other_slot_->Step();
  EXPECT_EQ(other_weight_.item<double>(), 0);
}

TEST_F(ForgottenOptimizer, WithAllOthers_IsUnknownToTheScaler) {
  parts_.steps.Backward((weight_ + other_weight_).sum());
  parts_.steps.FinishGradients();
  parts_.registry.Clear();
  parts_.steps.Reset();
  EXPECT_THROW(parts_.steps.scaler()->StepUnscaled(sgd_), c10::Error);
  // A step that was not made does not count.
  EXPECT_EQ(parts_.steps.scaler()->growth_tracker(), 0);
}

// Gradients in a place that fails: the second of two weights' when it is written.
class TornGradients : public testing::Test {
 protected:
  class Place : public Page {
   public:
    void Require(bool write, const char* op) override {
      TORCH_CHECK(!write || !fails, op, ": the disk has failed");
    }
    bool fails = false;
  };
  struct Run {
    explicit Run(const AcceleratorOptions& options) : parts(options) {}

    // Gradients of 2, which weighted losses hold times `tokens` until the step.
    void Backward(std::optional<double> tokens) {
      parts.steps.Backward((first * 2 + second * 2).sum(), tokens);
      flat = second.grad().clone();
      place = std::make_unique<Place>();
      registration.emplace(flat, place.get());
      second.mutable_grad() = PagedView(flat, {1}, {1}, 0);
    }
    std::string ErrorOf(const std::function<void()>& body) const {
      try {
        body();
      } catch (const c10::Error& error) {
        return error.what_without_backtrace();
      }
      return "";
    }

    const at::Tensor first = at::ones({1}).requires_grad_(true);
    const at::Tensor second = at::ones({1}).requires_grad_(true);
    at::Tensor flat;
    std::unique_ptr<Place> place;
    std::optional<PageRegistration> registration;
    FusedSGD sgd{{first, second}, {.lr = 1}};
    Parts parts;
    const std::shared_ptr<OptimizerSlot> slot = parts.registry.AddOptimizer(
        std::make_shared<OptimizerSlot>(&parts.steps, &sgd, nullptr, &sgd, sgd.id()));
  };

  // `scale`: what scales or clips, and fails. A later step() must not step on what is left.
  static void ExpectRefused(Run& run, std::optional<double> tokens,
                            const std::function<void()>& scale) {
    run.Backward(tokens);
    run.place->fails = true;
    EXPECT_THAT(run.ErrorOf(scale), HasSubstr("the disk has failed"));
    run.place->fails = false;
    for (int again = 0; again < 2; ++again) {
      EXPECT_THAT(run.ErrorOf([&] { run.slot->Step(); }), HasSubstr("partly scaled or clipped"));
    }
    EXPECT_EQ(run.first.item<double>(), 1);
    EXPECT_EQ(run.second.item<double>(), 1);
    // The next window is a whole one.
    run.slot->ZeroGrad(true);
    run.Backward(tokens);
    run.slot->Step();
    EXPECT_LT(run.first.item<double>(), 1);
    EXPECT_EQ(run.first.item<double>(), run.second.item<double>());
  }
};

TEST_F(TornGradients, ScalingThatFails_RefusesTheStepUntilTheyAreZeroed) {
  Run run({});
  ExpectRefused(run, 4.0, [&] { run.slot->Step(); });
}

TEST_F(TornGradients, ClippingInTheStepThatFails_RefusesTheStepUntilTheyAreZeroed) {
  AcceleratorOptions options;
  options.gradient_clipping = 0.5;
  Run run(options);
  ExpectRefused(run, std::nullopt, [&] { run.slot->Step(); });
}

TEST_F(TornGradients, ClippingOfTheLoopThatFails_RefusesTheStepUntilTheyAreZeroed) {
  Run by_norm({});
  ExpectRefused(by_norm, std::nullopt, [&] {
    by_norm.parts.steps.ClipGradNorm({by_norm.first, by_norm.second}, 0.5, 2);
  });
  Run by_value({});
  ExpectRefused(by_value, std::nullopt, [&] {
    by_value.parts.steps.ClipGradValue({by_value.first, by_value.second}, 0.5);
  });
}

TEST_F(TornGradients, LoadedState_IsAWholeOne) {
  Run run({});
  run.Backward(4.0);
  run.place->fails = true;
  EXPECT_NE(run.ErrorOf([&] { run.slot->Step(); }), "");
  run.place->fails = false;
  run.parts.steps.Reset();
  run.first.mutable_grad().reset();
  run.second.mutable_grad().reset();
  run.Backward(4.0);
  run.slot->Step();
  EXPECT_EQ(run.first.item<double>(), -1);
}

// What is refused before anything has changed tears nothing.
TEST_F(TornGradients, BadArgumentsOfClipping_LeaveThemWhole) {
  Run run({});
  run.Backward(std::nullopt);
  EXPECT_NE(run.ErrorOf([&] { run.parts.steps.ClipGradNorm({run.first, run.second}, -1, 2); }), "");
  EXPECT_NE(run.ErrorOf([&] { run.parts.steps.ClipGradValue({run.first, run.second}, -1); }), "");
  run.slot->Step();
  EXPECT_EQ(run.first.item<double>(), -1);
}

}  // namespace
}  // namespace muster::internal
