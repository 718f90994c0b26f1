#ifndef MUSTER_WORKER_MODELS_LAYERS_H_
#define MUSTER_WORKER_MODELS_LAYERS_H_

#include <cstdint>
#include <memory>
#include <optional>

#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/core/ScalarType.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/models/model_config.h"

namespace muster::models {

// The layers that the models consist of. Names of parameters are those of the files on the Hub.
// Unlike torch::nn's, a layer draws no random numbers when it is constructed: its weights have no
// values until a checkpoint is loaded or the model's InitWeights() is called.

// The device and the type of the weights of layers that are constructed on this thread. By default
// the CPU and float32.
class ScopedWeights {
 public:
  ScopedWeights(c10::Device device, c10::ScalarType dtype);
  ~ScopedWeights();
  ScopedWeights(const ScopedWeights&) = delete;
  ScopedWeights& operator=(const ScopedWeights&) = delete;

 private:
  const c10::Device device_;
  const c10::ScalarType dtype_;
};

// A linear layer that can get a low-rank adapter (LoRA, Hu et al., 2021): two layers lora_A [rank,
// in] and lora_B [out, rank], whose product is added to its own result.
class AdaptableLayer : public torch::nn::Module {
 public:
  // Adds an adapter: A is uniform, as torch initialises a linear layer, and B zero, so that nothing
  // changes yet. The adapter's result is multiplied by `scale`; in training, a share `dropout` of
  // its input is zeroed.
  void AddAdapter(int64_t rank, double scale, double dropout);
  bool has_adapter() const { return lora_b_ != nullptr; }
  // The rank of the adapter; 0: there is none.
  int64_t adapter_rank() const { return has_adapter() ? lora_a_->weight.size(0) : 0; }
  double adapter_scale() const { return scale_; }
  double adapter_dropout() const { return dropout_; }
  // Adds the adapter's product to the weight and drops it. Rounds to the weight's type.
  void MergeAdapter();
  // Drops the adapter; the weight stays as it is.
  void DropAdapter();

  // [out, in] for LinearImpl; Conv1DImpl holds the transpose.
  at::Tensor weight;

 protected:
  explicit AdaptableLayer(bool is_transposed) : is_transposed_(is_transposed) {}
  // Returns y plus the adapter's result for x.
  at::Tensor Adapted(const at::Tensor& x, at::Tensor y) const;

 private:
  const bool is_transposed_;
  double scale_ = 1;
  double dropout_ = 0;
  // LinearImpl is declared below.
  std::shared_ptr<AdaptableLayer> lora_a_, lora_b_;
};

// Maps x [..., in] to [..., out]; weight [out, in].
class LinearImpl : public AdaptableLayer {
 public:
  LinearImpl(int64_t in, int64_t out, bool has_bias);
  at::Tensor forward(const at::Tensor& x) const;
  void InitWeights(double deviation);

  at::Tensor bias;
};
TORCH_MODULE(Linear);

// GPT-2's linear layer: the same with weight [in, out].
class Conv1DImpl : public AdaptableLayer {
 public:
  Conv1DImpl(int64_t in, int64_t out);
  at::Tensor forward(const at::Tensor& x) const;
  void InitWeights(double deviation);

  at::Tensor bias;
};
TORCH_MODULE(Conv1D);

// Maps ids [...] of int64 to [..., width]. The row of `padding` gets no gradient from here.
class EmbeddingImpl : public torch::nn::Module {
 public:
  EmbeddingImpl(int64_t rows, int64_t width, std::optional<int64_t> padding = std::nullopt);
  at::Tensor forward(const at::Tensor& ids) const;
  // Maps x [..., width] to [..., rows]: the head of a model that ties it to its embedding.
  at::Tensor Logits(const at::Tensor& x) const;
  void InitWeights(double deviation);

  at::Tensor weight;

 private:
  const std::optional<int64_t> padding_;
};
TORCH_MODULE(Embedding);

class LayerNormImpl : public torch::nn::Module {
 public:
  LayerNormImpl(int64_t width, double epsilon);
  at::Tensor forward(const at::Tensor& x) const;
  void InitWeights();

  at::Tensor weight, bias;

 private:
  const double epsilon_;
};
TORCH_MODULE(LayerNorm);

// Computes x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension, the quotient in float32
// (Zhang and Sennrich, 2019).
class RmsNormImpl : public torch::nn::Module {
 public:
  RmsNormImpl(int64_t width, double epsilon);
  at::Tensor forward(const at::Tensor& x) const;
  void InitWeights();

  at::Tensor weight;

 private:
  const double epsilon_;
};
TORCH_MODULE(RmsNorm);

at::Tensor Activate(Activation activation, const at::Tensor& x);

// In training zeroes a share `probability` of x, otherwise returns x.
at::Tensor Dropout(const at::Tensor& x, double probability, bool training);

// Returns the mean over all labels that are not -100 of the cross entropy, in float32. logits [N,
// classes], labels [N]. Without any label: 0, with gradients of zero, where transformers returns
// NaN, which destroys all weights in the next step.
at::Tensor CrossEntropy(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_LAYERS_H_
