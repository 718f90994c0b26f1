#include "worker/models/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "c10/core/InferenceMode.h"

namespace muster::models {
namespace {

double At(const at::Tensor& values, int64_t i) { return values[i].item<double>(); }

TEST(RopeFrequencies, Default_FallGeometrically) {
  const at::Tensor frequencies = RopeFrequencies({.theta = 10000}, 8);
  ASSERT_EQ(frequencies.numel(), 4);
  for (int64_t i = 0; i < 4; ++i) {
    EXPECT_NEAR(At(frequencies, i), std::pow(10000, -static_cast<double>(i) / 4), 1e-7);
  }
}

TEST(RopeFrequencies, Linear_AreDividedByTheFactor) {
  const at::Tensor plain = RopeFrequencies({}, 8);
  const at::Tensor scaled = RopeFrequencies({.kind = RopeConfig::Kind::kLinear, .factor = 4}, 8);
  EXPECT_TRUE(at::allclose(scaled * 4, plain));
}

TEST(RopeFrequencies, Proportional_LeaveTheSlowestPairsAlone) {
  const at::Tensor plain = RopeFrequencies({}, 12);
  const auto turning = [&plain](double share) {
    const at::Tensor some = RopeFrequencies(
        {.kind = RopeConfig::Kind::kProportional, .factor = 2, .partial_rotary_factor = share}, 12);
    int64_t count = 0;
    while (count < 6 && At(some, count) == At(plain, count) / 2) ++count;
    for (int64_t i = count; i < 6; ++i) EXPECT_EQ(At(some, i), 0) << share << ", pair " << i;
    return count;
  };
  EXPECT_EQ(turning(1), 6);
  EXPECT_EQ(turning(0.5), 3);
  EXPECT_EQ(turning(0.3), 1);  // 12 * 0.3 / 2 = 1.8
  EXPECT_EQ(turning(0), 0);
}

TEST(RopeFrequencies, Llama3_StretchesLongWavesOnly) {
  const RopeConfig rope = {.kind = RopeConfig::Kind::kLlama3,
                           .theta = 500000,
                           .factor = 8,
                           .original_max_positions = 8192,
                           .low_freq_factor = 1,
                           .high_freq_factor = 4};
  const at::Tensor plain = RopeFrequencies({.theta = 500000}, 128);
  const at::Tensor scaled = RopeFrequencies(rope, 128);
  EXPECT_EQ(At(scaled, 0), At(plain, 0));
  EXPECT_NEAR(At(scaled, 63), At(plain, 63) / 8, 1e-12);
  for (int64_t i = 0; i < 64; ++i) {
    EXPECT_LE(At(scaled, i), At(plain, i));
    EXPECT_GE(At(scaled, i), At(plain, i) / 8 * (1 - 1e-6));
  }
}

TEST(RopeFrequencies, Yarn_KeepsFastPairsAndStretchesSlowOnes) {
  const RopeConfig rope = {
      .kind = RopeConfig::Kind::kYarn, .factor = 4, .original_max_positions = 4096};
  const at::Tensor plain = RopeFrequencies({}, 128);
  const at::Tensor scaled = RopeFrequencies(rope, 128);
  EXPECT_EQ(At(scaled, 0), At(plain, 0));
  EXPECT_NEAR(At(scaled, 63), At(plain, 63) / 4, 1e-12);
  EXPECT_NEAR(RopeAttentionFactor(rope), 0.1 * std::log(4.0) + 1, 1e-12);
  const at::Tensor zero = at::zeros({1, 1}, c10::kLong);
  EXPECT_NEAR(RotaryEmbedding(rope, 128).At(zero, c10::kFloat).cos.max().item<double>(),
              RopeAttentionFactor(rope), 1e-6);
}

TEST(RotaryEmbedding, Dynamic_ChangesBeyondTheLengthOfTheModelAlone) {
  const RopeConfig rope = {
      .kind = RopeConfig::Kind::kDynamic, .factor = 2, .original_max_positions = 16};
  const RotaryEmbedding dynamic(rope, 8), plain({}, 8);
  const auto sines = [](const RotaryEmbedding& rotary, int64_t length) {
    return rotary.At(at::arange(length, c10::kLong).unsqueeze(0), c10::kFloat).sin;
  };
  EXPECT_TRUE(at::equal(sines(dynamic, 16), sines(plain, 16)));
  EXPECT_FALSE(at::equal(sines(dynamic, 17), sines(plain, 17)));
  EXPECT_TRUE(at::equal(sines(dynamic, 16), sines(plain, 16)));  // no state is kept
}

TEST(RotaryEmbedding, LongRope_TakesTheLongFactorsBeyondTheOriginalPositionsAlone) {
  const RopeConfig rope = {.kind = RopeConfig::Kind::kLongRope,
                           .factor = 4,
                           .original_max_positions = 16,
                           .short_factor = {1, 1, 1, 1.5},
                           .long_factor = {1, 2, 3, 4}};
  for (int64_t i = 0; i < 4; ++i) {
    const double plain = std::pow(10000, -static_cast<double>(i) / 4);
    EXPECT_NEAR(At(RopeFrequencies(rope, 8, 16), i), plain / rope.short_factor[i], 1e-7);
    EXPECT_NEAR(At(RopeFrequencies(rope, 8, 17), i), plain / rope.long_factor[i], 1e-7);
  }
  EXPECT_NEAR(RopeAttentionFactor(rope), std::sqrt(1.5), 1e-12);  // 1 + ln 4 / ln 16
  const RotaryEmbedding rotary(rope, 8);
  const auto first = [&](int64_t length) {
    return rotary.At(at::arange(length, c10::kLong).unsqueeze(0), c10::kFloat).sin[0][0][1];
  };
  EXPECT_NEAR(At(first(16), 3), std::sqrt(1.5) * std::sin(1e-3 / 1.5), 1e-8);
  EXPECT_NEAR(At(first(17), 3), std::sqrt(1.5) * std::sin(1e-3 / 4), 1e-8);
}

// Generation and training on a GPU alternate like this.
TEST(RotaryEmbedding, PositionsOfAnotherDevice_GiveAnglesThere) {
  const RotaryEmbedding rotary({}, 8);
  const at::Tensor positions = at::arange(3, c10::kLong).unsqueeze(0);
  {
    const c10::InferenceMode inference;
    EXPECT_TRUE(rotary.At(positions.to(c10::kMeta), c10::kFloat).cos.is_meta());
  }
  const Rotation rotation = rotary.At(positions.to(c10::kMeta), c10::kHalf);
  EXPECT_TRUE(rotation.sin.is_meta());
  EXPECT_EQ(rotation.sin.scalar_type(), c10::kHalf);
  EXPECT_TRUE(rotary.At(positions, c10::kFloat).cos.is_cpu());
}

// The purpose of rotary positions: a product depends only on the distance.
TEST(Rotation, Products_DependOnTheDistanceOfPositions) {
  const RotaryEmbedding rotary({}, 8);
  const at::Tensor q = at::randn({1, 1, 1, 8}), k = at::randn({1, 1, 1, 8});
  const auto turn = [&](const at::Tensor& x, int64_t position) {
    const at::Tensor positions = at::arange(position, position + 1, c10::kLong).unsqueeze(0);
    return rotary.At(positions, c10::kFloat).Apply(x);
  };
  const double near = (turn(q, 5) * turn(k, 2)).sum().item<double>();
  EXPECT_NEAR((turn(q, 105) * turn(k, 102)).sum().item<double>(), near, 1e-3);
  EXPECT_TRUE(at::equal(turn(q, 0), q));
}

}  // namespace
}  // namespace muster::models
