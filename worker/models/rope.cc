#include "worker/models/rope.h"

#include <algorithm>
#include <cmath>
#include <numbers>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/logical_and.h"
#include "ATen/ops/pow.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/where.h"
#include "c10/core/InferenceMode.h"

namespace muster::models {

namespace {

// Returns the pair of dimensions that rotates `rotations` times within the positions that the model
// was made for (Peng et al., 2023, section 3.2).
double PairThatTurns(double rotations, const RopeConfig& rope, int64_t head_dim) {
  const auto positions = static_cast<double>(rope.original_max_positions);
  return static_cast<double>(head_dim) * std::log(positions / (rotations * 2 * std::numbers::pi)) /
         (2 * std::log(rope.theta));
}

// Fast pairs stay unchanged, slow ones are stretched, with a linear transition between them.
at::Tensor YarnFrequencies(const RopeConfig& rope, int64_t head_dim, const at::Tensor& waves) {
  double low = PairThatTurns(rope.beta_fast, rope, head_dim);
  double high = PairThatTurns(rope.beta_slow, rope, head_dim);
  if (rope.truncate) {
    low = std::floor(low);
    high = std::ceil(high);
  }
  low = std::max(low, 0.0);
  high = std::min(high, static_cast<double>(head_dim - 1));
  if (low == high) high += 0.001;  // as in transformers: avoids a division by zero
  const at::Tensor pairs = at::arange(head_dim / 2, waves.options());
  const at::Tensor stretched = ((pairs - low) / (high - low)).clamp(0, 1);
  return (rope.factor * waves).reciprocal() * stretched + waves.reciprocal() * (1 - stretched);
}

double Mscale(double factor, double mscale) {
  return factor <= 1 ? 1.0 : 0.1 * mscale * std::log(factor) + 1;
}

// Returns the base that "dynamic" uses for rows that are longer than the model was made for.
double DynamicTheta(const RopeConfig& rope, int64_t head_dim, int64_t length) {
  const double ratio = static_cast<double>(std::max(length, rope.original_max_positions)) /
                       static_cast<double>(rope.original_max_positions);
  const auto dims = static_cast<double>(head_dim);
  return rope.theta * std::pow(rope.factor * ratio - (rope.factor - 1), dims / (dims - 2));
}

}  // namespace

at::Tensor RopeFrequencies(const RopeConfig& rope, int64_t head_dim, int64_t length) {
  const at::Tensor exponents =
      at::arange(0, head_dim, 2, at::TensorOptions().dtype(c10::kFloat).device(c10::kCPU)) /
      head_dim;
  const double theta =
      rope.kind == RopeConfig::Kind::kDynamic ? DynamicTheta(rope, head_dim, length) : rope.theta;
  const at::Tensor waves = at::pow(theta, exponents);
  const at::Tensor plain = waves.reciprocal();
  switch (rope.kind) {
    case RopeConfig::Kind::kDefault:
    case RopeConfig::Kind::kDynamic:
      return plain;
    case RopeConfig::Kind::kLongRope: {
      const bool is_long = length > rope.original_max_positions;
      return (at::tensor(is_long ? rope.long_factor : rope.short_factor, exponents.options()) *
              waves)
          .reciprocal();
    }
    case RopeConfig::Kind::kLinear:
      return plain / rope.factor;
    case RopeConfig::Kind::kProportional: {
      const auto turning = static_cast<int64_t>(
          std::floor(rope.partial_rotary_factor * static_cast<double>(head_dim) / 2));
      at::Tensor frequencies = plain / rope.factor;
      frequencies.narrow(0, turning, head_dim / 2 - turning).zero_();
      return frequencies;
    }
    case RopeConfig::Kind::kYarn:
      return YarnFrequencies(rope, head_dim, waves);
    case RopeConfig::Kind::kLlama3:
      break;
  }
  // Long waves are stretched by the factor and short ones stay unchanged, with a smooth transition
  // between them.
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

double RopeAttentionFactor(const RopeConfig& rope) {
  if (rope.kind == RopeConfig::Kind::kLongRope) return LongRopeAttentionFactor(rope);
  if (rope.kind != RopeConfig::Kind::kYarn) return 1;
  if (rope.attention_factor.has_value()) return *rope.attention_factor;
  if (rope.mscale != 0 && rope.mscale_all_dim != 0) {
    return Mscale(rope.factor, rope.mscale) / Mscale(rope.factor, rope.mscale_all_dim);
  }
  return Mscale(rope.factor, 1);
}

at::Tensor Rotation::Apply(const at::Tensor& x) const {
  const int64_t half = x.size(-1) / 2;
  const at::Tensor turned = at::cat({-x.narrow(-1, half, half), x.narrow(-1, 0, half)}, -1);
  return x * cos + turned * sin;
}

RotaryEmbedding::RotaryEmbedding(const RopeConfig& rope, int64_t head_dim)
    : rope_(rope),
      head_dim_(head_dim),
      frequencies_(RopeFrequencies(rope, head_dim)),
      attention_factor_(RopeAttentionFactor(rope)) {}

at::Tensor RotaryEmbedding::FrequenciesOn(const at::Device& device) const {
  if (device.is_cpu()) return frequencies_;
  MutexLock lock(&mu_);
  if (!on_device_.defined() || on_device_.device() != device) {
    // Training may use the tensor after a generation.
    const c10::InferenceMode off(false);
    on_device_ = frequencies_.to(device);
  }
  return on_device_;
}

Rotation RotaryEmbedding::At(const at::Tensor& positions, at::ScalarType dtype) const {
  at::Tensor frequencies = FrequenciesOn(positions.device());
  if (rope_.kind == RopeConfig::Kind::kDynamic || rope_.kind == RopeConfig::Kind::kLongRope) {
    const int64_t length = positions.max().item<int64_t>() + 1;
    if (length > rope_.original_max_positions) {
      frequencies = RopeFrequencies(rope_, head_dim_, length).to(positions.device());
    }
  }
  const at::Tensor angles = positions.to(c10::kFloat).unsqueeze(-1) * frequencies;
  const at::Tensor both = at::cat({angles, angles}, -1).unsqueeze(1);
  if (attention_factor_ == 1) return {.cos = both.cos().to(dtype), .sin = both.sin().to(dtype)};
  return {.cos = (both.cos() * attention_factor_).to(dtype),
          .sin = (both.sin() * attention_factor_).to(dtype)};
}

}  // namespace muster::models
