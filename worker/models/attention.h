#ifndef MUSTER_WORKER_MODELS_ATTENTION_H_
#define MUSTER_WORKER_MODELS_ATTENTION_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "worker/models/per_device.h"

namespace muster::models {

// Which keys a query sees: in `mask` (bool, broadcastable to [B, heads, queries, keys]; undefined:
// all), or those up to its own position if `is_causal`.
struct AttentionMask {
  at::Tensor mask = {};
  bool is_causal = false;

  AttentionMask To(const at::Device& device) const {
    return {.mask = MovedTo(mask, device), .is_causal = is_causal};
  }
};

// `attention_mask` [B, T] of any number type or bool: 0 is padding. Undefined if no position is
// padding, where that is known without waiting for a GPU.
at::Tensor PaddingMask(const at::Tensor& attention_mask);

// Which of several texts each position of a row belongs to, [B or 1, T] int64: a text begins where
// `positions` ([B or 1, T] int64) do not go on by one. Undefined if every row is one text.
at::Tensor PackedTexts(const at::Tensor& positions);

// The last `num_queries` of `num_keys` positions see themselves and what is before them: with
// `window` > 0 only the last `window` positions, themselves included. `padding` ([B, num_keys],
// bool, false is padding; or undefined) is not seen; a position that sees nothing else, as on the
// left of a padded row, sees itself, so that it has something to average and is not NaN. `texts`,
// from PackedTexts(), with as many queries as keys: a position sees its own text alone.
AttentionMask CausalMask(const at::Tensor& padding, int64_t num_queries, int64_t num_keys,
                         int64_t window, at::Device device, const at::Tensor& texts = {});

// Every position sees every other that is no padding.
AttentionMask BidirectionalMask(const at::Tensor& padding);

// softmax(queries keys^T scale) values. queries [B, heads, T, D], keys and values
// [B, key_value_heads, S, D], of which each serves heads / key_value_heads neighbouring heads.
// `scale` <= 0: 1 / sqrt(D). Returns [B, T, heads * D].
at::Tensor Attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const AttentionMask& mask, double dropout, double scale = 0);

// x [B, T, heads * D] to [B, heads, T, D].
at::Tensor SplitHeads(const at::Tensor& x, int64_t num_heads);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_ATTENTION_H_
