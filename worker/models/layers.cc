#include "worker/models/layers.h"

#include <cmath>
#include <numbers>

#include "ATen/TensorOperators.h"
#include "ATen/core/Reduction.h"
#include "ATen/ops/addmm.h"
#include "ATen/ops/clamp.h"
#include "ATen/ops/cross_entropy_loss.h"
#include "ATen/ops/dropout.h"
#include "ATen/ops/embedding.h"
#include "ATen/ops/empty.h"
#include "ATen/ops/erf.h"
#include "ATen/ops/gelu.h"
#include "ATen/ops/hardswish.h"
#include "ATen/ops/layer_norm.h"
#include "ATen/ops/leaky_relu.h"
#include "ATen/ops/matmul.h"
#include "ATen/ops/mish.h"
#include "ATen/ops/pow.h"
#include "ATen/ops/relu.h"
#include "ATen/ops/relu6.h"
#include "ATen/ops/rms_norm.h"
#include "ATen/ops/rsqrt.h"
#include "ATen/ops/sigmoid.h"
#include "ATen/ops/silu.h"
#include "ATen/ops/softplus.h"
#include "ATen/ops/square.h"
#include "ATen/ops/tanh.h"
#include "c10/core/GradMode.h"
#include "worker/models/few_rows_linear.h"

namespace muster::models {
namespace {

constexpr int64_t kIgnoredLabel = -100;

thread_local c10::Device weight_device = c10::Device(c10::kCPU);
thread_local c10::ScalarType weight_dtype = c10::kFloat;

at::Tensor NewWeight(at::IntArrayRef shape) {
  return at::empty(shape, at::TensorOptions().device(weight_device).dtype(weight_dtype));
}

void Normal(at::Tensor& weight, double deviation) {
  const at::NoGradGuard no_grad;
  weight.normal_(0, deviation);
}

void Fill(at::Tensor& weight, double value) {
  const at::NoGradGuard no_grad;
  if (weight.defined()) weight.fill_(value);
}

}  // namespace

ScopedWeights::ScopedWeights(c10::Device device, c10::ScalarType dtype)
    : device_(weight_device), dtype_(weight_dtype) {
  weight_device = device;
  weight_dtype = dtype;
}

ScopedWeights::~ScopedWeights() {
  weight_device = device_;
  weight_dtype = dtype_;
}

void AdaptableLayer::AddAdapter(int64_t rank, double scale, double dropout) {
  TORCH_CHECK_VALUE(!has_adapter(), name(), " has an adapter already: merge it first");
  TORCH_CHECK_VALUE(rank > 0, "the rank of an adapter is ", rank, "; it must be at least 1");
  const int64_t in = weight.size(is_transposed_ ? 0 : 1), out = weight.size(is_transposed_ ? 1 : 0);
  // As PEFT's autocast_adapter_dtype: in 16 bits most updates with a small learning rate would be
  // rounded away. A layer without values gets them later, from files that have none for the
  // adapter.
  const ScopedWeights weights(weight.is_meta() ? c10::Device(c10::kCPU) : weight.device(),
                              c10::promoteTypes(weight.scalar_type(), c10::kFloat));
  // Create both or, if memory runs out, neither.
  const auto a = std::make_shared<LinearImpl>(in, rank, false);
  const auto b = std::make_shared<LinearImpl>(rank, out, false);
  lora_a_ = register_module("lora_A", a);
  lora_b_ = register_module("lora_B", b);
  const at::NoGradGuard no_grad;
  const double bound = 1 / std::sqrt(static_cast<double>(in));
  lora_a_->weight.uniform_(-bound, bound);
  lora_b_->weight.zero_();
  scale_ = scale;
  dropout_ = dropout;
  if (!is_training()) {
    lora_a_->eval();
    lora_b_->eval();
  }
}

void AdaptableLayer::MergeAdapter() {
  if (!has_adapter()) return;
  const at::NoGradGuard no_grad;
  const c10::ScalarType type = c10::promoteTypes(weight.scalar_type(), c10::kFloat);
  at::Tensor product = at::matmul(lora_b_->weight.to(type), lora_a_->weight.to(type));
  if (is_transposed_) product = product.t();
  weight.copy_(weight.to(type) + scale_ * product);
  DropAdapter();
}

void AdaptableLayer::DropAdapter() {
  if (!has_adapter()) return;
  unregister_module("lora_A");
  unregister_module("lora_B");
  lora_a_ = lora_b_ = nullptr;
}

at::Tensor AdaptableLayer::Adapted(const at::Tensor& x, at::Tensor y) const {
  if (!has_adapter()) return y;
  const at::Tensor input = x.to(lora_a_->weight.scalar_type());
  const at::Tensor low = LinearOf(Dropout(input, dropout_, is_training()), lora_a_->weight, {});
  // Rounded only once.
  return (y + LinearOf(low, lora_b_->weight, {}) * scale_).to(y.scalar_type());
}

LinearImpl::LinearImpl(int64_t in, int64_t out, bool has_bias)
    : AdaptableLayer(/*is_transposed=*/false) {
  weight = register_parameter("weight", NewWeight({out, in}));
  if (has_bias) bias = register_parameter("bias", NewWeight({out}));
}

at::Tensor LinearImpl::forward(const at::Tensor& x) const {
  return Adapted(x, LinearOf(x, weight, bias));
}

void LinearImpl::InitWeights(double deviation) {
  Normal(weight, deviation);
  Fill(bias, 0);
}

Conv1DImpl::Conv1DImpl(int64_t in, int64_t out) : AdaptableLayer(/*is_transposed=*/true) {
  weight = register_parameter("weight", NewWeight({in, out}));
  bias = register_parameter("bias", NewWeight({out}));
}

at::Tensor Conv1DImpl::forward(const at::Tensor& x) const {
  std::vector<int64_t> shape = x.sizes().vec();
  shape.back() = weight.size(1);
  return Adapted(x, at::addmm(bias, x.reshape({-1, x.size(-1)}), weight).view(shape));
}

void Conv1DImpl::InitWeights(double deviation) {
  Normal(weight, deviation);
  Fill(bias, 0);
}

EmbeddingImpl::EmbeddingImpl(int64_t rows, int64_t width, std::optional<int64_t> padding)
    : padding_(padding) {
  weight = register_parameter("weight", NewWeight({rows, width}));
}

at::Tensor EmbeddingImpl::forward(const at::Tensor& ids) const {
  return at::embedding(weight, ids, padding_.value_or(-1));
}

at::Tensor EmbeddingImpl::Logits(const at::Tensor& x) const { return LinearOf(x, weight, {}); }

void EmbeddingImpl::InitWeights(double deviation) {
  Normal(weight, deviation);
  if (!padding_.has_value()) return;
  const at::NoGradGuard no_grad;
  weight.select(0, *padding_).zero_();
}

LayerNormImpl::LayerNormImpl(int64_t width, double epsilon) : epsilon_(epsilon) {
  weight = register_parameter("weight", NewWeight({width}));
  bias = register_parameter("bias", NewWeight({width}));
}

at::Tensor LayerNormImpl::forward(const at::Tensor& x) const {
  return at::layer_norm(x, weight.sizes(), weight, bias, epsilon_);
}

void LayerNormImpl::InitWeights() {
  Fill(weight, 1);
  Fill(bias, 0);
}

RmsNormImpl::RmsNormImpl(int64_t width, double epsilon) : epsilon_(epsilon) {
  weight = register_parameter("weight", NewWeight({width}));
}

at::Tensor RmsNormImpl::forward(const at::Tensor& x) const {
  // One kernel instead of six, with the same rounding: a GPU that generates waits for the launches
  // of its kernels. Gradients add up as in transformers only with the code below.
  if (x.is_cuda() && !c10::GradMode::is_enabled()) {
    // Autocast would leave the result in the wide type.
    return weight * at::rms_norm(x, x.sizes().slice(x.dim() - 1), /*weight=*/{}, epsilon_)
                        .to(x.scalar_type());
  }
  const at::Tensor wide = x.to(c10::kFloat);
  const at::Tensor variance = wide.pow(2).mean(-1, /*keepdim=*/true);
  return weight * (wide * at::rsqrt(variance + epsilon_)).to(x.scalar_type());
}

void RmsNormImpl::InitWeights() { Fill(weight, 1); }

at::Tensor Activate(Activation activation, const at::Tensor& x) {
  const double tanh_scale = std::sqrt(2 / std::numbers::pi);
  const bool rounds = x.scalar_type() == c10::kBFloat16 || x.scalar_type() == c10::kHalf;
  switch (activation) {
    case Activation::kSilu:
      return at::silu(x);
    case Activation::kGelu:
      return at::gelu(x);
    case Activation::kGeluErf:
      if (rounds) {
        const at::Tensor half = x * 0.5;
        return half * (1.0 + at::erf(x / std::numbers::sqrt2));
      }
      return at::gelu(x);
    case Activation::kGeluTanh:
      return at::gelu(x, "tanh");
    case Activation::kGeluNew:
      if (rounds) {
        // One operation after another, since gradients are added in reverse order.
        const at::Tensor half = 0.5 * x;
        const at::Tensor cube = 0.044715 * at::pow(x, 3.0);
        return half * (1.0 + at::tanh(tanh_scale * (x + cube)));
      }
      return at::gelu(x, "tanh");
    case Activation::kGeluFast:
      if (rounds) {
        const at::Tensor half = 0.5 * x;
        const at::Tensor scaled = x * 0.7978845608;
        const at::Tensor square = 0.044715 * x * x;
        return half * (1.0 + at::tanh(scaled * (1.0 + square)));
      }
      return at::gelu(x, "tanh");
    case Activation::kGeluClipped:
      return at::clamp(at::gelu(x), -10, 10);
    case Activation::kQuickGelu:
      return x * at::sigmoid(1.702 * x);
    case Activation::kRelu:
      return at::relu(x);
    case Activation::kRelu2:
      return at::square(at::relu(x));
    case Activation::kRelu6:
      return at::relu6(x);
    case Activation::kLeakyRelu:
      return at::leaky_relu(x);
    case Activation::kHardswish:
      return at::hardswish(x);
    case Activation::kMish:
      return at::mish(x);
    case Activation::kSigmoid:
      return at::sigmoid(x);
    case Activation::kTanh:
      return at::tanh(x);
    case Activation::kLaplace:
      return 0.5 * (1.0 + at::erf((x - 0.707107) / (0.282095 * std::numbers::sqrt2)));
    case Activation::kSqrtSoftplus:
      return at::softplus(x).sqrt();
    case Activation::kLinear:
      return x;
  }
  TORCH_CHECK(false, "activation ", static_cast<int>(activation), " is not one of Activation");
}

at::Tensor Dropout(const at::Tensor& x, double probability, bool training) {
  return training && probability > 0 ? at::dropout(x, probability, true) : x;
}

at::Tensor CrossEntropy(const at::Tensor& logits, const at::Tensor& labels) {
  const at::Tensor sum = at::cross_entropy_loss(logits.to(c10::kFloat), labels, /*weight=*/{},
                                                at::Reduction::Sum, kIgnoredLabel);
  // Does not synchronize with a GPU: without any label the sum is 0, and so is the quotient.
  return sum / labels.ne(kIgnoredLabel).sum().clamp_min(1);
}

}  // namespace muster::models
