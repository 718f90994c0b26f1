#include "worker/train/torch_scheduler.h"

#include <limits>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/optim/schedulers/lr_scheduler.h"
#include "torch/optim/schedulers/reduce_on_plateau_scheduler.h"
#include "torch/optim/schedulers/step_lr.h"
#include "torch/optim/sgd.h"
#include "worker/collective/test_error.h"
#include "worker/train/accumulation.h"
#include "worker/train/prepared_scheduler.h"
#include "worker/train/torch_optimizer.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
namespace optim = torch::optim;

struct OneSgd {
  explicit OneSgd(double lr = 1)
      : sgd(std::vector<at::Tensor>{at::ones({1}).requires_grad_(true)}, optim::SGDOptions(lr)),
        handle(WrapTorchOptimizer(sgd)) {}
  optim::SGD sgd;
  std::unique_ptr<OptimizerHandle> handle;
  double lr() const { return handle->lr(0); }
};

TEST(TorchScheduler, StepLr_ContinuesExactlyAndGoesBack) {
  OneSgd a, b;
  optim::StepLR inner_a(a.sgd, 2, 0.5), inner_b(b.sgd, 2, 0.5);
  inner_a.step();  // the user's, before it is prepared
  const auto first = WrapTorchScheduler(inner_a, *a.handle);
  const auto second = WrapTorchScheduler(inner_b, *b.handle);
  EXPECT_EQ(first->step_count(), 1);
  first->Step();
  first->Step();
  EXPECT_EQ(a.lr(), 0.5);
  const PlainState early = first->SaveState();
  second->LoadState(early);
  EXPECT_EQ(second->step_count(), 3);
  for (int i = 0; i < 5; ++i) {
    EXPECT_EQ(a.lr(), b.lr());
    first->Step();
    second->Step();
  }
  second->LoadState(early);
  EXPECT_EQ(second->step_count(), 3);
  EXPECT_EQ(b.lr(), 0.5);
}

TEST(TorchScheduler, Gated_StepsOncePerWindow) {
  OneSgd one;
  optim::StepLR inner(one.sgd, 1, 0.5);
  const auto scheduler = WrapTorchScheduler(inner, *one.handle);
  PreparedScheduler gate(*scheduler, {});
  for (int i = 0; i < 12; ++i) {
    MicroStep step;
    step.sync = i % 4 == 3;
    gate.Step(step, false);
  }
  EXPECT_EQ(scheduler->step_count(), 3);
  EXPECT_EQ(one.lr(), 0.25) << "LibTorch's first step decays nothing";
}

// A user's scheduler, with its own counter.
class Alternating : public optim::LRScheduler {
 public:
  using LRScheduler::LRScheduler;

 private:
  std::vector<double> get_lrs() override {
    high_ = !high_;
    return std::vector<double>(get_current_lrs().size(), high_ ? 1.0 : 0.1);
  }
  bool high_ = false;
};

TEST(TorchScheduler, UsersClass_IsReplayedToWhereItWas) {
  OneSgd a, b;
  Alternating inner_a(a.sgd), inner_b(b.sgd);
  const auto first = WrapTorchScheduler(inner_a, *a.handle);
  const auto second = WrapTorchScheduler(inner_b, *b.handle);
  const PlainState start = first->SaveState();
  for (int i = 0; i < 3; ++i) first->Step();
  second->LoadState(first->SaveState());
  EXPECT_EQ(b.lr(), 1.0);
  second->Step();
  EXPECT_EQ(b.lr(), 0.1);
  EXPECT_THAT(ErrorOf([&] { second->LoadState(start); }), HasSubstr("cannot go back"));
}

TEST(TorchScheduler, OfAnotherOptimizer_IsRefused) {
  OneSgd mine, other(1);
  optim::StepLR step(other.sgd, 2, 0.5);
  EXPECT_THAT(ErrorOf([&] { WrapTorchScheduler(step, *mine.handle); }),
              HasSubstr("made for another optimizer"));
  optim::ReduceLROnPlateauScheduler plateau(other.sgd);
  EXPECT_THAT(ErrorOf([&] { WrapTorchPlateau(plateau, *mine.handle); }),
              HasSubstr("made for another optimizer"));
  EXPECT_EQ(mine.lr(), 1);
}

TEST(TorchPlateau, SavedInTheMiddle_ContinuesExactly) {
  const auto make = [](OneSgd& one) {
    return optim::ReduceLROnPlateauScheduler(one.sgd, optim::ReduceLROnPlateauScheduler::min, 0.5,
                                             2, 1e-4, optim::ReduceLROnPlateauScheduler::rel, 1);
  };
  OneSgd a, b;
  auto inner_a = make(a), inner_b = make(b);
  const auto first = WrapTorchPlateau(inner_a, *a.handle);
  const auto second = WrapTorchPlateau(inner_b, *b.handle);
  EXPECT_EQ(a.lr(), 1) << "wrapping changes nothing";
  second->LoadState(first->SaveState());  // before any metric
  for (const double metric : {1.0, 1.5, 1.5}) first->Step(metric);
  second->LoadState(first->SaveState());
  EXPECT_EQ(second->step_count(), 3);
  bool reduced = false;
  for (const double metric : {1.5, 1.4, 0.9, 0.95, 0.95, 0.95, 0.95, 0.95}) {
    first->Step(metric);
    second->Step(metric);
    EXPECT_EQ(a.lr(), b.lr());
    reduced = reduced || a.lr() < 1;
  }
  EXPECT_TRUE(reduced);
  a.sgd.add_param_group(optim::OptimizerParamGroup({at::ones({1}).requires_grad_(true)}));
  EXPECT_THAT(ErrorOf([&] { first->Step(1); }), HasSubstr("made for 1 parameter groups"));
}

}  // namespace
}  // namespace muster
