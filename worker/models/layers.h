#ifndef MUSTER_WORKER_MODELS_LAYERS_H_
#define MUSTER_WORKER_MODELS_LAYERS_H_

#include <cstdint>
#include <optional>

#include "ATen/core/Generator.h"
#include "ATen/core/Tensor.h"
#include "c10/core/Device.h"
#include "c10/core/ScalarType.h"
#include "torch/nn/module.h"
#include "torch/nn/pimpl.h"
#include "worker/models/model_config.h"

namespace muster::models {

// The layers that the models are made of. Names of parameters are those of the files on the Hub.
// Unlike torch::nn's, a layer draws no random numbers when it is made: its weights have no values
// until a checkpoint is loaded or the model's InitWeights() is called.

// Where and in which type layers that are made on this thread have their weights. By default the
// CPU, in float32.
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

// x [..., in] to [..., out]; weight [out, in].
class LinearImpl : public torch::nn::Module {
 public:
  LinearImpl(int64_t in, int64_t out, bool has_bias);
  at::Tensor forward(const at::Tensor& x) const;
  void InitWeights(double deviation);

  at::Tensor weight, bias;
};
TORCH_MODULE(Linear);

// GPT-2's linear layer: the same with weight [in, out].
class Conv1DImpl : public torch::nn::Module {
 public:
  Conv1DImpl(int64_t in, int64_t out);
  at::Tensor forward(const at::Tensor& x) const;
  void InitWeights(double deviation);

  at::Tensor weight, bias;
};
TORCH_MODULE(Conv1D);

// ids [...] of int64 to [..., width]. The row of `padding` gets no gradient from here.
class EmbeddingImpl : public torch::nn::Module {
 public:
  EmbeddingImpl(int64_t rows, int64_t width, std::optional<int64_t> padding = std::nullopt);
  at::Tensor forward(const at::Tensor& ids) const;
  // x [..., width] to [..., rows]: the head of a model that ties it to its embedding.
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

// x / sqrt(mean(x^2) + epsilon) * weight, over the last dimension, the quotient in float32 (Zhang
// and Sennrich, 2019).
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

// `probability` of zeros while training, else x.
at::Tensor Dropout(const at::Tensor& x, double probability, bool training);

// The mean over all labels that are not -100 of the cross entropy, in float32. logits [N, classes],
// labels [N]. Without any label: 0, with gradients of zero, where transformers gives NaN, which
// destroys all weights in the next step.
at::Tensor CrossEntropy(const at::Tensor& logits, const at::Tensor& labels);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_LAYERS_H_
