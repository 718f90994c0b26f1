#ifndef MUSTER_WORKER_MODELS_TEXT_MODEL_H_
#define MUSTER_WORKER_MODELS_TEXT_MODEL_H_

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/models/kv_cache.h"
#include "worker/models/model_config.h"

namespace muster::models {

// The input of a model; omitted tensors are undefined. Rows of different lengths are padded on
// either side. For decoders without an `attention_mask`, a row may hold several texts, each of
// which attends only to itself: a new one begins where `position_ids` do not increase by one.
struct TextBatch {
  at::Tensor input_ids = {};       // [B, T] int64
  at::Tensor attention_mask = {};  // [B, T] int64 or bool; 0: padding
  at::Tensor labels = {};          // [B, T] int64, -100: none; of a sequence classifier [B], or
                                   // [B, labels] of floats
  at::Tensor token_type_ids = {};  // [B, T] int64; BERT, and GPT-2, whose types are tokens
  at::Tensor position_ids = {};    // [B or 1, T] int64; by default 0, 1, ... from the left edge
};

// The output of a model.
struct ModelOutput {
  at::Tensor loss = {};      // scalar float32; undefined without labels
  at::Tensor logits = {};    // [B, T, vocabulary], or [B, labels]; of a CausalLm with labels and
                             // under autocast float32
  at::Tensor aux_loss = {};  // scalar; of a mixture of experts with output_router_logits
};

// A text model.
class TextModelImpl : public torch::nn::Module {
 public:
  // Throws a c10::Error that names what does not fit: a shape, a token beyond the vocabulary, more
  // positions than the model has.
  virtual ModelOutput forward(const TextBatch& batch) = 0;

  const ModelConfig& config() const { return config_; }

  // Sets random weights as transformers does: normal, with the config's standard deviation. Draws
  // from torch's default generator.
  virtual void InitWeights();

  // Keeps only the inputs of layers for the backward pass, which runs each layer a second time
  // (worker/train/activation_checkpoint.h).
  void set_activation_checkpointing(bool on) { activation_checkpointing_ = on; }

  // Returns the model's name for a tensor of a file, whose name there may be an older one or that
  // of the same model without its head. Empty for a tensor that the model does not need (a tied
  // head, a buffer).
  std::string ParameterName(const std::string& name_in_file) const;

  // For a tensor of a file that holds several of the model's tensors, returns the names that these
  // have in a file, in its order (WeightFiles::Divide); for any other tensor, none.
  std::vector<std::string> PartsOf(const std::string& name_in_file) const;

 protected:
  explicit TextModelImpl(ModelConfig config);
  bool activation_checkpointing() const { return activation_checkpointing_ && is_training(); }

 private:
  const ModelConfig config_;
  bool activation_checkpointing_ = false;
};
TORCH_MODULE(TextModel);

// A model that predicts the next token.
class CausalLmImpl : public TextModelImpl {
 public:
  // The loss compares the logits at position t with the label at t + 1. A label with only padding
  // before it, the first token of a left-padded row, does not count: its prediction has no meaning.
  ModelOutput forward(const TextBatch& batch) override;

  // Returns logits [B, `num_logits`, vocabulary] of the last positions; 0: undefined, for a pass
  // that only fills the cache. With a cache, the ids are at the positions after those in it, and
  // `attention_mask` [B, cache length + T] covers both. Experts without tokens run only if
  // `run_idle_experts`.
  at::Tensor NextLogits(const TextBatch& batch, KvCache* cache, int64_t num_logits = 1,
                        bool run_idle_experts = false);

  virtual KvCache NewCache(int64_t batch, int64_t capacity) const = 0;

 protected:
  using TextModelImpl::TextModelImpl;

  // The hidden states of a forward pass. `hidden` [B, T, width] is after the last norm.
  struct Hidden {
    at::Tensor hidden = {};
    at::Tensor aux_loss = {};
  };
  virtual Hidden Run(const TextBatch& batch, KvCache* cache, bool run_idle_experts) = 0;
  // Maps hidden [B, T, width] to logits [B, T, vocabulary].
  virtual at::Tensor Head(const at::Tensor& hidden) = 0;
  virtual double aux_loss_coefficient() const { return 0; }
};
TORCH_MODULE(CausalLm);

// Returns the text of its row that each position belongs to, as from PackedTexts().
at::Tensor TextsOf(const TextBatch& batch);

// Throws unless `batch` has int64 ids [B, T] and the other tensors fit them. `past`: the number of
// positions before these.
void CheckBatch(const TextBatch& batch, const CommonConfig& config, int64_t past);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_TEXT_MODEL_H_
