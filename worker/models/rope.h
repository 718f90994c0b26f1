#ifndef MUSTER_WORKER_MODELS_ROPE_H_
#define MUSTER_WORKER_MODELS_ROPE_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "worker/models/model_config.h"

namespace muster::models {

// Rotary position embedding (Su et al., 2021), with the frequencies of transformers' types
// "default", "linear" (Chen et al., 2023) and "llama3".

// The angle between neighbouring positions for each pair of a head's dimensions: float32
// [head_dim / 2], on the CPU.
at::Tensor RopeFrequencies(const RopeConfig& rope, int64_t head_dim);

// Cosines and sines of some positions, computed once for all layers.
struct Rotation {
  at::Tensor cos = {};  // [B or 1, 1, T, head_dim]
  at::Tensor sin = {};

  // x [B, heads, T, head_dim] with its first and second half turned against each other.
  at::Tensor Apply(const at::Tensor& x) const;
};

// `positions` [B or 1, T] int64; the angles are float32, cosines and sines of `dtype`.
Rotation RotationAt(const at::Tensor& frequencies, const at::Tensor& positions,
                    at::ScalarType dtype);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_ROPE_H_
