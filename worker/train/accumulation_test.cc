#include "worker/train/accumulation.h"

#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/test_error.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

BatchFacts Last() { return {.is_last = true, .batches_left = 0}; }
BatchFacts Left(int64_t n) { return {.is_last = n == 0, .batches_left = n}; }

TEST(Accumulation, FullWindows_SyncEveryNth) {
  Accumulation accumulation({.num_steps = 3});
  for (int window = 0; window < 4; ++window) {
    EXPECT_FALSE(accumulation.Begin(std::nullopt).sync);
    EXPECT_FALSE(accumulation.at_boundary());
    EXPECT_FALSE(accumulation.Begin(std::nullopt).sync);
    const MicroStep step = accumulation.Begin(std::nullopt);
    EXPECT_TRUE(step.sync);
    EXPECT_TRUE(step.communicate);
    EXPECT_EQ(step.divisor, 3);
    EXPECT_EQ(step.gradient_factor, 1);
    EXPECT_EQ(step.window_length, 3);
    EXPECT_TRUE(accumulation.at_boundary());
  }
}

// Gradient 1 in every micro-step: the window's gradient must be 1 whatever its length.
double WindowGradient(Accumulation& accumulation,
                      const std::vector<std::optional<BatchFacts>>& batches) {
  double gradient = 0;
  for (size_t i = 0; i < batches.size(); ++i) {
    const MicroStep step = accumulation.Begin(batches[i]);
    EXPECT_EQ(step.sync, i + 1 == batches.size());
    gradient += 1 / step.divisor;
    gradient *= step.gradient_factor;
  }
  return gradient;
}

TEST(Accumulation, D04_ShortLastWindow_LengthKnown_DividesByRealLength) {
  Accumulation accumulation({.num_steps = 4});
  EXPECT_EQ(WindowGradient(accumulation, {Left(4), Left(3), Left(2), Left(1)}), 1);
  const MicroStep last = accumulation.Begin(Left(0));
  EXPECT_TRUE(last.sync);
  EXPECT_EQ(last.divisor, 1);
  EXPECT_EQ(last.gradient_factor, 1);
}

TEST(Accumulation, D04_ShortLastWindow_LengthUnknown_RescalesAtSync) {
  Accumulation accumulation({.num_steps = 4});
  const BatchFacts unknown{};
  EXPECT_DOUBLE_EQ(WindowGradient(accumulation, {unknown, unknown, Last()}), 1);
  EXPECT_EQ(accumulation.current().divisor, 4);
  EXPECT_DOUBLE_EQ(accumulation.current().gradient_factor, 4.0 / 3.0);
}

TEST(Accumulation, D04_ShortLastWindow_WrongPrediction_IsMadeUpFor) {
  Accumulation accumulation({.num_steps = 4});
  // The loader promised two more batches, but its loop is left; the window goes on in another
  // loader.
  EXPECT_DOUBLE_EQ(WindowGradient(accumulation, {Left(1), Left(9), Left(8), Left(7)}), 1);
  EXPECT_EQ(accumulation.current().divisor, 2);
}

TEST(Accumulation, ShortLastWindow_LikeAccelerate_KeepsDivisor) {
  Accumulation accumulation({.num_steps = 4, .short_window = ShortWindow::kLikeAccelerate});
  EXPECT_DOUBLE_EQ(WindowGradient(accumulation, {Left(0)}), 0.25);
}

TEST(Accumulation, D05_BreakOnLastBatch_LaterStepsDoNotSync) {
  Accumulation accumulation({.num_steps = 4});
  EXPECT_TRUE(accumulation.Begin(Last()).sync);
  EXPECT_FALSE(accumulation.Begin(std::nullopt).sync);
  EXPECT_FALSE(accumulation.Begin(std::nullopt).sync);
  EXPECT_FALSE(accumulation.Begin(std::nullopt).sync);
  EXPECT_TRUE(accumulation.Begin(std::nullopt).sync);
}

TEST(Accumulation, SyncWithDataloaderOff_WindowSpansLoaders) {
  Accumulation accumulation({.num_steps = 3, .sync_with_dataloader = false});
  EXPECT_DOUBLE_EQ(WindowGradient(accumulation, {Left(1), Left(0), Left(1)}), 1);
  EXPECT_EQ(accumulation.current().divisor, 3);
}

TEST(Accumulation, SyncEachBatch_CommunicatesAlways) {
  Accumulation accumulation({.num_steps = 2, .sync_each_batch = true});
  const MicroStep step = accumulation.Begin(std::nullopt);
  EXPECT_FALSE(step.sync);
  EXPECT_TRUE(step.communicate);
}

TEST(Accumulation, WeightedLosses_GiveTheMeanOverAllTokens) {
  // Two ranks, three micro-steps, gradient of each token is its number; expected: the mean over all
  // tokens.
  const double tokens[2][3] = {{2, 5, 1}, {4, 0, 8}};
  const double mean_gradient[2][3] = {{1, 2, 3}, {4, 5, 6}};
  Accumulation ranks[2] = {Accumulation({.num_steps = 4}), Accumulation({.num_steps = 4})};
  double averaged = 0, total = 0, expected = 0;
  for (int r = 0; r < 2; ++r) {
    for (int i = 0; i < 3; ++i) {
      ranks[r].Begin(Left(2 - i));
      averaged += mean_gradient[r][i] / ranks[r].WeightedDivisor(tokens[r][i]) / 2;
      expected += mean_gradient[r][i] * tokens[r][i];
    }
    total += ranks[r].local_weight();
  }
  EXPECT_EQ(total, 20);
  EXPECT_NEAR(averaged * ranks[0].WeightedFactor(total, 2), expected / total, 1e-12);
  EXPECT_EQ(ranks[0].WeightedFactor(0, 2), 0);
}

TEST(Accumulation, WeightedLosses_MixedWithPlainOnes_AreRefused) {
  Accumulation accumulation({.num_steps = 2});
  accumulation.Begin(std::nullopt);
  accumulation.Begin(std::nullopt);
  EXPECT_THAT(ErrorOf([&] { accumulation.WeightedDivisor(3); }), HasSubstr("1 earlier one(s)"));
}

TEST(Accumulation, WeightedAndPlainLossOfOneMicroStep_AreRefusedInEitherOrder) {
  const auto begin = [](bool alone, Accumulation& accumulation) {
    alone ? accumulation.BeginAlone() : void(accumulation.Begin(std::nullopt));
  };
  for (const bool alone : {false, true}) {
    Accumulation accumulation({.num_steps = 2});
    begin(alone, accumulation);
    accumulation.WeightedDivisor(3);
    EXPECT_THAT(ErrorOf([&] { accumulation.PlainDivisor(); }), HasSubstr("have weights"));
    Accumulation other({.num_steps = 2});
    begin(alone, other);
    EXPECT_EQ(other.PlainDivisor(), 2);
    EXPECT_EQ(other.PlainDivisor(), 2);
    EXPECT_THAT(ErrorOf([&] { other.WeightedDivisor(3); }), HasSubstr("without a weight"));
  }
  // And in the micro-steps of a window.
  Accumulation window({.num_steps = 2});
  window.Begin(std::nullopt);
  window.WeightedDivisor(3);
  window.Begin(std::nullopt);
  EXPECT_THAT(ErrorOf([&] { window.PlainDivisor(); }), HasSubstr("have weights"));
  // The next window starts over.
  window.WeightedDivisor(1);
  window.Begin(std::nullopt);
  EXPECT_EQ(window.PlainDivisor(), 2);
}

TEST(Accumulation, SecondWeightedLossOfAMicroStep_IsNamed) {
  Accumulation accumulation({.num_steps = 2});
  accumulation.Begin(std::nullopt);
  accumulation.WeightedDivisor(3);
  EXPECT_THAT(ErrorOf([&] { accumulation.WeightedDivisor(3); }),
              HasSubstr("a second backward(loss, weight) in micro-step 1"));
}

TEST(Accumulation, AgreedSync_TakesTheAgreedAnswer) {
  Accumulation accumulation({.num_steps = 4});
  EXPECT_FALSE(accumulation.Begin(Left(1), /*agreed_sync=*/false).sync);
  const MicroStep step = accumulation.Begin(Left(0), /*agreed_sync=*/true);
  EXPECT_TRUE(step.sync);
  EXPECT_EQ(step.divisor, 4);
  EXPECT_EQ(step.gradient_factor, 2);
}

TEST(Accumulation, SetNumSteps_ShrunkBelowPosition_EndsTheWindow) {
  Accumulation accumulation({.num_steps = 8});
  accumulation.Begin(std::nullopt);
  accumulation.Begin(std::nullopt);
  accumulation.set_num_steps(2);
  const MicroStep step = accumulation.Begin(std::nullopt);
  EXPECT_TRUE(step.sync);
  EXPECT_DOUBLE_EQ(step.gradient_factor, 8.0 / 3.0);
  EXPECT_THROW(accumulation.set_num_steps(0), c10::Error);
}

TEST(Accumulation, D23_SaveInsideWindow_ResumesInsideWindow) {
  Accumulation first({.num_steps = 3});
  first.Begin(std::nullopt);
  Accumulation second({.num_steps = 3});
  second.LoadState(first.SaveState());
  EXPECT_FALSE(second.at_boundary());
  EXPECT_FALSE(second.Begin(std::nullopt).sync);
  EXPECT_TRUE(second.Begin(std::nullopt).sync);
  EXPECT_THROW(second.LoadState({}), c10::Error);
}

}  // namespace
}  // namespace muster
