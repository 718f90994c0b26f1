#include "worker/train/lr_scheduler.h"

#include <cmath>
#include <limits>
#include <optional>
#include <string>
#include <utility>

#include "c10/util/Exception.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

constexpr double kPi = 3.14159265358979323846;

class FakeTarget : public LrTarget {
 public:
  explicit FakeTarget(std::vector<double> lrs) : lrs_(std::move(lrs)) {}
  int64_t num_groups() const override { return static_cast<int64_t>(lrs_.size()); }
  double lr(int64_t group) const override { return lrs_[group]; }
  void set_lr(int64_t group, double lr) override { lrs_[group] = lr; }
  std::optional<double> momentum(int64_t) const override { return momentum_; }
  void set_momentum(int64_t, double momentum) override { momentum_ = momentum; }
  void AddGroup(double lr) { lrs_.push_back(lr); }
  void HaveNoMomentum() { momentum_.reset(); }

 private:
  std::vector<double> lrs_;
  std::optional<double> momentum_ = 0.5;
};

// The rates of torch's recursive form: lr(s) = next(s, lr(s-1)).
template <typename Next>
void ExpectRecursive(const LrSchedulePtr& schedule, double base, double first, int steps,
                     Next next) {
  double lr = first;
  EXPECT_NEAR(schedule->Lr(0, base), lr, 1e-12);
  for (int s = 1; s <= steps; ++s) {
    lr = next(s, lr);
    EXPECT_NEAR(schedule->Lr(s, base), lr, 1e-9) << "step " << s;
  }
}

TEST(LrSchedule, ClosedForms_EqualTorchsRecursiveForms) {
  const double b = 0.1;
  ExpectRecursive(StepLR(3, 0.5), b, b, 20, [](int s, double lr) { return s % 3 ? lr : lr * 0.5; });
  ExpectRecursive(MultiStepLR({6, 2, 5, 5}, 0.3), b, b, 10, [](int s, double lr) {
    return s == 2 || s == 6 ? lr * 0.3 : s == 5 ? lr * 0.3 * 0.3 : lr;
  });
  ExpectRecursive(ExponentialLR(0.9), b, b, 50, [](int, double lr) { return lr * 0.9; });
  ExpectRecursive(ConstantLR(0.5, 4), b, b * 0.5, 9,
                  [](int s, double lr) { return s == 4 ? lr / 0.5 : lr; });
  ExpectRecursive(LinearLR(0.25, 0.75, 6), b, b * 0.25, 10, [](int s, double lr) {
    if (s > 6) return lr;
    return lr * (1 + (0.75 - 0.25) / (6 * 0.25 + (s - 1) * (0.75 - 0.25)));
  });
  ExpectRecursive(PolynomialLR(7, 2), b, b, 12, [](int s, double lr) {
    if (s > 7) return lr;
    return lr * std::pow((1 - s / 7.0) / (1 - (s - 1) / 7.0), 2);
  });
  const double eta = 0.01;
  const int t = 8;
  ExpectRecursive(CosineAnnealingLR(t, eta), b, b, 30, [&](int s, double lr) {
    if ((s - 1 - t) % (2 * t) == 0) return lr + (b - eta) * (1 - std::cos(kPi / t)) / 2;
    return (1 + std::cos(kPi * s / t)) / (1 + std::cos(kPi * (s - 1) / t)) * (lr - eta) + eta;
  });
}

TEST(LrSchedule, WarmRestarts_EqualTorchsCounters) {
  for (const int t_mult : {1, 2, 3}) {
    const LrSchedulePtr schedule = CosineAnnealingWarmRestarts(3, t_mult, 0.02);
    int t_cur = 0, t_i = 3;
    for (int s = 0; s < 60; ++s) {
      EXPECT_NEAR(schedule->Lr(s, 0.2), 0.02 + 0.18 * (1 + std::cos(kPi * t_cur / t_i)) / 2, 1e-12);
      if (++t_cur >= t_i) {
        t_cur -= t_i;
        t_i *= t_mult;
      }
    }
  }
}

TEST(LrSchedule, Warmups_RiseFromZeroToTheBase) {
  for (const LrSchedulePtr& schedule :
       {LinearWithWarmup(4, 10), CosineWithWarmup(4, 10), ConstantWithWarmup(4),
        InverseSqrtWithWarmup(4), WithWarmup(4, CosineAnnealingLR(10))}) {
    for (int s = 0; s <= 4; ++s) EXPECT_NEAR(schedule->Lr(s, 0.4), 0.1 * s, 1e-12);
  }
  EXPECT_NEAR(LinearWithWarmup(4, 10)->Lr(7, 0.4), 0.2, 1e-12);
  EXPECT_EQ(LinearWithWarmup(4, 10)->Lr(99, 0.4), 0);
  EXPECT_NEAR(CosineWithWarmup(4, 10)->Lr(7, 0.4), 0.2, 1e-12);
  EXPECT_NEAR(InverseSqrtWithWarmup(4)->Lr(16, 0.4), 0.2, 1e-12);
  EXPECT_NEAR(WithWarmup(4, CosineAnnealingLR(10))->Lr(9, 0.4), 0.2, 1e-12);
}

TEST(LrSchedule, OneCycle_GivesTorchsNumbers) {
  const OneCycleOptions options{.max_lr = 0.2, .total_steps = 6};
  const LrSchedulePtr schedule = OneCycleLR(options);
  const double expected[] = {0.008000000000000007, 0.19888308709018238, 0.1623491307899526,
                             0.09252742053339501,  0.02669550603776612, 8e-07};
  for (int s = 0; s < 6; ++s) EXPECT_NEAR(schedule->Lr(s, 99), expected[s], 1e-12);
  EXPECT_EQ(schedule->last_step(), 5);
  EXPECT_NEAR(*schedule->Momentum(0), 0.95, 1e-12);
  EXPECT_NEAR(*schedule->Momentum(5), 0.95, 1e-12);

  OneCycleOptions three = options;
  three.total_steps = 11;
  three.three_phase = true;
  three.cosine = false;
  const LrSchedulePtr linear = OneCycleLR(three);  // phases end at 2.3, 4.6 and 10
  EXPECT_NEAR(linear->Lr(0, 1), 0.008, 1e-12);
  EXPECT_NEAR(linear->Lr(1, 1), 0.008 + (0.2 - 0.008) * 1 / 2.3, 1e-12);
  EXPECT_NEAR(linear->Lr(4, 1), 0.2 + (0.008 - 0.2) * (4 - 2.3) / 2.3, 1e-12);
  EXPECT_NEAR(linear->Lr(10, 1), 0.008 / 1e4, 1e-12);
}

TEST(LrSchedule, OneCycleBeyondItsEnd_StaysAtItsLastRate) {
  for (const bool cosine : {true, false}) {
    const LrSchedulePtr cycle = OneCycleLR({.max_lr = 0.2, .total_steps = 10, .cosine = cosine});
    const LrSchedulePtr sequence = SequentialLR({cycle, StepLR(1)}, {20});
    for (const int64_t s : {10, 13, 19}) {
      EXPECT_EQ(sequence->Lr(s, 1), cycle->Lr(9, 1)) << s;
      EXPECT_EQ(*sequence->Momentum(s), *cycle->Momentum(9)) << s;
    }
  }
}

TEST(LrSchedule, ChainWithOneCycle_MovesTheMomentum) {
  const LrSchedulePtr cycle = OneCycleLR({.max_lr = 0.2, .total_steps = 10});
  const LrSchedulePtr chain = ChainedLR({ConstantLR(0.5, 3), cycle, StepLR(100)});
  for (int64_t s = 0; s < 10; ++s) EXPECT_EQ(chain->Momentum(s), cycle->Momentum(s)) << s;
  EXPECT_EQ(ChainedLR({StepLR(1), StepLR(2)})->Momentum(3), std::nullopt);
}

TEST(LrSchedule, SequentialAndChained_Compose) {
  const LrSchedulePtr sequence = SequentialLR({ConstantLR(0.1, 100), ExponentialLR(0.5)}, {3});
  EXPECT_NEAR(sequence->Lr(2, 1.0), 0.1, 1e-12);
  EXPECT_NEAR(sequence->Lr(3, 1.0), 1.0, 1e-12);
  EXPECT_NEAR(sequence->Lr(5, 1.0), 0.25, 1e-12);
  const LrSchedulePtr chain = ChainedLR({ConstantLR(0.1, 2), ExponentialLR(0.5)});
  EXPECT_NEAR(chain->Lr(1, 1.0), 0.05, 1e-12);
  EXPECT_NEAR(chain->Lr(2, 1.0), 0.25, 1e-12);
  EXPECT_THROW(SequentialLR({StepLR(1)}, {3}), c10::Error);
  EXPECT_THROW(StepLR(0), c10::Error);
  EXPECT_THROW(LinearLR(0.0), c10::Error);
}

TEST(LrScheduler, Groups_KeepTheirOwnBase) {
  FakeTarget target({1.0, 0.1});
  LrScheduler scheduler(target, ExponentialLR(0.5));
  scheduler.Step();
  EXPECT_EQ(scheduler.last_lr(), (std::vector<double>{0.5, 0.05}));
  EXPECT_THROW(LrScheduler(target, std::vector<LrSchedulePtr>{StepLR(1)}), c10::Error);
}

TEST(LrScheduler, OneCycle_StopsAtItsLastStepAndMovesMomentum) {
  FakeTarget target({0.1});
  LrScheduler scheduler(target, OneCycleLR({.max_lr = 0.2, .total_steps = 4}));
  EXPECT_NEAR(*target.momentum(0), 0.95, 1e-12);
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(scheduler.Step());
  const double end = target.lr(0);
  EXPECT_NEAR(end, 8e-7, 1e-12);
  EXPECT_FALSE(scheduler.Step());
  EXPECT_EQ(target.lr(0), end);
  EXPECT_EQ(scheduler.step_count(), 3);
}

TEST(LrScheduler, OneOfSeveralThatHasEnded_StopsNoOther) {
  const LrSchedulePtr cycle = OneCycleLR({.max_lr = 0.2, .total_steps = 3});
  FakeTarget target({1.0, 1.0});
  LrScheduler scheduler(target, std::vector<LrSchedulePtr>{cycle, ExponentialLR(0.5)});
  for (int i = 0; i < 6; ++i) EXPECT_TRUE(scheduler.Step());
  EXPECT_EQ(scheduler.last_lr(), (std::vector<double>{cycle->Lr(2, 1.0), 1.0 / 64}));

  FakeTarget both({1.0, 1.0});
  LrScheduler ends(
      both, std::vector<LrSchedulePtr>{cycle, OneCycleLR({.max_lr = 0.2, .total_steps = 4})});
  for (int i = 0; i < 3; ++i) EXPECT_TRUE(ends.Step());
  EXPECT_FALSE(ends.Step());
  EXPECT_EQ(ends.step_count(), 3);
}

// As in torch: otherwise the momentum would silently stay unchanged.
TEST(LrScheduler, OneCycleOfAnOptimizerWithoutMomentum_IsRefusedUnlessItLeavesMomentumAlone) {
  FakeTarget target({0.1});
  target.HaveNoMomentum();
  OneCycleOptions options{.max_lr = 0.2, .total_steps = 4};
  try {
    LrScheduler scheduler(target, OneCycleLR(options));
    ADD_FAILURE() << "not refused";
  } catch (const c10::Error& error) {
    EXPECT_NE(std::string(error.what()).find("set cycle_momentum to false"), std::string::npos);
  }
  EXPECT_EQ(target.lr(0), 0.1);
  options.cycle_momentum = false;
  LrScheduler scheduler(target, OneCycleLR(options));
  EXPECT_TRUE(scheduler.Step());
}

// A run is extended: rates of the shorter schedule were not set by hand.
TEST(LrScheduler, StateOfAnotherSchedule_ContinuesWithTheRatesOfThisOne) {
  FakeTarget a({0.3}), b({7});
  LrScheduler shorter(a, LinearWithWarmup(0, 10)), longer(b, LinearWithWarmup(0, 20));
  for (int i = 0; i < 5; ++i) shorter.Step();
  longer.LoadState(shorter.SaveState());
  for (int s = 5; s < 12; ++s) {
    EXPECT_NEAR(b.lr(0), 0.3 * (1 - s / 20.0), 1e-15) << s;
    longer.Step();
  }

  // This rate was set by hand.
  a.set_lr(0, 0.06);
  longer.LoadState(shorter.SaveState());
  EXPECT_EQ(b.lr(0), 0.06);
  longer.Step();
  EXPECT_NEAR(b.lr(0), 0.06 * 14 / 15, 1e-15);

  // Older states do not distinguish the two, so their rates count as set by hand.
  PlainState old = shorter.SaveState();
  old.erase("scheduled_lr");
  longer.LoadState(old);
  EXPECT_EQ(b.lr(0), 0.06);
}

TEST(LrScheduler, StateFromBeyondTheEndOfThisSchedule_IsAtItsLastStep) {
  FakeTarget a({1.0}), b({1.0});
  LrScheduler longer(a, OneCycleLR({.max_lr = 0.2, .total_steps = 100, .cosine = false}));
  const LrSchedulePtr cycle = OneCycleLR({.max_lr = 0.2, .total_steps = 10, .cosine = false});
  LrScheduler shorter(b, cycle);
  for (int i = 0; i < 50; ++i) longer.Step();
  shorter.LoadState(longer.SaveState());
  EXPECT_EQ(b.lr(0), cycle->Lr(9, 1.0));
  EXPECT_EQ(b.momentum(0), cycle->Momentum(9));
  EXPECT_FALSE(shorter.Step());
}

TEST(LrScheduler, SaveAndLoad_ContinuesExactly) {
  FakeTarget a({0.3, 0.2}), b({7, 7});
  LrScheduler first(a, CosineWithWarmup(3, 20));
  for (int i = 0; i < 9; ++i) first.Step();
  LrScheduler second(b, CosineWithWarmup(3, 20));
  second.LoadState(first.SaveState());
  for (int i = 0; i < 9; ++i) {
    first.Step();
    second.Step();
    EXPECT_EQ(a.lr(0), b.lr(0));
    EXPECT_EQ(a.lr(1), b.lr(1));
  }
}

TEST(LrScheduler, LoadOfAnotherShape_IsRefusedAndChangesNothing) {
  FakeTarget one({0.3}), two({0.3, 0.2});
  LrScheduler first(one, ExponentialLR(0.5)), second(two, ExponentialLR(0.5));
  second.Step();
  EXPECT_THROW(second.LoadState(first.SaveState()), c10::Error);
  EXPECT_EQ(second.step_count(), 1);
  EXPECT_EQ(two.lr(0), 0.15);
}

TEST(LrScheduler, RateSetByHand_IsWhereTheScheduleGoesOn) {
  FakeTarget target({1.0, 1.0});
  LrScheduler scheduler(target, StepLR(2, 0.5));
  scheduler.Step();
  target.set_lr(0, 0.1);
  scheduler.Step();
  EXPECT_NEAR(target.lr(0), 0.05, 1e-15);
  EXPECT_EQ(target.lr(1), 0.5);
  scheduler.Step();
  scheduler.Step();
  EXPECT_NEAR(target.lr(0), 0.025, 1e-15);

  // torch's recursive form of the cosine, from a rate in its middle.
  const int t = 8;
  const double eta = 0.01;
  FakeTarget cosine({0.1});
  LrScheduler annealing(cosine, CosineAnnealingLR(t, eta));
  for (int s = 1; s <= 3; ++s) annealing.Step();
  double lr = 0.05;
  cosine.set_lr(0, lr);
  for (int s = 4; s <= 7; ++s) {
    annealing.Step();
    lr = (1 + std::cos(kPi * s / t)) / (1 + std::cos(kPi * (s - 1) / t)) * (lr - eta) + eta;
    EXPECT_NEAR(cosine.lr(0), lr, 1e-12) << s;
  }
  cosine.set_lr(0, eta / 2);  // below the floor
  annealing.Step();
  EXPECT_NEAR(cosine.lr(0), eta, 1e-12);

  FakeTarget frozen({1.0});
  LrScheduler decay(frozen, ExponentialLR(0.5));
  decay.Step();
  frozen.set_lr(0, 0);
  decay.Step();
  EXPECT_EQ(frozen.lr(0), 0);
  frozen.set_lr(0, 0.5);
  decay.Step();
  EXPECT_EQ(frozen.lr(0), 0.25);
}

TEST(LrScheduler, RateSetByHand_SurvivesASaveInBetween) {
  FakeTarget a({1.0}), b({9.0});
  LrScheduler first(a, ExponentialLR(0.5)), second(b, ExponentialLR(0.5));
  first.Step();
  a.set_lr(0, 0.3);
  second.LoadState(first.SaveState());
  EXPECT_EQ(b.lr(0), 0.3);
  for (int i = 0; i < 3; ++i) {
    first.Step();
    second.Step();
    EXPECT_EQ(a.lr(0), b.lr(0));
  }
  EXPECT_NEAR(a.lr(0), 0.3 / 8, 1e-15);
}

TEST(LrScheduler, ScheduleThatCannotGoOnFromARate_TakesOverWithAWarning) {
  const auto warning_of = [](LrSchedulePtr schedule, int steps, double by_hand, double after) {
    FakeTarget target({0.1});
    LrScheduler scheduler(target, std::move(schedule));
    for (int i = 0; i < steps; ++i) scheduler.Step();
    target.set_lr(0, by_hand);
    testing::internal::CaptureStderr();
    scheduler.Step();
    EXPECT_NEAR(target.lr(0), after, 1e-12);
    target.set_lr(0, by_hand);
    scheduler.Step();
    const std::string text = testing::internal::GetCapturedStderr();
    EXPECT_EQ(text.find("by hand"), text.rfind("by hand")) << "once";
    return text;
  };
  const auto mentions = [](const std::string& text) {
    return text.find("parameter group 0 was set to 0.7 by hand") != std::string::npos;
  };
  EXPECT_TRUE(mentions(warning_of(LinearWithWarmup(10, 100), 0, 0.7, 0.01)));
  const LrSchedulePtr cycle = OneCycleLR({.max_lr = 0.2, .total_steps = 10});
  EXPECT_TRUE(mentions(warning_of(cycle, 2, 0.7, cycle->Lr(3, 0))));
  // From the bottom of a cosine the restart would reach 0.1 * 0.7 / 0.0006.
  const LrSchedulePtr restarts = CosineAnnealingWarmRestarts(20);
  EXPECT_TRUE(mentions(warning_of(restarts, 19, 0.7, 0.1)));
  EXPECT_FALSE(mentions(warning_of(LinearWithWarmup(10, 100), 5, 0.7, 0.84)));
}

TEST(LrScheduler, RateSetByHand_AsksAUsersFunctionForNoStepAhead) {
  const std::vector<double> table = {1, 1, 0.5, 0.5};
  FakeTarget target({1.0});
  LrScheduler scheduler(
      target, SequentialLR({StepLR(100), LambdaLR([&](int64_t s) { return table.at(s); })}, {1}));
  scheduler.Step();
  target.set_lr(0, 0.4);
  scheduler.Step();
  scheduler.Step();
  EXPECT_NEAR(target.lr(0), 0.2, 1e-15);
}

TEST(LrScheduler, GroupAddedLater_FollowsFromItsRate) {
  FakeTarget target({1.0});
  LrScheduler scheduler(target, ExponentialLR(0.5));
  scheduler.Step();
  target.AddGroup(0.8);
  EXPECT_EQ(scheduler.last_lr(), (std::vector<double>{0.5, 0.8}));
  const PlainState between = scheduler.SaveState();
  scheduler.Step();
  EXPECT_EQ(scheduler.last_lr(), (std::vector<double>{0.25, 0.4}));

  FakeTarget resumed({1.0});
  LrScheduler second(resumed, ExponentialLR(0.5));
  EXPECT_THROW(second.LoadState(between), c10::Error);
  resumed.AddGroup(0.8);
  second.LoadState(between);
  second.Step();
  EXPECT_EQ(second.last_lr(), (std::vector<double>{0.25, 0.4}));

  FakeTarget own({1.0, 1.0});
  LrScheduler each(own, std::vector<LrSchedulePtr>{StepLR(1), ExponentialLR(0.5)});
  own.AddGroup(1.0);
  EXPECT_THROW(each.Step(), c10::Error);
}

TEST(ReduceLROnPlateau, NoImprovement_ReducesAfterPatience) {
  FakeTarget target({1.0});
  ReduceLROnPlateau plateau(target, {.factor = 0.5, .patience = 2, .cooldown = 1, .min_lr = 0.2});
  plateau.Step(1.0);
  plateau.Step(1.0);
  plateau.Step(std::numeric_limits<double>::quiet_NaN());
  EXPECT_EQ(target.lr(0), 1.0);
  plateau.Step(1.0);
  EXPECT_EQ(target.lr(0), 0.5);
  plateau.Step(1.0);  // cooldown
  EXPECT_EQ(plateau.num_bad_steps(), 0);

  FakeTarget other({9.0});
  ReduceLROnPlateau restored(other, {.factor = 0.5, .patience = 2, .cooldown = 1, .min_lr = 0.2});
  restored.LoadState(plateau.SaveState());
  for (int i = 0; i < 12; ++i) {
    plateau.Step(2.0);
    restored.Step(2.0);
    EXPECT_EQ(target.lr(0), other.lr(0));
  }
  EXPECT_EQ(target.lr(0), 0.2);
  plateau.Step(0.5);
  EXPECT_EQ(plateau.best(), 0.5);
}

TEST(ReduceLROnPlateau, StateBeforeTheFirstMetric_ForgetsTheBest) {
  for (const bool minimize : {true, false}) {
    FakeTarget target({1.0});
    const PlateauOptions options = {.minimize = minimize, .factor = 0.5, .patience = 0};
    const ReduceLROnPlateau fresh(target, options);
    const PlainState with = fresh.SaveState();
    PlainState without = with;
    without.erase("best");  // as in checkpoints that left empty rows out
    for (const PlainState& state : {with, without}) {
      ReduceLROnPlateau used(target, options);
      used.Step(minimize ? -100.0 : 100.0);
      used.LoadState(state);
      used.Step(0.0);
      EXPECT_EQ(used.best(), 0.0);
      EXPECT_EQ(target.lr(0), 1.0);
    }
  }
}

TEST(ReduceLROnPlateau, MaxMode_TakesLargerAsBetter) {
  FakeTarget target({1.0});
  ReduceLROnPlateau plateau(
      target, {.minimize = false, .patience = 0, .threshold = 0.1, .relative_threshold = false});
  plateau.Step(1.0);
  plateau.Step(1.2);
  EXPECT_EQ(target.lr(0), 1.0);
  plateau.Step(1.25);
  EXPECT_EQ(target.lr(0), 0.1);
}

}  // namespace
}  // namespace muster
