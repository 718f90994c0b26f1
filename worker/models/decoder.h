#ifndef MUSTER_WORKER_MODELS_DECODER_H_
#define MUSTER_WORKER_MODELS_DECODER_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/models/attention.h"
#include "worker/models/layers.h"
#include "worker/models/rope.h"
#include "worker/models/sparse_experts.h"
#include "worker/models/text_model.h"

namespace muster::models {

// Llama, Mistral, Mixtral and Qwen2: one decoder. DecoderConfig has the differences between them;
// modules have the names of their files on the Hub.

// The data that all layers of one forward pass share.
struct DecoderPass {
  Rotation rotation = {};
  // For each layer.
  std::vector<AttentionMask> masks = {};
  KvCache* cache = nullptr;
  bool skip_idle_experts = false;
  bool activation_checkpointing = false;

  // The same for layers on another device.
  DecoderPass To(const at::Device& device) const;
};

// Attention with grouped queries (Ainslie et al., 2023) and rotary positions.
class DecoderAttentionImpl : public torch::nn::Module {
 public:
  DecoderAttentionImpl(const DecoderConfig& config, int64_t layer);
  at::Tensor forward(const at::Tensor& x, const DecoderPass& pass);
  // The device of its keys and values.
  at::Device device() const { return k_proj_->weight.device(); }

 private:
  const int64_t layer_;
  const int64_t num_heads_;
  const int64_t num_key_value_heads_;
  const double dropout_;
  Linear q_proj_{nullptr}, k_proj_{nullptr}, v_proj_{nullptr}, o_proj_{nullptr};
};
TORCH_MODULE(DecoderAttention);

class DecoderLayerImpl : public torch::nn::Module {
 public:
  DecoderLayerImpl(const DecoderConfig& config, int64_t layer);
  struct Output {
    at::Tensor x = {};              // [B, T, width]
    at::Tensor router_logits = {};  // [B * T, experts], of a mixture of experts
  };
  // x [B, T, width].
  Output forward(const at::Tensor& x, const DecoderPass& pass);
  at::Device device() const { return self_attn_->device(); }

 private:
  RmsNorm input_layernorm_{nullptr}, post_attention_layernorm_{nullptr};
  DecoderAttention self_attn_{nullptr};
  // Exactly one of these.
  GatedMlp mlp_{nullptr};
  SparseExperts experts_{nullptr};
};
TORCH_MODULE(DecoderLayer);

// The decoder without its head.
class DecoderImpl : public torch::nn::Module {
 public:
  explicit DecoderImpl(const DecoderConfig& config);
  struct Output {
    at::Tensor x = {};  // of the last layer, normed: [B, T, width]
    // For each layer of a mixture of experts.
    std::vector<at::Tensor> router_logits = {};
  };
  // `common`: as the caller sets it; the rest of it is filled in here.
  Output forward(const TextBatch& batch, DecoderPass common);
  // The options of the keys and values of each layer.
  std::vector<at::TensorOptions> CacheOptions() const;

  Embedding embed_tokens{nullptr};

 private:
  const std::vector<int64_t> sliding_windows_;
  const RotaryEmbedding rotary_;
  std::vector<DecoderLayer> layers_;
  RmsNorm norm_{nullptr};
};
TORCH_MODULE(Decoder);

class DecoderForCausalLMImpl : public CausalLmImpl {
 public:
  // Creates the model without values; see InitWeights(). Throws c10::Error for an invalid config.
  explicit DecoderForCausalLMImpl(const DecoderConfig& config);

  KvCache NewCache(int64_t batch, int64_t capacity) const override;

 protected:
  Hidden Run(const TextBatch& batch, KvCache* cache, bool run_idle_experts) override;
  at::Tensor Head(const at::Tensor& hidden) override;
  double aux_loss_coefficient() const override { return decoder_config().router_aux_loss_coef; }

 private:
  const DecoderConfig& decoder_config() const { return std::get<DecoderConfig>(config()); }

  Decoder model_{nullptr};
  Linear lm_head_{nullptr};
};
TORCH_MODULE(DecoderForCausalLM);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_DECODER_H_
