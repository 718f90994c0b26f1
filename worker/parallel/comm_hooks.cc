#include "worker/parallel/comm_hooks.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <utility>
#include <vector>

#include "ATen/CPUGeneratorImpl.h"
#include "ATen/core/grad_mode.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/constant_pad_nd.h"
#include "ATen/ops/matmul.h"
#include "ATen/ops/randn.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros_like.h"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "torch/csrc/distributed/c10d/comm.hpp"

namespace muster {
namespace {

using FuturePtr = c10::intrusive_ptr<c10::ivalue::Future>;
using GroupPtr = c10::intrusive_ptr<c10d::ProcessGroup>;

class CompressHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  CompressHook(GroupPtr group, at::ScalarType dtype)
      : CppCommHookInterface<GroupPtr>(std::move(group)), dtype_(dtype) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    at::Tensor buffer = bucket.getBufferRef();
    // Divide before the sum, which could overflow in fp16.
    std::vector<at::Tensor> small = {buffer.to(dtype_).div_(state_->getSize())};
    const FuturePtr reduced = state_->allreduce(small)->getFuture();
    return reduced->then(
        [buffer, small](c10::ivalue::Future& future) {
          if (future.hasError()) future.value();  // throws what the collective threw
          at::NoGradGuard no_grad;
          buffer.copy_(small[0]);
          return c10::IValue(buffer);
        },
        c10::TensorType::get());
  }

 private:
  const at::ScalarType dtype_;
};

// Makes the columns of `given` (n x r, r small) orthonormal in place by Gram-Schmidt.
void Orthogonalize(at::Tensor& given, double epsilon) {
  // In fp16 the floor would be 0, and so would the norm of a small column.
  const bool half = given.scalar_type() == at::kHalf;
  at::Tensor matrix = half ? given.to(at::kFloat) : given;
  const int64_t columns = matrix.size(1);
  for (int64_t i = 0; i < columns; ++i) {
    at::Tensor column = matrix.narrow(1, i, 1);
    // A column of zeros stays zero: without the floor it would become NaN.
    const double floor = epsilon > 0 ? epsilon : 1e-30;
    column.div_(column.norm().add_(floor));
    if (i + 1 < columns) {
      at::Tensor rest = matrix.narrow(1, i + 1, columns - i - 1);
      rest.sub_(at::matmul(column, at::matmul(column.t(), rest)));
    }
  }
  if (half) given.copy_(matrix);
}

class PowerSgdHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  PowerSgdHook(GroupPtr group, const PowerSgdOptions& options, bool batched,
               std::shared_ptr<PowerSgdState> state)
      : CppCommHookInterface<GroupPtr>(std::move(group)),
        options_(options),
        batched_(batched),
        of_model_(std::move(state)),
        generator_(at::make_generator<at::CPUGeneratorImpl>(options.random_seed)) {
    TORCH_CHECK(options.matrix_approximation_rank >= 1,
                "matrix_approximation_rank must be at least 1, got ",
                options.matrix_approximation_rank);
    TORCH_CHECK(options.start_powerSGD_iter >= 2, "start_powerSGD_iter must be at least 2, got ",
                options.start_powerSGD_iter);
  }

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    at::NoGradGuard no_grad;
    at::Tensor buffer = bucket.getBufferRef();
    const bool exact = of_model_->reductions < options_.start_powerSGD_iter;
    if (bucket.isLast()) ++of_model_->reductions;
    if (exact) {
      Mean(buffer);
    } else {
      Compress(bucket, buffer);
    }
    FuturePtr done = c10::make_intrusive<c10::ivalue::Future>(
        c10::TensorType::get(),
        buffer.is_cpu() ? std::vector<c10::Device>{} : std::vector<c10::Device>{buffer.device()});
    done->markCompleted(c10::IValue(buffer));
    return done;
  }

 private:
  struct BucketState {
    std::vector<const void*> parameters;  // the parameters whose gradients the bucket had, in order
    at::Tensor error;                     // the error of the last compression
    at::Tensor scale;                     // the loss scale at that time
    std::vector<at::Tensor> qs;           // right factors
    std::vector<at::Tensor> drawn;        // the initial right factors
  };

  const PowerSgdOptions options_;
  const bool batched_;
  const std::shared_ptr<PowerSgdState> of_model_;
  at::Generator generator_;  // the same numbers on every rank, because buckets come in the same
                             // order
  std::map<size_t, BucketState> buckets_;

  void Mean(at::Tensor& tensor) {
    std::vector<at::Tensor> list = {tensor};
    // The sum could overflow in fp16.
    const bool first = tensor.scalar_type() == at::kHalf;
    if (first) tensor.div_(state_->getSize());
    state_->allreduce(list)->wait();
    if (!first) tensor.div_(state_->getSize());
  }

  // Averages a list of factors with one all-reduce.
  void MeanOfAll(std::vector<at::Tensor>& tensors) {
    if (tensors.empty()) return;
    std::vector<at::Tensor> rows;
    for (const at::Tensor& tensor : tensors) rows.push_back(tensor.reshape({-1}));
    at::Tensor flat = at::cat(rows);
    Mean(flat);
    int64_t offset = 0;
    for (at::Tensor& tensor : tensors) {
      tensor.copy_(flat.narrow(0, offset, tensor.numel()).view(tensor.sizes()));
      offset += tensor.numel();
    }
  }

  int64_t RankOf(const at::Tensor& matrix) const {
    return std::min({options_.matrix_approximation_rank, matrix.size(0), matrix.size(1)});
  }

  bool WorthIt(const at::Tensor& matrix) const {
    return static_cast<double>((matrix.size(0) + matrix.size(1)) * RankOf(matrix)) *
               options_.min_compression_rate <
           static_cast<double>(matrix.numel());
  }

  void Compress(c10d::GradBucket& bucket, at::Tensor& buffer) {
    BucketState& state = buckets_[bucket.getIndex()];
    // The parameters have changed if the Reducer has rebuilt its buckets.
    std::vector<const void*> parameters;
    for (const at::Tensor& parameter : bucket.getParameters()) {
      parameters.push_back(parameter.unsafeGetTensorImpl());
    }
    if (state.parameters != parameters) {
      state = BucketState();
      state.parameters = std::move(parameters);
    }
    if (options_.use_error_feedback) {
      if (!state.error.defined() || state.error.numel() != buffer.numel()) {
        state.error = at::zeros_like(buffer);
        state.qs.clear();
      }
      // The error is in units of the loss scale, which may have changed.
      const at::Tensor& scale = of_model_->loss_scale;
      if (state.scale.defined() && scale.defined()) {
        state.error.mul_((scale / state.scale).to(state.error.device()));
      }
      state.scale = scale;
      buffer.add_(state.error);
      state.error.copy_(buffer);
    }

    std::vector<at::Tensor> plain, sources, matrices;
    if (batched_) {
      const auto side =
          static_cast<int64_t>(std::ceil(std::sqrt(static_cast<double>(buffer.numel()))));
      sources.push_back(buffer);
      matrices.push_back(
          at::constant_pad_nd(buffer, {0, side * side - buffer.numel()}, 0).view({side, side}));
    } else {
      for (const at::Tensor& grad : bucket.getGradients()) {
        at::Tensor matrix = grad.dim() >= 2 ? grad.reshape({grad.size(0), -1}) : grad;
        if (grad.dim() < 2 || !WorthIt(matrix)) {
          plain.push_back(grad);
        } else {
          sources.push_back(grad);
          matrices.push_back(matrix);
        }
      }
    }

    MeanOfAll(plain);
    if (state.qs.size() != matrices.size()) {
      state.qs.assign(matrices.size(), at::Tensor());
      state.drawn = state.qs;
    }
    std::vector<at::Tensor> ps;
    for (size_t i = 0; i < matrices.size(); ++i) {
      at::Tensor& q = state.qs[i];
      if (!q.defined() || !options_.warm_start) {
        q = at::randn({matrices[i].size(1), RankOf(matrices[i])}, generator_, at::kFloat)
                .to(matrices[i].options());
        if (options_.warm_start) state.drawn[i] = q.clone();
      } else {
        // A factor from gradients that were not finite, the same on all ranks, would spoil all
        // later ones, and a column from gradients that were zero would stay zero and lose its
        // direction.
        const at::Tensor is_spent = q.eq(0).all(0, /*keepdim=*/true);
        q = at::where(q.isfinite().all().logical_and(is_spent.logical_not()), q, state.drawn[i]);
      }
      Orthogonalize(q, options_.orthogonalization_epsilon);
      ps.push_back(at::matmul(matrices[i], q));
    }
    MeanOfAll(ps);
    for (size_t i = 0; i < matrices.size(); ++i) {
      Orthogonalize(ps[i], options_.orthogonalization_epsilon);
      state.qs[i] = at::matmul(matrices[i].t(), ps[i]);
    }
    MeanOfAll(state.qs);
    for (size_t i = 0; i < matrices.size(); ++i) {
      at::Tensor approximation = at::matmul(ps[i], state.qs[i].t());
      sources[i].copy_(
          approximation.reshape({-1}).narrow(0, 0, sources[i].numel()).view(sources[i].sizes()));
    }
    if (options_.use_error_feedback) {
      // Keep only what compression has lost; parts that were reduced exactly have lost nothing.
      state.error.sub_(buffer);
      if (!batched_) ClearExactParts(bucket, buffer, plain, state.error);
      // Gradients that are not finite, such as those that overflow fp16, concern only this step.
      state.error.nan_to_num_(0, 0, 0);
    }
  }

  static void ClearExactParts(c10d::GradBucket& /*bucket*/, const at::Tensor& buffer,
                              const std::vector<at::Tensor>& plain, at::Tensor& error) {
    for (const at::Tensor& grad : plain) {
      error.narrow(0, grad.storage_offset() - buffer.storage_offset(), grad.numel()).zero_();
    }
  }
};

class WrappedHook : public c10d::CommHookInterface {
 public:
  WrappedHook(std::unique_ptr<c10d::CommHookInterface> inner, at::ScalarType dtype)
      : inner_(std::move(inner)), dtype_(dtype) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    at::Tensor original = bucket.getBufferRef();
    at::Tensor small = original.to(dtype_);
    bucket.setBuffer(small);
    const FuturePtr inner = inner_->runHook(bucket);
    // This function must not hold the inner hook: it owns the group, and dropping the last
    // reference on the group's own thread makes that thread join itself.
    return inner->then(
        [original](c10::ivalue::Future& future) {
          at::NoGradGuard no_grad;
          original.copy_(c10d::detail::parseCppCommHookResult(future.value()));
          return c10::IValue(original);
        },
        c10::TensorType::get());
  }

  at::Tensor parseHookResult(const c10::IValue& result) override {
    return c10d::detail::parseCppCommHookResult(result);
  }

 private:
  const std::shared_ptr<c10d::CommHookInterface> inner_;
  const at::ScalarType dtype_;
};

class UserHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  UserHook(GroupPtr group, GradientHook hook)
      : CppCommHookInterface<GroupPtr>(std::move(group)), hook_(std::move(hook)) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    FuturePtr future = hook_(*state_, bucket);
    TORCH_CHECK(future, "gradient_hook returned no future for bucket ", bucket.getIndex(),
                ": return the future of its collective, or one that is completed with the bucket");
    return future;
  }

 private:
  const GradientHook hook_;
};

class AverageHook : public c10d::CppCommHookInterface<GroupPtr> {
 public:
  explicit AverageHook(GroupPtr group) : CppCommHookInterface<GroupPtr>(std::move(group)) {}

  FuturePtr runHook(c10d::GradBucket& bucket) override {
    std::vector<at::Tensor> buffers = {bucket.getBufferRef()};
    c10d::AllreduceOptions options;
    options.reduceOp = c10d::ReduceOp::AVG;
    return state_->allreduce(buffers, options)->getFuture();
  }
};

std::unique_ptr<c10d::CommHookInterface> MakeInner(CommHook hook, const PowerSgdOptions& power_sgd,
                                                   GroupPtr group,
                                                   std::shared_ptr<PowerSgdState> state) {
  switch (hook) {
    case CommHook::kNone:
      return nullptr;
    case CommHook::kFp16:
      return std::make_unique<CompressHook>(std::move(group), at::kHalf);
    case CommHook::kBf16:
      return std::make_unique<CompressHook>(std::move(group), at::kBFloat16);
    case CommHook::kPowerSgd:
      return std::make_unique<PowerSgdHook>(std::move(group), power_sgd, /*batched=*/false,
                                            std::move(state));
    case CommHook::kBatchedPowerSgd:
      return std::make_unique<PowerSgdHook>(std::move(group), power_sgd, /*batched=*/true,
                                            std::move(state));
  }
  return nullptr;
}

}  // namespace

CommHook ParseCommHook(absl::string_view text) {
  if (text == "no") return CommHook::kNone;
  if (text == "fp16") return CommHook::kFp16;
  if (text == "bf16") return CommHook::kBf16;
  if (text == "power_sgd") return CommHook::kPowerSgd;
  if (text == "batched_power_sgd") return CommHook::kBatchedPowerSgd;
  TORCH_CHECK(false, "unknown communication hook '", std::string(text),
              "': choose no, fp16, bf16, power_sgd or batched_power_sgd");
}

CommWrapper ParseCommWrapper(absl::string_view text) {
  if (text == "no") return CommWrapper::kNone;
  if (text == "fp16") return CommWrapper::kFp16;
  if (text == "bf16") return CommWrapper::kBf16;
  TORCH_CHECK(false, "unknown communication wrapper '", std::string(text),
              "': choose no, fp16 or bf16");
}

std::unique_ptr<c10d::CommHookInterface> MakeGradientHook(
    GradientHook hook, c10::intrusive_ptr<c10d::ProcessGroup> group) {
  TORCH_CHECK(hook != nullptr, "gradient_hook is empty");
  return std::make_unique<UserHook>(std::move(group), std::move(hook));
}

std::unique_ptr<c10d::CommHookInterface> MakeAverageHook(GroupPtr group) {
  return std::make_unique<AverageHook>(std::move(group));
}

std::unique_ptr<c10d::CommHookInterface> MakeCommHook(CommHook hook, CommWrapper wrapper,
                                                      const PowerSgdOptions& power_sgd,
                                                      c10::intrusive_ptr<c10d::ProcessGroup> group,
                                                      std::shared_ptr<PowerSgdState> state) {
  if (wrapper == CommWrapper::kNone) {
    return MakeInner(hook, power_sgd, std::move(group), std::move(state));
  }
  const at::ScalarType dtype = wrapper == CommWrapper::kFp16 ? at::kHalf : at::kBFloat16;
  // A cast around kNone is the hook that casts.
  if (hook == CommHook::kNone) return std::make_unique<CompressHook>(std::move(group), dtype);
  return std::make_unique<WrappedHook>(
      MakeInner(hook, power_sgd, std::move(group), std::move(state)), dtype);
}

}  // namespace muster
