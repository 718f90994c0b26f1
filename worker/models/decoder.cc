#include "worker/models/decoder.h"

#include <map>
#include <memory>
#include <utility>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/empty.h"
#include "torch/nn/modules/container/modulelist.h"
#include "worker/models/per_device.h"
#include "worker/train/activation_checkpoint.h"

namespace muster::models {

DecoderPass DecoderPass::To(const at::Device& device) const {
  DecoderPass moved = *this;
  moved.rotation = rotation.To(device);
  // Layers with the same window share one mask.
  std::map<const void*, AttentionMask> known;
  for (AttentionMask& mask : moved.masks) {
    const auto [found, is_new] = known.try_emplace(mask.mask.unsafeGetTensorImpl());
    if (is_new) found->second = mask.To(device);
    mask.mask = found->second.mask;
  }
  return moved;
}

DecoderAttentionImpl::DecoderAttentionImpl(const DecoderConfig& config, int64_t layer)
    : layer_(layer),
      num_heads_(config.num_heads),
      num_key_value_heads_(config.num_key_value_heads),
      dropout_(config.attention_dropout) {
  const int64_t width = config.hidden_size;
  const int64_t queries = config.num_heads * config.head_dim;
  const int64_t keys = config.num_key_value_heads * config.head_dim;
  q_proj_ = register_module("q_proj", Linear(width, queries, config.qkv_bias));
  k_proj_ = register_module("k_proj", Linear(width, keys, config.qkv_bias));
  v_proj_ = register_module("v_proj", Linear(width, keys, config.qkv_bias));
  o_proj_ = register_module("o_proj", Linear(queries, width, config.attention_output_bias));
}

at::Tensor DecoderAttentionImpl::forward(const at::Tensor& x, const DecoderPass& pass) {
  const at::Tensor queries = pass.rotation.Apply(SplitHeads(q_proj_(x), num_heads_));
  at::Tensor keys = pass.rotation.Apply(SplitHeads(k_proj_(x), num_key_value_heads_));
  at::Tensor values = SplitHeads(v_proj_(x), num_key_value_heads_);
  if (pass.cache != nullptr) std::tie(keys, values) = pass.cache->Append(layer_, keys, values);
  return o_proj_(Attend(queries, keys, values, pass.masks[layer_], is_training() ? dropout_ : 0));
}

DecoderLayerImpl::DecoderLayerImpl(const DecoderConfig& config, int64_t layer) {
  const int64_t width = config.hidden_size;
  self_attn_ = register_module("self_attn", DecoderAttention(config, layer));
  if (config.num_experts > 0) {
    experts_ = register_module("block_sparse_moe", SparseExperts(config));
  } else {
    mlp_ = register_module("mlp", GatedMlp(config, GatedMlpImpl::Names{}));
  }
  input_layernorm_ = register_module("input_layernorm", RmsNorm(width, config.rms_norm_eps));
  post_attention_layernorm_ =
      register_module("post_attention_layernorm", RmsNorm(width, config.rms_norm_eps));
}

DecoderLayerImpl::Output DecoderLayerImpl::forward(const at::Tensor& x, const DecoderPass& pass) {
  const at::Tensor attended = x + self_attn_(input_layernorm_(x), pass);
  const at::Tensor normed = post_attention_layernorm_(attended);
  if (mlp_) return {.x = attended + mlp_(normed)};
  const SparseExpertsImpl::Output mixed = experts_(normed, pass.skip_idle_experts);
  return {.x = attended + mixed.x, .router_logits = mixed.router_logits};
}

DecoderImpl::DecoderImpl(const DecoderConfig& config)
    : sliding_windows_(config.sliding_windows), rotary_(config.rope, config.head_dim) {
  embed_tokens = register_module(
      "embed_tokens", Embedding(config.vocab_size, config.hidden_size, config.pad_token_id));
  torch::nn::ModuleList list = register_module("layers", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.num_layers; ++i) {
    layers_.emplace_back(config, i);
    list->push_back(layers_.back().ptr());
  }
  norm_ = register_module("norm", RmsNorm(config.hidden_size, config.rms_norm_eps));
}

DecoderImpl::Output DecoderImpl::forward(const TextBatch& batch, DecoderPass common) {
  const int64_t past = common.cache == nullptr ? 0 : common.cache->length();
  const int64_t count = batch.input_ids.size(1);
  at::Tensor x = embed_tokens(batch.input_ids);
  const at::Tensor positions =
      batch.position_ids.defined()
          ? batch.position_ids
          : at::arange(past, past + count, batch.input_ids.options()).unsqueeze(0);
  common.rotation = rotary_.At(positions, x.scalar_type());
  const at::Tensor padding = PaddingMask(batch.attention_mask);
  const at::Tensor texts = common.cache == nullptr ? TextsOf(batch) : at::Tensor();
  std::map<int64_t, AttentionMask> of_window;
  for (const int64_t window : sliding_windows_) {
    auto found = of_window.find(window);
    if (found == of_window.end()) {
      found =
          of_window
              .emplace(window, CausalMask(padding, count, past + count, window, x.device(), texts))
              .first;
    }
    common.masks.push_back(found->second);
  }
  Output out;
  const auto move = [](const DecoderPass& from, const at::Device& to) { return from.To(to); };
  PerDevice passes(std::move(common), x.device(), move);
  for (DecoderLayer& layer : layers_) {
    const at::Device device = layer->device();
    const DecoderPass& pass = passes.On(device);
    x = MovedTo(x, device);
    // With a cache there is no second run, which would extend the cache again.
    DecoderLayerImpl::Output next = pass.activation_checkpointing
                                        ? activation_checkpoint(layer, x, pass)
                                    : pass.cache == nullptr ? call(layer, x, pass)
                                                            : layer(x, pass);
    x = next.x;
    if (next.router_logits.defined()) out.router_logits.push_back(next.router_logits);
  }
  out.x = norm_(x);
  return out;
}

std::vector<at::TensorOptions> DecoderImpl::CacheOptions() const {
  std::vector<at::TensorOptions> options;
  for (const DecoderLayer& layer : layers_) {
    options.push_back(embed_tokens->weight.options().requires_grad(false).device(layer->device()));
  }
  return options;
}

DecoderForCausalLMImpl::DecoderForCausalLMImpl(const DecoderConfig& config)
    : CausalLmImpl(ModelConfig(config)) {
  model_ = register_module("model", Decoder(decoder_config()));
  if (!config.tie_word_embeddings) {
    lm_head_ = register_module("lm_head", Linear(config.hidden_size, config.vocab_size, false));
  }
}

CausalLmImpl::Hidden DecoderForCausalLMImpl::Run(const TextBatch& batch, KvCache* cache,
                                                 bool run_idle_experts) {
  const DecoderImpl::Output run =
      model_(batch, DecoderPass{.cache = cache,
                                .skip_idle_experts = !run_idle_experts,
                                .activation_checkpointing = activation_checkpointing()});
  Hidden out = {.hidden = run.x};
  if (cache != nullptr) cache->Advance(batch.input_ids.size(1));
  const DecoderConfig& config = decoder_config();
  if (config.num_experts > 0 && config.output_router_logits && cache == nullptr) {
    out.aux_loss = LoadBalancingLoss(run.router_logits, config.num_experts_per_token,
                                     PaddingMask(batch.attention_mask));
  }
  return out;
}

at::Tensor DecoderForCausalLMImpl::Head(const at::Tensor& hidden) {
  return lm_head_ ? lm_head_(hidden) : model_->embed_tokens->Logits(hidden);
}

KvCache DecoderForCausalLMImpl::NewCache(int64_t batch, int64_t capacity) const {
  const DecoderConfig& config = decoder_config();
  return KvCache(model_->CacheOptions(), batch, config.num_key_value_heads, capacity,
                 config.head_dim);
}

}  // namespace muster::models
