#include "muster/internal/registry.h"

#include <memory>
#include <string>
#include <vector>

#include "ATen/ops/ones.h"
#include "c10/util/Exception.h"
#include "gtest/gtest.h"
#include "muster/internal/test_parts.h"
#include "worker/train/optimizer.h"

namespace muster::internal {
namespace {

using SlotPtr = std::shared_ptr<OptimizerSlot>;

class RegistryTest : public testing::Test {
 protected:
  SlotPtr Slot() {
    return std::make_shared<OptimizerSlot>(&parts_.steps, &sgd_, nullptr, &sgd_, sgd_.id());
  }
  std::shared_ptr<SchedulerSlot> Schedule() {
    return std::make_shared<SchedulerSlot>(
        &parts_.steps, SchedulerSlot::Make([](OptimizerHandle& handle) {
          return std::make_unique<LrScheduler>(handle, StepLR(1));
        }));
  }

  FusedSGD sgd_{{at::ones({1}).requires_grad_(true)}, {.lr = 0.1}};
  Parts parts_;
  Registry& registry_ = parts_.registry;
};

TEST_F(RegistryTest, OptimizerOnlyTheRegistryHolds_IsForgotten) {
  SlotPtr slot = registry_.AddOptimizer(Slot());
  EXPECT_TRUE(registry_.BeginCall());
  registry_.EndCall(/*failed=*/false);
  registry_.ForgetUnheld();
  EXPECT_EQ(registry_.optimizers().size(), 1u);
  slot.reset();
  registry_.ForgetUnheld();
  EXPECT_TRUE(registry_.optimizers().empty());
  EXPECT_EQ(parts_.forgotten, 1);
}

// The program has destroyed them: the function that is called must not find them here any more.
TEST_F(RegistryTest, ForgottenOptimizers_AreGoneWhenItIsTold) {
  std::vector<size_t> left;
  Registry registry([&] { left.push_back(registry.optimizers().size()); });
  const SlotPtr held = registry.AddOptimizer(Slot());
  for (int i = 0; i < 2; ++i) registry.AddOptimizer(Slot());
  registry.BeginCall();
  registry.EndCall(/*failed=*/false);
  registry.ForgetUnheld();
  EXPECT_EQ(left, std::vector<size_t>{1});
  registry.FindOptimizer(&sgd_, [](const OptimizerSlot&) { return false; });
  EXPECT_EQ(left, (std::vector<size_t>{1, 0}));
}

TEST_F(RegistryTest, OtherOptimizerAtTheSameAddress_ReplacesTheOld) {
  const SlotPtr slot = registry_.AddOptimizer(Slot());
  EXPECT_EQ(registry_.FindOptimizer(&sgd_, [](const OptimizerSlot&) { return true; }), slot);
  EXPECT_EQ(registry_.FindOptimizer(&sgd_, [](const OptimizerSlot&) { return false; }), nullptr);
  EXPECT_TRUE(registry_.optimizers().empty());
}

TEST_F(RegistryTest, ScheduleOfACall_GetsItsOptimizer) {
  EXPECT_TRUE(registry_.BeginCall());
  EXPECT_FALSE(registry_.BeginCall());
  const auto schedule = registry_.AddSchedule(Schedule(), nullptr);
  const SlotPtr slot = registry_.AddOptimizer(Slot());
  registry_.EndCall(false);
  EXPECT_EQ(schedule->optimizer(), nullptr);
  registry_.EndCall(false);
  EXPECT_EQ(schedule->optimizer(), slot);
}

TEST_F(RegistryTest, ScheduleWithoutOptimizer_IsRefusedAndForgotten) {
  EXPECT_THROW(registry_.AddSchedule(Schedule(), nullptr), c10::Error);
  registry_.BeginCall();
  registry_.AddSchedule(Schedule(), nullptr);
  EXPECT_THROW(registry_.EndCall(false), c10::Error);
  EXPECT_TRUE(registry_.schedulers().empty());
}

TEST_F(RegistryTest, LoaderLikeOneThatIsGone_TakesItsPlace) {
  auto first = std::make_shared<PlaceOnlyLoader>("a");
  first->state.epoch = 3;
  registry_.AddLoader(first);
  const auto other = std::make_shared<PlaceOnlyLoader>("a");
  registry_.AddLoader(other);
  EXPECT_EQ(registry_.loaders().size(), 2u);
  EXPECT_EQ(other->state.epoch, 0);
  first.reset();
  const auto successor = std::make_shared<PlaceOnlyLoader>("a");
  registry_.AddLoader(successor);
  EXPECT_EQ(registry_.loaders().size(), 2u);
  EXPECT_EQ(successor->state.epoch, 3);
}

TEST_F(RegistryTest, LoaderWhosePredecessorIsDroppedLater_TakesItsPlaceWhenItSettles) {
  const auto untrained = [](size_t) { return false; };
  auto train = std::make_shared<PlaceOnlyLoader>("a"),
       other = std::make_shared<PlaceOnlyLoader>("b");
  registry_.AddLoader(train, /*epoch=*/0);
  registry_.AddLoader(other, /*epoch=*/0);
  train->state.epoch = 3;
  const auto successor = std::make_shared<PlaceOnlyLoader>("c");
  registry_.AddLoader(successor, /*epoch=*/1);
  EXPECT_EQ(successor->state.epoch, 0);
  train.reset();
  registry_.SettleLoaders(untrained);
  EXPECT_EQ(registry_.loaders().size(), 2u);
  EXPECT_EQ(registry_.loaders()[0], successor);
  EXPECT_EQ(successor->state.epoch, 3);
  // The remaining loaders are held.
  registry_.AddLoader(std::make_shared<PlaceOnlyLoader>("d"), /*epoch=*/0);
  registry_.SettleLoaders(untrained);
  EXPECT_EQ(registry_.loaders().size(), 3u);
}

TEST_F(RegistryTest, PlaceOfOneThatHasMoved_IsTakenByTheNext) {
  auto train = std::make_shared<PlaceOnlyLoader>("a");
  registry_.AddLoader(train, /*epoch=*/0);
  const auto successor = std::make_shared<PlaceOnlyLoader>("a"),
             other = std::make_shared<PlaceOnlyLoader>("b");
  registry_.AddLoader(successor, /*epoch=*/1);
  registry_.AddLoader(other, /*epoch=*/1);
  train.reset();
  registry_.SettleLoaders([](size_t) { return false; });
  // The same as in a run that resumes in this epoch.
  ASSERT_EQ(registry_.loaders().size(), 2u);
  EXPECT_EQ(registry_.loaders()[0], successor);
  EXPECT_EQ(registry_.loaders()[1], other);
}

TEST_F(RegistryTest, LoaderOfAnEpoch_TakesThePlaceOfOneBeforeTheLoopOnlyIfThatHasTrained) {
  for (const bool trained : {false, true}) {
    registry_.Clear();
    registry_.AddLoader(std::make_shared<PlaceOnlyLoader>("a"));
    const auto next = std::make_shared<PlaceOnlyLoader>("b");
    registry_.AddLoader(next, /*epoch=*/1);
    registry_.SettleLoaders([&](size_t) { return trained; });
    EXPECT_EQ(registry_.loaders().size(), trained ? 1u : 2u);
  }
}

TEST_F(RegistryTest, LoadedPlaceOfALaterLoader_IsNotTakenByASuccessor) {
  LoaderState place;
  place.epoch = 7;
  registry_.LoadLoader(1, place, {});
  auto first = std::make_shared<PlaceOnlyLoader>("a");
  registry_.AddLoader(first, /*epoch=*/0);
  const auto successor = std::make_shared<PlaceOnlyLoader>("b");
  registry_.AddLoader(successor, /*epoch=*/1);
  first.reset();
  const auto never = [](size_t) { return false; };
  registry_.SettleLoaders(never);
  EXPECT_EQ(successor->state.epoch, 0);
  const auto second = std::make_shared<PlaceOnlyLoader>("c");
  registry_.AddLoader(second, /*epoch=*/1);
  registry_.SettleLoaders(never);
  EXPECT_EQ(second->state.epoch, 7);
}

TEST_F(RegistryTest, LoadedPlace_WaitsForItsLoader) {
  LoaderState place;
  place.epoch = 5;
  registry_.LoadLoader(0, place, {});
  const auto loader = std::make_shared<PlaceOnlyLoader>("a");
  registry_.AddLoader(loader);
  EXPECT_EQ(loader->state.epoch, 5);
}

}  // namespace
}  // namespace muster::internal
