#include "worker/models/rope.h"

#include <gtest/gtest.h>

#include <cmath>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"

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

TEST(RopeFrequencies, Llama3_StretchesLongWavesOnly) {
  const RopeConfig rope = {.kind = RopeConfig::Kind::kLlama3,
                           .theta = 500000,
                           .factor = 8,
                           .low_freq_factor = 1,
                           .high_freq_factor = 4,
                           .original_max_positions = 8192};
  const at::Tensor plain = RopeFrequencies({.theta = 500000}, 128);
  const at::Tensor scaled = RopeFrequencies(rope, 128);
  EXPECT_EQ(At(scaled, 0), At(plain, 0));
  EXPECT_NEAR(At(scaled, 63), At(plain, 63) / 8, 1e-12);
  for (int64_t i = 0; i < 64; ++i) {
    EXPECT_LE(At(scaled, i), At(plain, i));
    EXPECT_GE(At(scaled, i), At(plain, i) / 8 * (1 - 1e-6));
  }
}

// What rotary positions are for: a product depends on the distance alone.
TEST(Rotation, Products_DependOnTheDistanceOfPositions) {
  const at::Tensor frequencies = RopeFrequencies({}, 8);
  const at::Tensor q = at::randn({1, 1, 1, 8}), k = at::randn({1, 1, 1, 8});
  const auto turn = [&](const at::Tensor& x, int64_t position) {
    const at::Tensor positions = at::arange(position, position + 1, c10::kLong).unsqueeze(0);
    return RotationAt(frequencies, positions, c10::kFloat).Apply(x);
  };
  const double near = (turn(q, 5) * turn(k, 2)).sum().item<double>();
  EXPECT_NEAR((turn(q, 105) * turn(k, 102)).sum().item<double>(), near, 1e-3);
  EXPECT_TRUE(at::equal(turn(q, 0), q));
}

}  // namespace
}  // namespace muster::models
