#include "muster/internal/step_controller.h"

#include <limits>
#include <memory>

#include "ATen/ops/ones.h"
#include "c10/util/Exception.h"
#include "gtest/gtest.h"
#include "muster/internal/test_parts.h"
#include "worker/train/optimizer.h"

namespace muster::internal {
namespace {

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

}  // namespace
}  // namespace muster::internal
