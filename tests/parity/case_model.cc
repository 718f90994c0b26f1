#include "tests/parity/case_model.h"

#include <cmath>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "ATen/Functions.h"
#include "torch/nn/modules/container/modulelist.h"
#include "torch/nn/modules/conv.h"
#include "torch/nn/modules/embedding.h"
#include "torch/nn/modules/linear.h"
#include "torch/nn/modules/normalization.h"

namespace muster::parity {
namespace {

using Json = nlohmann::json;

// Applies torch's Python linear, one operator. torch::nn::Linear adds the bias in a second step,
// which under bfloat16 autocast rounds twice for inputs of three dimensions.
at::Tensor Apply(const torch::nn::Linear& layer, const at::Tensor& x) {
  return at::linear(x, layer->weight, layer->bias);
}

class BlockImpl : public torch::nn::Module {
 public:
  BlockImpl(int64_t hidden, int64_t heads) : heads_(heads) {
    ln1_ = register_module("ln1", torch::nn::LayerNorm(torch::nn::LayerNormOptions({hidden})));
    qkv_ = register_module(
        "qkv", torch::nn::Linear(torch::nn::LinearOptions(hidden, 3 * hidden).bias(false)));
    proj_ = register_module("proj", torch::nn::Linear(hidden, hidden));
    ln2_ = register_module("ln2", torch::nn::LayerNorm(torch::nn::LayerNormOptions({hidden})));
    fc_ = register_module("fc", torch::nn::Linear(hidden, 4 * hidden));
    out_ = register_module("out", torch::nn::Linear(4 * hidden, hidden));
  }

  at::Tensor forward(at::Tensor x) {
    x = x + Apply(proj_, Attend(ln1_(x)));
    return x + Apply(out_, at::gelu(Apply(fc_, ln2_(x))));
  }

 private:
  at::Tensor Attend(const at::Tensor& x) {
    const int64_t batch = x.size(0), length = x.size(1), hidden = x.size(2);
    const std::vector<at::Tensor> parts = Apply(qkv_, x).split(hidden, 2);
    const auto heads = [&](const at::Tensor& t) {
      return t.view({batch, length, heads_, hidden / heads_}).transpose(1, 2);
    };
    at::Tensor scores = at::matmul(heads(parts[0]), heads(parts[1]).transpose(-2, -1)) /
                        std::sqrt(static_cast<double>(hidden / heads_));
    const at::Tensor allowed = at::ones({length, length}, scores.options().dtype(at::kBool)).tril();
    scores = scores.masked_fill(allowed.logical_not(), -std::numeric_limits<float>::infinity());
    return at::matmul(at::softmax(scores, -1), heads(parts[2]))
        .transpose(1, 2)
        .reshape({batch, length, hidden});
  }

  const int64_t heads_;
  torch::nn::LayerNorm ln1_{nullptr}, ln2_{nullptr};
  torch::nn::Linear qkv_{nullptr}, proj_{nullptr}, fc_{nullptr}, out_{nullptr};
};
TORCH_MODULE(Block);

}  // namespace

class CaseModelImpl::Body {
 public:
  virtual ~Body() = default;
  virtual at::Tensor Forward(at::Tensor x) = 0;
};

class CaseModelImpl::Sequential : public Body {
 public:
  Sequential(torch::nn::Module& owner, const Json& layers) {
    struct Named : torch::nn::Module {};
    auto net = std::make_shared<Named>();
    owner.register_module("net", net);
    for (size_t i = 0; i < layers.size(); ++i) Add(*net, std::to_string(i), layers[i]);
  }

  at::Tensor Forward(at::Tensor x) override {
    for (const auto& layer : layers_) x = layer(x);
    return x;
  }

 private:
  template <class M>
  void Keep(torch::nn::Module& net, const std::string& name, M module) {
    net.register_module(name, module);
    layers_.push_back([module](const at::Tensor& x) mutable { return module(x); });
  }

  void Add(torch::nn::Module& net, const std::string& name, const Json& layer) {
    const std::string kind = layer.at("layer");
    if (kind == "linear") {
      const torch::nn::Linear linear(torch::nn::LinearOptions(layer.at("in"), layer.at("out"))
                                         .bias(layer.value("bias", true)));
      net.register_module(name, linear);
      layers_.push_back([linear](const at::Tensor& x) { return Apply(linear, x); });
    } else if (kind == "conv2d") {
      const int64_t kernel = layer.at("kernel"), padding = layer.value("padding", 0),
                    stride = layer.value("stride", 1);
      Keep(net, name,
           torch::nn::Conv2d(torch::nn::Conv2dOptions(layer.at("in"), layer.at("out"), kernel)
                                 .padding(padding)
                                 .stride(stride)
                                 .bias(layer.value("bias", true))));
    } else if (kind == "groupnorm") {
      Keep(net, name,
           torch::nn::GroupNorm(
               torch::nn::GroupNormOptions(layer.at("groups"), layer.at("channels"))));
    } else if (kind == "layernorm") {
      const int64_t size = layer.at("size");
      Keep(net, name, torch::nn::LayerNorm(torch::nn::LayerNormOptions({size})));
    } else if (kind == "maxpool2d") {
      const int64_t kernel = layer.at("kernel"), stride = layer.value("stride", kernel);
      layers_.push_back([kernel, stride](const at::Tensor& x) {
        return at::max_pool2d(x, {kernel, kernel}, {stride, stride});
      });
    } else if (kind == "flatten") {
      layers_.push_back([](const at::Tensor& x) { return x.flatten(1); });
    } else if (kind == "relu") {
      layers_.push_back([](const at::Tensor& x) { return at::relu(x); });
    } else if (kind == "tanh") {
      layers_.push_back([](const at::Tensor& x) { return at::tanh(x); });
    } else if (kind == "gelu") {
      layers_.push_back([](const at::Tensor& x) { return at::gelu(x); });
    } else {
      TORCH_CHECK(false, "layer ", name, ": unknown kind \"", kind, "\"");
    }
  }

  std::vector<std::function<at::Tensor(const at::Tensor&)>> layers_;
};

class CaseModelImpl::Decoder : public Body {
 public:
  Decoder(torch::nn::Module& owner, const Json& in) : tie_head_(in.at("tie_head")) {
    const int64_t vocab = in.at("vocab"), hidden = in.at("hidden");
    tok_ = owner.register_module("tok", torch::nn::Embedding(vocab, hidden));
    pos_ = owner.register_module("pos", torch::nn::Embedding(int64_t{in.at("context")}, hidden));
    blocks_ = owner.register_module("blocks", torch::nn::ModuleList());
    const int64_t layers = in.at("layers");
    for (int64_t i = 0; i < layers; ++i) blocks_->push_back(Block(hidden, int64_t{in.at("heads")}));
    ln_f_ =
        owner.register_module("ln_f", torch::nn::LayerNorm(torch::nn::LayerNormOptions({hidden})));
    if (!tie_head_) {
      head_ = owner.register_module(
          "head", torch::nn::Linear(torch::nn::LinearOptions(hidden, vocab).bias(false)));
    }
  }

  at::Tensor Forward(at::Tensor ids) override {
    at::Tensor x = tok_(ids) + pos_(at::arange(ids.size(1), ids.options()));
    for (const auto& block : *blocks_) x = block->as<BlockImpl>()->forward(x);
    x = ln_f_(x);
    return tie_head_ ? at::linear(x, tok_->weight) : Apply(head_, x);
  }

 private:
  const bool tie_head_;
  torch::nn::Embedding tok_{nullptr}, pos_{nullptr};
  torch::nn::ModuleList blocks_{nullptr};
  torch::nn::LayerNorm ln_f_{nullptr};
  torch::nn::Linear head_{nullptr};
};

CaseModelImpl::CaseModelImpl(const Json& description) {
  const std::string type = description.at("type");
  if (type == "sequential") {
    body_ = std::make_shared<Sequential>(*this, description.at("layers"));
  } else if (type == "decoder") {
    body_ = std::make_shared<Decoder>(*this, description);
  } else {
    TORCH_CHECK(false, "model: unknown type \"", type, "\"");
  }
}

CaseModelImpl::~CaseModelImpl() = default;

torch::Tensor CaseModelImpl::forward(torch::Tensor x) { return body_->Forward(std::move(x)); }

}  // namespace muster::parity
