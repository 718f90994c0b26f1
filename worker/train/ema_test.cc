#include "worker/train/ema.h"

#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/full.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/zeros.h"
#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/test_error.h"
#include "worker/parallel/counting_allocator.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using Named = std::vector<std::pair<std::string, at::Tensor>>;

at::Tensor Weight(double value, at::ScalarType type = at::kFloat) {
  return at::full({3}, value, type).requires_grad_(true);
}

void Fill(const at::Tensor& weight, double value) {
  const at::NoGradGuard no_grad;
  weight.fill_(value);
}

double AverageOf(EmaWeights& ema, const at::Tensor& weight) {
  const EmaWeights::Scope averaged(ema);
  return weight[0].item<double>();
}

TEST(Ema, Updates_AverageExponentially) {
  const at::Tensor a = Weight(0), b = Weight(1, at::kDouble);
  EmaWeights ema({{"a", a}, {"b", b}}, {.decay = 0.9});
  double expected = 0;
  for (int step = 1; step <= 20; ++step) {
    Fill(a, step);
    ema.Update();
    expected = 0.9 * expected + 0.1 * step;
  }
  EXPECT_NEAR(AverageOf(ema, a), expected, 1e-4);
  EXPECT_NEAR(AverageOf(ema, b), 1, 1e-12);
  EXPECT_EQ(a[0].item<double>(), 20) << "the weights are their own again";
  EXPECT_TRUE(a.requires_grad());
}

TEST(Ema, HalfWeights_AreAveragedInFloat) {
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf}) {
    const at::Tensor a = Weight(0, type);
    EmaWeights ema({{"a", a}}, {.decay = 0.999});
    Fill(a, 1);
    for (int step = 0; step < 1000; ++step) ema.Update();
    // In bf16 the steps stop having an effect long before.
    EXPECT_NEAR(AverageOf(ema, a), 0.632, 0.01);
    EXPECT_EQ(a.scalar_type(), type);
  }
}

TEST(Ema, UpdateOfManyHalfWeights_TakesTheMemoryOfOne) {
  CountingAllocator& memory = CountingAllocator::Get();
  constexpr int64_t kElements = 64 << 10;
  for (const at::ScalarType type : {at::kBFloat16, at::kHalf, at::kFloat}) {
    Named parameters;
    for (int i = 0; i < 64; ++i) {
      parameters.emplace_back(std::to_string(i), at::full({kElements}, i, type));
    }
    EmaWeights ema(parameters, {.decay = 0.5});
    for (const auto& [name, parameter] : parameters) Fill(parameter, 0);
    memory.ResetPeak();
    const int64_t before = memory.live();
    ema.Update();
    EXPECT_LT(memory.peak() - before, 4 * kElements * 2) << type;
    EXPECT_EQ(ema.averages()[63].second[0].item<double>(), 31.5);
  }
}

TEST(Ema, WarmupDelayAndStride_AreCounted) {
  const at::Tensor a = Weight(0);
  EmaWeights ema({{"a", a}},
                 {.decay = 0.5, .warmup = true, .update_after_step = 2, .update_every = 2});
  Fill(a, 8);
  ema.Update();
  EXPECT_EQ(AverageOf(ema, a), 0) << "no second call yet";
  ema.Update();
  EXPECT_EQ(AverageOf(ema, a), 8) << "the weights themselves";
  Fill(a, 0);
  ema.Update();
  ema.Update();
  EXPECT_NEAR(AverageOf(ema, a), 8 * 0.1, 1e-6);
  ema.Update();
  ema.Update();
  EXPECT_NEAR(AverageOf(ema, a), 8 * 0.1 * 2 / 11, 1e-6);
  EXPECT_EQ(ema.updates(), 2);
}

TEST(Ema, Scope_GivesTheWeightsBackAlsoByAnException) {
  const at::Tensor a = Weight(0);
  EmaWeights ema({{"a", a}, {"tied", a}}, {.decay = 0.5});
  Fill(a, 2);
  ema.Update();
  try {
    const EmaWeights::Scope averaged(ema);
    EXPECT_EQ(a[0].item<double>(), 1);
    EXPECT_THAT(ErrorOf([&] { ema.Update(); }), HasSubstr("inside its own scope"));
    EXPECT_THAT(ErrorOf([&] { EmaWeights::Scope again(ema); }), HasSubstr("do not nest"));
    Fill(a, 7);
    throw std::runtime_error("evaluation failed");
  } catch (const std::runtime_error&) {
  }
  EXPECT_EQ(a[0].item<double>(), 2);
  EXPECT_THAT(ErrorOf([&] {
                const EmaWeights::Scope averaged(ema);
                Fill(a, 7);  // an optimizer's step
              }),
              HasSubstr("parameter 'a' was changed"));
  EXPECT_EQ(a[0].item<double>(), 2);
  ema.Update();
}

TEST(Ema, ScopeThatCannotBegin_LeavesTheWeights) {
  const at::Tensor a = Weight(0), b = Weight(0);
  EmaWeights ema({{"a", a}, {"b", b}}, {.decay = 0.5});
  Fill(a, 2);
  Fill(b, 2);
  ema.Update();
  EXPECT_THAT(ErrorOf([&] {
                const EmaWeights::Scope averaged(ema, [] { TORCH_CHECK(false, "no room"); });
              }),
              HasSubstr("no room"));
  EXPECT_EQ(a[0].item<double>(), 2);
  EXPECT_EQ(b[0].item<double>(), 2);
  // Halfway.
  const at::Tensor kept = b.detach().clone();
  b.set_data(at::ones({5}));
  EXPECT_NE(ErrorOf([&] { const EmaWeights::Scope averaged(ema); }), "no error");
  EXPECT_EQ(a[0].item<double>(), 2);
  b.set_data(kept);
  { const EmaWeights::Scope averaged(ema); }
  EXPECT_EQ(a[0].item<double>(), 2);
}

TEST(Ema, SavedAndLoaded_ContinuesExactly) {
  const at::Tensor a = Weight(0.3), b = Weight(5);
  EmaWeights first({{"a", a}}, {.decay = 0.7, .warmup = true});
  EmaWeights second({{"a", b}}, {.decay = 0.7, .warmup = true});
  for (int i = 0; i < 5; ++i) {
    Fill(a, i);
    first.Update();
  }
  second.LoadState(first.SaveState());
  for (int i = 0; i < 5; ++i) {
    Fill(a, i);
    Fill(b, i);
    first.Update();
    second.Update();
  }
  EXPECT_EQ(AverageOf(first, a), AverageOf(second, b));

  EmaWeights other({{"c", b}});
  EXPECT_THAT(ErrorOf([&] { other.LoadState(first.SaveState()); }), HasSubstr("average.c"));
  EXPECT_THAT(ErrorOf([&] { other.LoadState(StateDict()); }), HasSubstr("calls"));
}

TEST(Ema, CopyTo_FillsAnotherModelOrRefusesIt) {
  const at::Tensor a = Weight(4), target = Weight(0, at::kDouble);
  EmaWeights ema({{"a", a}});
  ema.CopyTo({{"a", target}, {"tied", target}});
  EXPECT_EQ(target[0].item<double>(), 4);
  EXPECT_THAT(ErrorOf([&] { ema.CopyTo({{"b", target}}); }), HasSubstr("no parameter 'a'"));
  EXPECT_THAT(ErrorOf([&] {
                ema.CopyTo({{"a", target}, {"b", Weight(0)}});
              }),
              HasSubstr("no average of the model's parameter 'b'"));
  EXPECT_THAT(ErrorOf([&] { ema.CopyTo({{"a", at::zeros({2})}}); }), HasSubstr("has shape [2]"));
}

TEST(Ema, BadOptions_AreNamed) {
  const at::Tensor a = Weight(0);
  EXPECT_THAT(ErrorOf([&] { EmaWeights e({{"a", a}}, {.decay = 1.5}); }), HasSubstr("decay"));
  EXPECT_THAT(ErrorOf([&] {
                EmaWeights e({{"a", a}}, {.update_every = 0});
              }),
              HasSubstr("update_every"));
  EXPECT_THAT(ErrorOf([&] { EmaWeights e(Named{}); }), HasSubstr("no parameters"));
}

}  // namespace
}  // namespace muster
