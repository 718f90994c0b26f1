#ifndef MUSTER_WORKER_MODELS_ROPE_H_
#define MUSTER_WORKER_MODELS_ROPE_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "base/mutex.h"
#include "worker/models/model_config.h"
#include "worker/models/per_device.h"

namespace muster::models {

// Rotary position embedding (Su et al., 2021), with the frequencies of transformers' types
// "default", "linear" (Chen et al., 2023), "dynamic" (NTK-aware, as in Peng et al., 2023), "yarn"
// (Peng et al., 2023), "llama3", "longrope" (Ding et al., 2024) and "proportional", in which the
// slowest pairs do not turn.

// Returns the angle between neighbouring positions for each pair of a head's dimensions: float32
// [head_dim / 2], on the CPU. `length`, the number of tokens of the row, matters for "dynamic" and
// "longrope".
at::Tensor RopeFrequencies(const RopeConfig& rope, int64_t head_dim, int64_t length = 0);

// Returns the factor of cosines and sines for "yarn" and "longrope"; 1 for the other types.
double RopeAttentionFactor(const RopeConfig& rope);

// Cosines and sines of some positions, computed once for all layers.
struct Rotation {
  at::Tensor cos = {};  // [B or 1, 1, T, head_dim]
  at::Tensor sin = {};

  Rotation To(const at::Device& device) const {
    return {.cos = MovedTo(cos, device), .sin = MovedTo(sin, device)};
  }
  // Rotates the first and second half of x [B, heads, T, head_dim] against each other.
  at::Tensor Apply(const at::Tensor& x) const;
};

// Computes rotations for positions. Thread-safe.
class RotaryEmbedding {
 public:
  RotaryEmbedding(const RopeConfig& rope, int64_t head_dim);

  // `positions` [B or 1, T] int64; the angles are float32, cosines and sines have type `dtype`.
  // "dynamic" and "longrope" use the last position of the pass: the longest row decides for all,
  // and keys that a cache holds stay as they are. Unlike in transformers, "dynamic" keeps no state:
  // a row's output does not depend on longer rows before it.
  Rotation At(const at::Tensor& positions, at::ScalarType dtype) const;

 private:
  // Returns frequencies_ on `device`; a GPU gets them once, not for each token.
  at::Tensor FrequenciesOn(const at::Device& device) const;

  const RopeConfig rope_;
  const int64_t head_dim_;
  const at::Tensor frequencies_;
  mutable Mutex mu_;
  mutable at::Tensor on_device_ ABSL_GUARDED_BY(mu_);
  const double attention_factor_;
};

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_ROPE_H_
