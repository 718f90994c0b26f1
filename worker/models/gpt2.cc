#include "worker/models/gpt2.h"

#include <cmath>
#include <memory>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "absl/strings/match.h"
#include "torch/nn/modules/container/modulelist.h"
#include "worker/models/per_device.h"
#include "worker/train/activation_checkpoint.h"

namespace muster::models {

Gpt2AttentionImpl::Gpt2AttentionImpl(const Gpt2Config& config, int64_t layer)
    : layer_(layer),
      num_heads_(config.num_heads),
      attention_dropout_(config.attention_dropout),
      residual_dropout_(config.residual_dropout) {
  const double head_dim = static_cast<double>(config.hidden_size / config.num_heads);
  if (config.scale_attention) scale_ /= std::sqrt(head_dim);
  if (config.scale_attention_by_layer) scale_ /= static_cast<double>(layer + 1);
  c_attn_ = register_module("c_attn", Conv1D(config.hidden_size, 3 * config.hidden_size));
  c_proj_ = register_module("c_proj", Conv1D(config.hidden_size, config.hidden_size));
}

at::Tensor Gpt2AttentionImpl::forward(const at::Tensor& x, const AttentionMask& mask,
                                      KvCache* cache) {
  const std::vector<at::Tensor> parts = c_attn_(x).chunk(3, -1);
  const at::Tensor queries = SplitHeads(parts[0], num_heads_);
  at::Tensor keys = SplitHeads(parts[1], num_heads_);
  at::Tensor values = SplitHeads(parts[2], num_heads_);
  if (cache != nullptr) std::tie(keys, values) = cache->Append(layer_, keys, values);
  const double dropout = is_training() ? attention_dropout_ : 0;
  return Dropout(c_proj_(Attend(queries, keys, values, mask, dropout, scale_)), residual_dropout_,
                 is_training());
}

Gpt2MlpImpl::Gpt2MlpImpl(const Gpt2Config& config)
    : activation_(config.activation), dropout_(config.residual_dropout) {
  c_fc_ = register_module("c_fc", Conv1D(config.hidden_size, config.inner_size));
  c_proj_ = register_module("c_proj", Conv1D(config.inner_size, config.hidden_size));
}

at::Tensor Gpt2MlpImpl::forward(const at::Tensor& x) {
  return Dropout(c_proj_(Activate(activation_, c_fc_(x))), dropout_, is_training());
}

Gpt2BlockImpl::Gpt2BlockImpl(const Gpt2Config& config, int64_t layer) {
  const auto norm = [&config] { return LayerNorm(config.hidden_size, config.layer_norm_epsilon); };
  ln_1_ = register_module("ln_1", norm());
  attn_ = register_module("attn", Gpt2Attention(config, layer));
  ln_2_ = register_module("ln_2", norm());
  mlp_ = register_module("mlp", Gpt2Mlp(config));
}

at::Tensor Gpt2BlockImpl::forward(const at::Tensor& x, const AttentionMask& mask, KvCache* cache) {
  const at::Tensor attended = x + attn_(ln_1_(x), mask, cache);
  return attended + mlp_(ln_2_(attended));
}

Gpt2Impl::Gpt2Impl(const Gpt2Config& config) : dropout_(config.embedding_dropout) {
  wte = register_module("wte", Embedding(config.vocab_size, config.hidden_size));
  wpe_ = register_module("wpe", Embedding(config.max_positions, config.hidden_size));
  torch::nn::ModuleList list = register_module("h", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.num_layers; ++i) {
    h_.emplace_back(config, i);
    list->push_back(h_.back().ptr());
  }
  ln_f_ = register_module("ln_f", LayerNorm(config.hidden_size, config.layer_norm_epsilon));
}

at::Tensor Gpt2Impl::forward(const TextBatch& batch, KvCache* cache,
                             bool activation_checkpointing) {
  const int64_t past = cache == nullptr ? 0 : cache->length();
  const int64_t count = batch.input_ids.size(1);
  const at::Tensor positions =
      batch.position_ids.defined()
          ? batch.position_ids
          : at::arange(past, past + count, batch.input_ids.options()).unsqueeze(0);
  at::Tensor x = wte(batch.input_ids) + wpe_(positions);
  // Token types are tokens of the vocabulary here.
  if (batch.token_type_ids.defined()) x = x + wte(batch.token_type_ids);
  x = Dropout(x, dropout_, is_training());
  const auto move = [](const AttentionMask& from, const at::Device& to) { return from.To(to); };
  PerDevice masks(CausalMask(PaddingMask(batch.attention_mask), count, past + count, /*window=*/0,
                             x.device(), cache == nullptr ? TextsOf(batch) : at::Tensor()),
                  x.device(), move);
  for (Gpt2Block& block : h_) {
    const at::Device device = block->device();
    const AttentionMask& mask = masks.On(device);
    x = MovedTo(x, device);
    if (activation_checkpointing) {
      x = activation_checkpoint(block, x, mask, cache);
    } else if (cache == nullptr) {
      x = call(block, x, mask, cache);
    } else {  // a second run would extend the cache again
      x = block(x, mask, cache);
    }
  }
  if (cache != nullptr) cache->Advance(count);
  return ln_f_(x);
}

std::vector<at::TensorOptions> Gpt2Impl::CacheOptions() const {
  std::vector<at::TensorOptions> options;
  for (const Gpt2Block& block : h_) {
    options.push_back(wte->weight.options().requires_grad(false).device(block->device()));
  }
  return options;
}

Gpt2LMHeadModelImpl::Gpt2LMHeadModelImpl(const Gpt2Config& config)
    : CausalLmImpl(ModelConfig(config)) {
  transformer_ = register_module("transformer", Gpt2(gpt2_config()));
  if (!config.tie_word_embeddings) {
    lm_head_ = register_module("lm_head", Linear(config.hidden_size, config.vocab_size, false));
  }
}

void Gpt2LMHeadModelImpl::InitWeights() {
  TextModelImpl::InitWeights();
  const Gpt2Config& config = gpt2_config();
  const double deviation =
      config.initializer_range / std::sqrt(2.0 * static_cast<double>(config.num_layers));
  for (const auto& item : named_modules()) {
    auto* const linear = item.value()->as<Conv1DImpl>();
    if (linear != nullptr && absl::EndsWith(item.key(), ".c_proj")) linear->InitWeights(deviation);
  }
}

CausalLmImpl::Hidden Gpt2LMHeadModelImpl::Run(const TextBatch& batch, KvCache* cache,
                                              bool /*run_idle_experts*/) {
  return {.hidden = transformer_(batch, cache, activation_checkpointing())};
}

at::Tensor Gpt2LMHeadModelImpl::Head(const at::Tensor& hidden) {
  return lm_head_ ? lm_head_(hidden) : transformer_->wte->Logits(hidden);
}

KvCache Gpt2LMHeadModelImpl::NewCache(int64_t batch, int64_t capacity) const {
  const Gpt2Config& config = gpt2_config();
  return KvCache(transformer_->CacheOptions(), batch, config.num_heads, capacity,
                 config.hidden_size / config.num_heads);
}

}  // namespace muster::models
