#include "worker/models/attention.h"

#include <optional>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/constant_pad_nd.h"
#include "ATen/ops/logical_and.h"
#include "ATen/ops/logical_or.h"
#include "ATen/ops/scaled_dot_product_attention.h"

namespace muster::models {
namespace {

// Repeats each head `times` times, consecutively.
at::Tensor RepeatHeads(const at::Tensor& x, int64_t times) {
  return x.unsqueeze(2).expand({-1, -1, times, -1, -1}).flatten(1, 2);
}

}  // namespace

at::Tensor PaddingMask(const at::Tensor& attention_mask) {
  if (!attention_mask.defined()) return {};
  at::Tensor mask = attention_mask.to(c10::kBool);
  if (mask.is_cpu() && mask.all().item<bool>()) return {};
  return mask;
}

at::Tensor PackedTexts(const at::Tensor& positions) {
  if (positions.size(1) < 2) return {};
  const at::Tensor begins = at::constant_pad_nd(positions.diff(/*n=*/1, /*dim=*/1) != 1, {1, 0}, 0);
  // Waits for a GPU, once in a forward pass, as transformers does: an unnecessary mask would cost
  // more, because it excludes the attention kernels that take none.
  if (!begins.any().item<bool>()) return {};
  return begins.cumsum(1);
}

AttentionMask CausalMask(const at::Tensor& padding, int64_t num_queries, int64_t num_keys,
                         int64_t window, at::Device device, const at::Tensor& texts) {
  const bool has_window = window > 0 && window < num_keys;
  if (!padding.defined() && !has_window && !texts.defined()) {
    if (num_queries == 1) return {};
    if (num_queries == num_keys) return {.is_causal = true};
  }
  const auto options = at::TensorOptions().device(device).dtype(c10::kLong);
  const at::Tensor queries =
      at::arange(num_keys - num_queries, num_keys, options).view({1, 1, num_queries, 1});
  const at::Tensor keys = at::arange(num_keys, options).view({1, 1, 1, num_keys});
  at::Tensor seen = keys <= queries;
  if (has_window) seen = at::logical_and(seen, queries - keys < window);
  if (texts.defined()) {
    seen = at::logical_and(seen,
                           texts.view({-1, 1, num_queries, 1}) == texts.view({-1, 1, 1, num_keys}));
  }
  if (padding.defined()) {
    seen = at::logical_and(seen, padding.view({-1, 1, 1, num_keys}));
    const at::Tensor sees_nothing = seen.any(-1, /*keepdim=*/true).logical_not();
    seen = at::logical_or(seen, at::logical_and(sees_nothing, keys == queries));
  }
  return {.mask = seen};
}

AttentionMask BidirectionalMask(const at::Tensor& padding) {
  if (!padding.defined()) return {};
  // A row of only padding attends to all of itself.
  const at::Tensor seen = at::logical_or(padding, padding.any(1, /*keepdim=*/true).logical_not());
  return {.mask = seen.view({-1, 1, 1, padding.size(1)})};
}

at::Tensor Attend(const at::Tensor& queries, const at::Tensor& keys, const at::Tensor& values,
                  const AttentionMask& mask, double dropout, double scale) {
  const std::optional<at::Tensor> seen =
      mask.mask.defined() ? std::make_optional(mask.mask) : std::nullopt;
  const int64_t shared_by = queries.size(1) / keys.size(1);
  // With a mask, gradients in bfloat16 add up as in transformers only if heads are repeated; and a
  // GPU's kernels that take a mask take no shared heads.
  const bool repeats =
      shared_by > 1 && seen.has_value() && (keys.requires_grad() || keys.is_cuda());
  const at::Tensor attended = at::scaled_dot_product_attention(
      queries, repeats ? RepeatHeads(keys, shared_by) : keys,
      repeats ? RepeatHeads(values, shared_by) : values, seen, dropout, mask.is_causal,
      scale > 0 ? std::make_optional(scale) : std::nullopt,
      /*enable_gqa=*/shared_by > 1 && !repeats);
  return attended.transpose(1, 2).flatten(2);
}

at::Tensor SplitHeads(const at::Tensor& x, int64_t num_heads) {
  return x.view({x.size(0), x.size(1), num_heads, -1}).transpose(1, 2);
}

}  // namespace muster::models
