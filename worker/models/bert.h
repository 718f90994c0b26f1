#ifndef MUSTER_WORKER_MODELS_BERT_H_
#define MUSTER_WORKER_MODELS_BERT_H_

#include <cstdint>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/checkpoint/optional_tensors.h"
#include "worker/models/attention.h"
#include "worker/models/layers.h"
#include "worker/models/text_model.h"

namespace muster::models {

// BERT (Devlin et al., 2018), with the names of its files on the Hub.

// Layer norm after a linear layer and the residual: norm(x + dropout(dense(y))).
class BertOutputImpl : public torch::nn::Module {
 public:
  BertOutputImpl(const BertConfig& config, int64_t in);
  at::Tensor forward(const at::Tensor& y, const at::Tensor& x);

 private:
  const double dropout_;
  Linear dense_{nullptr};
  LayerNorm norm_{nullptr};
};
TORCH_MODULE(BertOutput);

class BertLayerImpl : public torch::nn::Module {
 public:
  explicit BertLayerImpl(const BertConfig& config);
  // x [B, T, width] to the same.
  at::Tensor forward(const at::Tensor& x, const AttentionMask& mask);
  at::Device device() const { return query_->weight.device(); }

 private:
  const int64_t num_heads_;
  const double dropout_;
  const Activation activation_;
  Linear query_{nullptr}, key_{nullptr}, value_{nullptr}, intermediate_{nullptr};
  BertOutput attention_output_{nullptr}, output_{nullptr};
};
TORCH_MODULE(BertLayer);

// The embeddings and layers; with `has_pooler` also the input of a classifier.
class BertImpl : public torch::nn::Module {
 public:
  BertImpl(const BertConfig& config, bool has_pooler);
  // Returns [B, T, width].
  at::Tensor forward(const TextBatch& batch, bool activation_checkpointing);
  // Pools the first token: hidden [B, T, width] to [B, width].
  at::Tensor Pool(const at::Tensor& hidden);

  Embedding word_embeddings{nullptr};

 private:
  const double dropout_;
  Embedding position_embeddings_{nullptr}, token_type_embeddings_{nullptr};
  LayerNorm norm_{nullptr};
  std::vector<BertLayer> layers_;
  Linear pooler_{nullptr};
};
TORCH_MODULE(Bert);

class BertModelImpl : public TextModelImpl {
 protected:
  BertModelImpl(const BertConfig& config, bool has_pooler);
  const BertConfig& bert_config() const { return std::get<BertConfig>(config()); }

  Bert bert_{nullptr};
};

// Predicts masked tokens. The loss compares the logits at each position with its label.
class BertForMaskedLMImpl : public BertModelImpl, public HasOptionalTensors {
 public:
  explicit BertForMaskedLMImpl(const BertConfig& config);
  ModelOutput forward(const TextBatch& batch) override;
  void InitWeights() override;
  std::vector<std::string> OptionalTensors() const override;

 private:
  Linear transform_{nullptr};
  LayerNorm transform_norm_{nullptr};
  Linear decoder_{nullptr};  // for a head that is not tied
  at::Tensor bias_;          // for a tied head; otherwise a buffer for the files
};
TORCH_MODULE(BertForMaskedLM);

// Classifies rows. The meaning of the labels follows from the config, or from each batch separately
// (BertConfig::Problem).
class BertForSequenceClassificationImpl : public BertModelImpl {
 public:
  explicit BertForSequenceClassificationImpl(const BertConfig& config);
  ModelOutput forward(const TextBatch& batch) override;

 private:
  at::Tensor Loss(const at::Tensor& logits, const at::Tensor& labels) const;

  Linear classifier_{nullptr};
};
TORCH_MODULE(BertForSequenceClassification);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_BERT_H_
