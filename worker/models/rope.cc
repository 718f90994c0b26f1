#include "worker/models/rope.h"

#include <numbers>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/logical_and.h"
#include "ATen/ops/pow.h"
#include "ATen/ops/where.h"

namespace muster::models {

at::Tensor RopeFrequencies(const RopeConfig& rope, int64_t head_dim) {
  const at::Tensor exponents =
      at::arange(0, head_dim, 2, at::TensorOptions().dtype(c10::kFloat).device(c10::kCPU)) /
      head_dim;
  const at::Tensor plain = at::pow(rope.theta, exponents).reciprocal();
  switch (rope.kind) {
    case RopeConfig::Kind::kDefault:
      return plain;
    case RopeConfig::Kind::kLinear:
      return plain / rope.factor;
    case RopeConfig::Kind::kLlama3:
      break;
  }
  // Long waves are stretched by the factor, short ones stay, and between them it goes over evenly.
  const double longest = static_cast<double>(rope.original_max_positions) / rope.low_freq_factor;
  const double shortest = static_cast<double>(rope.original_max_positions) / rope.high_freq_factor;
  const at::Tensor wave = 2 * std::numbers::pi / plain;
  const at::Tensor stretched = at::where(wave > longest, plain / rope.factor, plain);
  const at::Tensor share =
      (static_cast<double>(rope.original_max_positions) / wave - rope.low_freq_factor) /
      (rope.high_freq_factor - rope.low_freq_factor);
  const at::Tensor between = (1 - share) * stretched / rope.factor + share * stretched;
  return at::where(at::logical_and(wave >= shortest, wave <= longest), between, stretched);
}

at::Tensor Rotation::Apply(const at::Tensor& x) const {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor turned = at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  return x * cos + turned * sin;
}

Rotation RotationAt(const at::Tensor& frequencies, const at::Tensor& positions,
                    at::ScalarType dtype) {
  const at::Tensor angles = positions.to(c10::kFloat).unsqueeze(-1) *
                            frequencies.to(positions.device(), /*non_blocking=*/true);
  const at::Tensor both = at::cat({angles, angles}, -1).unsqueeze(1);
  return {.cos = both.cos().to(dtype), .sin = both.sin().to(dtype)};
}

}  // namespace muster::models
