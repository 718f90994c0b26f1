#ifndef MUSTER_WORKER_BIGMODEL_TEST_NETS_H_
#define MUSTER_WORKER_BIGMODEL_TEST_NETS_H_

#include <string>

#include "ATen/Functions.h"
#include "torch/nn/module.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"
#include "torch/nn/pimpl.h"

namespace muster {

// A block with a table that its constructor computes, as rotary embeddings have.
class BlockImpl : public torch::nn::Module {
 public:
  explicit BlockImpl(int64_t width)
      : norm(register_module("norm", torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})))),
        up(register_module("up", torch::nn::Linear(width, 4 * width))),
        down(register_module("down", torch::nn::Linear(4 * width, width))),
        table(
            register_buffer("table", 1.0 / at::pow(100.0, at::arange(0, width) / (2.0 * width)))) {}

  at::Tensor forward(const at::Tensor& x) {
    // A load with a dtype leaves the table in its own.
    return x + down(at::gelu(up(norm(x) * table.to(x.scalar_type()))));
  }

  torch::nn::LayerNorm norm;
  torch::nn::Linear up, down;
  at::Tensor table;
};
TORCH_MODULE(Block);

// Embedding, blocks, and a head without bias that may be tied to the embedding.
class TextNetImpl : public torch::nn::Module {
 public:
  TextNetImpl(int64_t vocabulary, int64_t width, int64_t blocks, bool tied = false)
      : embed(register_module("embed", torch::nn::Embedding(vocabulary, width))) {
    for (int64_t i = 0; i < blocks; ++i) layers->push_back(Block(width));
    register_module("layers", layers);
    register_module("norm", norm = torch::nn::LayerNorm(torch::nn::LayerNormOptions({width})));
    if (tied) {
      head_weight = register_parameter("head", embed->weight);
    } else {
      head_weight = register_parameter("head", at::empty({vocabulary, width}).normal_());
    }
  }

  at::Tensor forward(const at::Tensor& ids) {
    at::Tensor x = embed(ids);
    for (const auto& layer : *layers) x = layer->as<BlockImpl>()->forward(x);
    return at::linear(norm(x), head_weight);
  }

  torch::nn::Embedding embed;
  torch::nn::ModuleList layers;
  torch::nn::LayerNorm norm{nullptr};
  at::Tensor head_weight;
};
TORCH_MODULE(TextNet);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_TEST_NETS_H_
