#include "worker/models/bert.h"

#include <memory>

#include "ATen/TensorOperators.h"
#include "ATen/ops/arange.h"
#include "ATen/ops/binary_cross_entropy_with_logits.h"
#include "ATen/ops/linear.h"
#include "ATen/ops/mse_loss.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "torch/nn/modules/container/modulelist.h"
#include "worker/models/per_device.h"
#include "worker/train/activation_checkpoint.h"

namespace muster::models {
namespace {

// Adds an empty module between a parent and the modules that have its name in the files.
std::shared_ptr<torch::nn::Module> Level(torch::nn::Module& parent, const std::string& name) {
  return parent.register_module(name, std::make_shared<torch::nn::Module>(name));
}

}  // namespace

BertOutputImpl::BertOutputImpl(const BertConfig& config, int64_t in)
    : dropout_(config.hidden_dropout) {
  dense_ = register_module("dense", Linear(in, config.hidden_size, true));
  norm_ = register_module("LayerNorm", LayerNorm(config.hidden_size, config.layer_norm_eps));
}

at::Tensor BertOutputImpl::forward(const at::Tensor& y, const at::Tensor& x) {
  return norm_(Dropout(dense_(y), dropout_, is_training()) + x);
}

BertLayerImpl::BertLayerImpl(const BertConfig& config)
    : num_heads_(config.num_heads),
      dropout_(config.attention_dropout),
      activation_(config.activation) {
  const int64_t width = config.hidden_size;
  const auto attention = Level(*this, "attention");
  const auto self = Level(*attention, "self");
  query_ = self->register_module("query", Linear(width, width, true));
  key_ = self->register_module("key", Linear(width, width, true));
  value_ = self->register_module("value", Linear(width, width, true));
  attention_output_ = attention->register_module("output", BertOutput(config, width));
  intermediate_ = Level(*this, "intermediate")
                      ->register_module("dense", Linear(width, config.intermediate_size, true));
  output_ = register_module("output", BertOutput(config, config.intermediate_size));
}

at::Tensor BertLayerImpl::forward(const at::Tensor& x, const AttentionMask& mask) {
  const at::Tensor attended =
      Attend(SplitHeads(query_(x), num_heads_), SplitHeads(key_(x), num_heads_),
             SplitHeads(value_(x), num_heads_), mask, is_training() ? dropout_ : 0);
  const at::Tensor inner = attention_output_(attended, x);
  return output_(Activate(activation_, intermediate_(inner)), inner);
}

BertImpl::BertImpl(const BertConfig& config, bool has_pooler) : dropout_(config.hidden_dropout) {
  const int64_t width = config.hidden_size;
  const auto embeddings = Level(*this, "embeddings");
  word_embeddings = embeddings->register_module(
      "word_embeddings", Embedding(config.vocab_size, width, config.pad_token_id));
  position_embeddings_ =
      embeddings->register_module("position_embeddings", Embedding(config.max_positions, width));
  token_type_embeddings_ = embeddings->register_module("token_type_embeddings",
                                                       Embedding(config.type_vocab_size, width));
  norm_ = embeddings->register_module("LayerNorm", LayerNorm(width, config.layer_norm_eps));
  torch::nn::ModuleList list =
      Level(*this, "encoder")->register_module("layer", torch::nn::ModuleList());
  for (int64_t i = 0; i < config.num_layers; ++i) {
    layers_.emplace_back(config);
    list->push_back(layers_.back().ptr());
  }
  if (has_pooler) {
    pooler_ = Level(*this, "pooler")->register_module("dense", Linear(width, width, true));
  }
}

at::Tensor BertImpl::forward(const TextBatch& batch, bool activation_checkpointing) {
  const at::Tensor& ids = batch.input_ids;
  const at::Tensor positions = batch.position_ids.defined()
                                   ? batch.position_ids
                                   : at::arange(ids.size(1), ids.options()).unsqueeze(0);
  const at::Tensor types =
      batch.token_type_ids.defined() ? batch.token_type_ids : at::zeros_like(ids);
  // In transformers' order, so that sums are rounded in the same way.
  const at::Tensor sum =
      word_embeddings(ids) + token_type_embeddings_(types) + position_embeddings_(positions);
  at::Tensor x = Dropout(norm_(sum), dropout_, is_training());
  const auto move = [](const AttentionMask& from, const at::Device& to) { return from.To(to); };
  PerDevice masks(BidirectionalMask(PaddingMask(batch.attention_mask)), ids.device(), move);
  for (BertLayer& layer : layers_) {
    const at::Device device = layer->device();
    const AttentionMask& mask = masks.On(device);
    x = MovedTo(x, device);
    x = activation_checkpointing ? activation_checkpoint(layer, x, mask) : call(layer, x, mask);
  }
  return x;
}

at::Tensor BertImpl::Pool(const at::Tensor& hidden) { return pooler_(hidden.select(1, 0)).tanh(); }

BertModelImpl::BertModelImpl(const BertConfig& config, bool has_pooler)
    : TextModelImpl(ModelConfig(config)) {
  bert_ = register_module("bert", Bert(bert_config(), has_pooler));
}

BertForMaskedLMImpl::BertForMaskedLMImpl(const BertConfig& config)
    : BertModelImpl(config, /*has_pooler=*/false) {
  const int64_t width = config.hidden_size;
  const auto predictions = Level(*Level(*this, "cls"), "predictions");
  const auto transform = Level(*predictions, "transform");
  transform_ = transform->register_module("dense", Linear(width, width, true));
  transform_norm_ =
      transform->register_module("LayerNorm", LayerNorm(width, config.layer_norm_eps));
  // The bias has the shape and place of a weight that layers make, and the name from the files.
  bias_ = at::zeros({config.vocab_size}, transform_->weight.options().requires_grad(false));
  if (config.tie_word_embeddings) {
    bias_ = predictions->register_parameter("bias", bias_);
    return;
  }
  // An untied head has its own bias, and this one only serves the files (IsUnused). As a buffer it
  // takes no part in training, and optimizers number the parameters as they did before Muster kept
  // it: the states in older checkpoints depend on these numbers.
  bias_ = predictions->register_buffer("bias", bias_);
  decoder_ = predictions->register_module("decoder", Linear(width, config.vocab_size, true));
}

void BertForMaskedLMImpl::InitWeights() {
  TextModelImpl::InitWeights();
  const at::NoGradGuard no_grad;
  bias_.zero_();
}

std::vector<std::string> BertForMaskedLMImpl::OptionalTensors() const {
  if (bert_config().tie_word_embeddings) return {};
  return {"cls.predictions.bias"};
}

ModelOutput BertForMaskedLMImpl::forward(const TextBatch& batch) {
  CheckBatch(batch, Common(config()), /*past=*/0);
  const at::Tensor hidden = transform_norm_(
      Activate(bert_config().activation, transform_(bert_(batch, activation_checkpointing()))));
  ModelOutput output = {.logits = decoder_
                                      ? decoder_(hidden)
                                      : at::linear(hidden, bert_->word_embeddings->weight, bias_)};
  if (!batch.labels.defined()) return output;
  TORCH_CHECK(batch.labels.sizes() == batch.input_ids.sizes(), "labels have the shape ",
              batch.labels.sizes(), ", input_ids ", batch.input_ids.sizes());
  output.loss = CrossEntropy(output.logits.flatten(0, 1), batch.labels.flatten());
  return output;
}

BertForSequenceClassificationImpl::BertForSequenceClassificationImpl(const BertConfig& config)
    : BertModelImpl(config, /*has_pooler=*/true) {
  classifier_ = register_module("classifier", Linear(config.hidden_size, config.num_labels, true));
}

ModelOutput BertForSequenceClassificationImpl::forward(const TextBatch& batch) {
  CheckBatch(batch, Common(config()), /*past=*/0);
  const at::Tensor pooled = bert_->Pool(bert_(batch, activation_checkpointing()));
  ModelOutput output = {
      .logits = classifier_(Dropout(pooled, bert_config().classifier_dropout, is_training()))};
  if (batch.labels.defined()) output.loss = Loss(output.logits, batch.labels);
  return output;
}

at::Tensor BertForSequenceClassificationImpl::Loss(const at::Tensor& logits,
                                                   const at::Tensor& labels) const {
  using Problem = BertConfig::Problem;
  Problem problem = bert_config().problem;
  if (problem == Problem::kFromLabels) {
    const bool whole = at::isIntegralType(labels.scalar_type(), /*includeBool=*/false);
    problem = bert_config().num_labels == 1 ? Problem::kRegression
              : whole                       ? Problem::kSingleLabel
                                            : Problem::kMultiLabel;
  }
  const int64_t rows = logits.size(0);
  if (problem == Problem::kSingleLabel) {
    TORCH_CHECK(labels.numel() == rows, "labels of ", rows, " rows must be [", rows,
                "], one class "
                "each; they are ",
                labels.sizes());
    return CrossEntropy(logits, labels.flatten());
  }
  TORCH_CHECK(labels.numel() == logits.numel(), "labels must be ", logits.sizes(),
              ", a number for each row and label; they are ", labels.sizes());
  const at::Tensor wide = logits.to(c10::kFloat);
  const at::Tensor wanted = labels.to(c10::kFloat).view(logits.sizes());
  return problem == Problem::kRegression ? at::mse_loss(wide, wanted)
                                         : at::binary_cross_entropy_with_logits(wide, wanted);
}

}  // namespace muster::models
