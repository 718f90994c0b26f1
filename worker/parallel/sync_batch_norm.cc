#include "worker/parallel/sync_batch_norm.h"

#include <algorithm>
#include <cstdint>
#include <memory>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "ATen/core/ivalue.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/full.h"
#include "ATen/ops/var_mean.h"
#include "ATen/ops/zeros.h"
#include "c10/core/ScalarType.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/custom_function.h"
#include "torch/nn/functional/batchnorm.h"

namespace muster {
namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// The values that are fixed during one forward call.
struct Call {
  std::shared_ptr<Comm*> comm;  // not null now, but perhaps in the backward pass
  at::Tensor running_mean;      // undefined: not tracked
  at::Tensor running_var;
  double momentum;
  double eps;
};

// Keeps the Comm pointer for the graph, which may outlive the ranks.
struct KeptComm : torch::CustomClassHolder {
  explicit KeptComm(std::shared_ptr<Comm*> comm) : comm(std::move(comm)) {}
  const std::shared_ptr<Comm*> comm;
};

at::ScalarType AccumulateType(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// Returns all dimensions except that of channels.
std::vector<int64_t> Reduced(const at::Tensor& input) {
  std::vector<int64_t> dims = {0};
  for (int64_t d = 2; d < input.dim(); ++d) dims.push_back(d);
  return dims;
}

// Returns `channels`, of shape [C], in a shape that combines with `like`.
at::Tensor Spread(const at::Tensor& channels, const at::Tensor& like) {
  std::vector<int64_t> shape(like.dim(), 1);
  shape[1] = channels.numel();
  return channels.view(shape);
}

struct Normalize : public torch::autograd::Function<Normalize> {
  static at::Tensor forward(AutogradContext* context, const at::Tensor& input,
                            const std::optional<at::Tensor>& given_weight,
                            const std::optional<at::Tensor>& given_bias, const Call* call) {
    const at::Tensor weight = given_weight.value_or(at::Tensor());
    const at::Tensor bias = given_bias.value_or(at::Tensor());
    const int64_t channels = input.size(1);
    const int64_t count = channels == 0 ? 0 : input.numel() / channels;
    const at::ScalarType type = AccumulateType(input);
    const at::Tensor x = input.to(type);
    // Sums of squares lose digits; in double enough remain.
    at::Tensor sums = at::zeros({2 * channels + 1}, x.options().dtype(at::kDouble));
    if (count > 0) {
      auto [variance, mean] = at::var_mean(x, Reduced(x), /*correction=*/0);
      mean = mean.to(at::kDouble);
      sums = at::cat({mean * count, (variance.to(at::kDouble) + mean.square()) * count,
                      at::full({1}, count, sums.options())});
    }
    Comm& comm = **call->comm;
    comm.AllReduce(sums, ReduceOp::kSum);
    const at::Tensor total = sums.narrow(0, 2 * channels, 1);
    // Only then can the total be one, and reading it waits for a GPU.
    if (count <= 1) {
      TORCH_CHECK(total.item<double>() > 1,
                  "SyncBatchNorm in training needs more than one value "
                  "per channel over all ranks, got input size ",
                  input.sizes(), " on rank ", comm.rank());
    }
    const at::Tensor mean = sums.narrow(0, 0, channels) / total;
    const at::Tensor variance =
        (sums.narrow(0, channels, channels) / total - mean.square()).clamp_min_(0);
    if (call->running_mean.defined()) {
      call->running_mean.mul_(1 - call->momentum)
          .add_(mean.to(call->running_mean.scalar_type()), call->momentum);
      call->running_var.mul_(1 - call->momentum)
          .add_((variance * (total / (total - 1))).to(call->running_var.scalar_type()),
                call->momentum);
    }
    const at::Tensor center = mean.to(type);
    const at::Tensor scale = (variance + call->eps).rsqrt().to(type);
    at::Tensor output = (x - Spread(center, x)) * Spread(scale, x);
    if (weight.defined()) {
      output.mul_(Spread(weight.to(type), x)).add_(Spread(bias.to(type), x));
    }
    context->save_for_backward({input, weight, center, scale, total});
    context->saved_data["comm"] =
        c10::IValue::make_capsule(c10::make_intrusive<KeptComm>(call->comm));
    return output.to(input.scalar_type());
  }

  static variable_list backward(AutogradContext* context, variable_list gradients) {
    TORCH_CHECK(!at::GradMode::is_enabled(),
                "SyncBatchNorm has no second derivative: leave create_graph off, or use BatchNorm");
    const variable_list saved = context->get_saved_variables();
    const at::Tensor &input = saved[0], &weight = saved[1], &center = saved[2], &scale = saved[3];
    const auto kept = context->saved_data["comm"].toCapsule();
    Comm* const comm = *static_cast<const KeptComm&>(*kept).comm;
    TORCH_CHECK(comm != nullptr,
                "backward() through a SyncBatchNorm whose Accelerator is gone: it shares its sums "
                "with the ranks; call backward() before");
    const at::ScalarType type = AccumulateType(input);
    const at::Tensor x = input.to(type);
    const at::Tensor gradient = gradients[0].to(type);
    const at::Tensor normalized = (x - Spread(center, x)) * Spread(scale, x);
    const std::vector<int64_t> dims = Reduced(x);
    const at::Tensor bias_gradient = gradient.sum(dims);
    const at::Tensor weight_gradient = (gradient * normalized).sum(dims);
    // Exchange even if this rank needs no gradient of its input: the others may need it.
    at::Tensor sums = at::cat({bias_gradient, weight_gradient}).to(at::kDouble);
    comm->AllReduce(sums, ReduceOp::kSum);
    sums.div_(saved[4]);
    const int64_t channels = input.size(1);
    at::Tensor input_gradient = gradient - Spread(sums.narrow(0, 0, channels).to(type), x) -
                                normalized * Spread(sums.narrow(0, channels, channels).to(type), x);
    input_gradient.mul_(Spread(weight.defined() ? scale * weight.to(type) : scale, x));
    variable_list result(4);
    result[0] = input_gradient.to(input.scalar_type());
    if (weight.defined()) {
      result[1] = weight_gradient.to(weight.scalar_type());
      result[2] = bias_gradient.to(weight.scalar_type());
    }
    return result;
  }
};

}  // namespace

void SyncBatchNormImpl::_check_input_dim(const at::Tensor& input) {
  TORCH_CHECK(input.dim() >= 2 && input.size(1) == options.num_features(), "SyncBatchNorm of ",
              options.num_features(), " features got an input of shape ", input.sizes(),
              ": it needs (N, ", options.num_features(), ", ...)");
}

at::Tensor SyncBatchNormImpl::forward(const at::Tensor& input) {
  _check_input_dim(input);
  double momentum = options.momentum().value_or(0);
  if (is_training() && num_batches_tracked.defined()) {
    num_batches_tracked += 1;
    // Without momentum: the plain mean over all batches.
    if (!options.momentum().has_value()) momentum = 1 / num_batches_tracked.item<double>();
  }
  if (!is_training() || comm() == nullptr || comm()->size() == 1) {
    return torch::nn::functional::detail::batch_norm(
        input, running_mean, running_var, weight, bias,
        is_training() || !options.track_running_stats(), momentum, options.eps());
  }
  const Call call = {.comm = comm_,
                     .running_mean = running_mean,
                     .running_var = running_var,
                     .momentum = momentum,
                     .eps = options.eps()};
  // Undefined tensors may not be passed as tensors.
  const auto given = [](const at::Tensor& tensor) {
    return tensor.defined() ? std::optional<at::Tensor>(tensor) : std::nullopt;
  };
  return Normalize::apply(input, given(weight), given(bias), &call);
}

void SyncBatchNormImpl::pretty_print(std::ostream& stream) const {
  stream << std::boolalpha << "muster::SyncBatchNorm(" << options.num_features()
         << ", eps=" << options.eps() << ", momentum=";
  if (options.momentum().has_value()) {
    stream << *options.momentum();
  } else {
    stream << "None";
  }
  stream << ", affine=" << options.affine()
         << ", track_running_stats=" << options.track_running_stats() << ')';
}

}  // namespace muster
