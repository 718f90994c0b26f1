#ifndef MUSTER_EXAMPLES_LM_DECODER_H_
#define MUSTER_EXAMPLES_LM_DECODER_H_

#include <cmath>
#include <cstdint>

#include "ATen/Functions.h"
#include "muster/nn.h"
#include "torch/nn/init.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

// A causal decoder of GPT-2's shape. Nothing in it knows about sharding.

struct DecoderOptions {
  int64_t vocabulary = 256;
  int64_t context = 128;
  int64_t width = 256;
  int64_t heads = 4;
  int64_t layers = 4;
};

struct BlockImpl : torch::nn::Module {
  explicit BlockImpl(const DecoderOptions& options) : heads(options.heads) {
    const int64_t width = options.width;
    norm1 = register_module("norm1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    qkv = register_module("qkv", torch::nn::Linear(width, 3 * width));
    out = register_module("out", torch::nn::Linear(width, width));
    norm2 = register_module("norm2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    up = register_module("up", torch::nn::Linear(width, 4 * width));
    down = register_module("down", torch::nn::Linear(4 * width, width));
  }

  // Maps [batch, length, width] to the same shape.
  at::Tensor forward(at::Tensor x) {
    const int64_t batch = x.size(0), length = x.size(1), width = x.size(2);
    std::vector<at::Tensor> parts = qkv(norm1(x)).split(width, -1);
    for (at::Tensor& part : parts) {
      part = part.view({batch, length, heads, width / heads}).transpose(1, 2);
    }
    const at::Tensor attended =
        at::scaled_dot_product_attention(parts[0], parts[1], parts[2], {}, 0.0, /*is_causal=*/true);
    x = x + out(attended.transpose(1, 2).reshape({batch, length, width}));
    return x + down(at::gelu(up(norm2(x))));
  }

  const int64_t heads;
  torch::nn::LayerNorm norm1{nullptr}, norm2{nullptr};
  torch::nn::Linear qkv{nullptr}, out{nullptr}, up{nullptr}, down{nullptr};
};
TORCH_MODULE(Block);

struct DecoderImpl : torch::nn::Module {
  explicit DecoderImpl(const DecoderOptions& options) {
    tokens = register_module("tokens", torch::nn::Embedding(options.vocabulary, options.width));
    positions = register_module("positions", torch::nn::Embedding(options.context, options.width));
    blocks = register_module("blocks", torch::nn::ModuleList());
    for (int64_t i = 0; i < options.layers; ++i) blocks->push_back(Block(options));
    norm =
        register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({options.width})));
    for (auto& parameter : named_parameters()) {
      if (parameter.value().dim() == 2) torch::nn::init::normal_(parameter.value(), 0, 0.02);
    }
  }

  // Maps tokens [batch, length] to logits [batch, length, vocabulary]. The embedding is the head,
  // too.
  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = tokens(ids) + positions(at::arange(ids.size(1), ids.options()));
    // Lets options.activation_checkpointing have blocks run again in the backward pass.
    for (const auto& block : *blocks) x = muster::call(block->as<BlockImpl>(), x);
    return at::linear(norm(x), tokens->weight);
  }

  torch::nn::Embedding tokens{nullptr}, positions{nullptr};
  torch::nn::ModuleList blocks{nullptr};
  torch::nn::LayerNorm norm{nullptr};
};
TORCH_MODULE(Decoder);

#endif  // MUSTER_EXAMPLES_LM_DECODER_H_
