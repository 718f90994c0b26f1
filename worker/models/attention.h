#ifndef MUSTER_WORKER_MODELS_ATTENTION_H_
#define MUSTER_WORKER_MODELS_ATTENTION_H_

#include <cstdint>

#include "ATen/core/Tensor.h"
#include "worker/models/per_device.h"

namespace muster::models {

// The keys that a query attends to: in `mask` (bool, broadcastable to [B, heads, queries, keys];
// undefined: all), or those up to its own position if `is_causal`.
struct AttentionMask {
  at::Tensor mask = {};
  bool is_causal = false;

  AttentionMask To(const at::Device& device) const {
    return {.mask = MovedTo(mask, device), .is_causal = is_causal};
  }
};

// Returns `attention_mask` [B, T], of any number type or bool, with 0 for padding, as a mask.
// Undefined if no position is padding, as far as that is known without waiting for a GPU.
at::Tensor PaddingMask(const at::Tensor& attention_mask);

// Returns which of several texts each position of a row belongs to, [B or 1, T] int64: a text
// begins where `positions` ([B or 1, T] int64) do not increase by one. Undefined if every row is
// one text.
at::Tensor PackedTexts(const at::Tensor& positions);

// Returns the mask for the last `num_queries` of `num_keys` positions, which attend to themselves
// and earlier ones: with `window` > 0 only to the last `window` positions, including themselves.
// `padding` ([B, num_keys], bool, false is padding; or undefined) is hidden; a position that would
// attend to nothing, as on the left of a padded row, attends to itself, so that its average is not
// NaN. `texts`, from PackedTexts(), with as many queries as keys: a position attends only to its
// own text.
AttentionMask CausalMask(const at::Tensor& padding, int64_t num_queries, int64_t num_keys,
                         int64_t window, at::Device device, const at::Tensor& texts = {});

// Returns the mask with which every position attends to every other one that is not padding.
AttentionMask BidirectionalMask(const at::Tensor& padding);

// Returns softmax(queries keys^T scale) values. queries [B, heads, T, D], keys and values [B,
// key_value_heads, S, D], each of which serves heads / key_value_heads neighbouring heads. `scale`
// <= 0: 1 / sqrt(D). The result is [B, T, heads * D].
at::Tensor Attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const AttentionMask& mask, double dropout, double scale = 0);

// Reshapes x [B, T, heads * D] to [B, heads, T, D].
at::Tensor SplitHeads(const at::Tensor& x, int64_t num_heads);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_ATTENTION_H_
