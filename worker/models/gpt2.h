#ifndef MUSTER_WORKER_MODELS_GPT2_H_
#define MUSTER_WORKER_MODELS_GPT2_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/models/attention.h"
#include "worker/models/layers.h"
#include "worker/models/text_model.h"

namespace muster::models {

// GPT-2 (Radford et al., 2019), with the names of its files on the Hub.

class Gpt2AttentionImpl : public torch::nn::Module {
 public:
  Gpt2AttentionImpl(const Gpt2Config& config, int64_t layer);
  at::Tensor forward(const at::Tensor& x, const AttentionMask& mask, KvCache* cache);
  // The device of its keys and values.
  at::Device device() const { return c_attn_->weight.device(); }

 private:
  const int64_t layer_;
  const int64_t num_heads_;
  const double attention_dropout_;
  const double residual_dropout_;
  double scale_ = 1;
  Conv1D c_attn_{nullptr}, c_proj_{nullptr};
};
TORCH_MODULE(Gpt2Attention);

class Gpt2MlpImpl : public torch::nn::Module {
 public:
  explicit Gpt2MlpImpl(const Gpt2Config& config);
  at::Tensor forward(const at::Tensor& x);

 private:
  const Activation activation_;
  const double dropout_;
  Conv1D c_fc_{nullptr}, c_proj_{nullptr};
};
TORCH_MODULE(Gpt2Mlp);

class Gpt2BlockImpl : public torch::nn::Module {
 public:
  Gpt2BlockImpl(const Gpt2Config& config, int64_t layer);
  // x [B, T, width] to the same.
  at::Tensor forward(const at::Tensor& x, const AttentionMask& mask, KvCache* cache);
  at::Device device() const { return attn_->device(); }

 private:
  LayerNorm ln_1_{nullptr}, ln_2_{nullptr};
  Gpt2Attention attn_{nullptr};
  Gpt2Mlp mlp_{nullptr};
};
TORCH_MODULE(Gpt2Block);

class Gpt2Impl : public torch::nn::Module {
 public:
  explicit Gpt2Impl(const Gpt2Config& config);
  at::Tensor forward(const TextBatch& batch, KvCache* cache, bool activation_checkpointing);
  // The options of the keys and values of each layer.
  std::vector<at::TensorOptions> CacheOptions() const;

  Embedding wte{nullptr};

 private:
  const double dropout_;
  Embedding wpe_{nullptr};
  std::vector<Gpt2Block> h_;
  LayerNorm ln_f_{nullptr};
};
TORCH_MODULE(Gpt2);

class Gpt2LMHeadModelImpl : public CausalLmImpl {
 public:
  // Creates the model without values; see InitWeights(). Throws c10::Error for an invalid config.
  explicit Gpt2LMHeadModelImpl(const Gpt2Config& config);

  // Projections back into the residual stream get smaller values the more of them there are.
  void InitWeights() override;
  KvCache NewCache(int64_t batch, int64_t capacity) const override;

 protected:
  Hidden Run(const TextBatch& batch, KvCache* cache, bool run_idle_experts) override;
  at::Tensor Head(const at::Tensor& hidden) override;

 private:
  const Gpt2Config& gpt2_config() const { return std::get<Gpt2Config>(config()); }

  Gpt2 transformer_{nullptr};
  Linear lm_head_{nullptr};
};
TORCH_MODULE(Gpt2LMHeadModel);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_GPT2_H_
