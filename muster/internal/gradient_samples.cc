#include "muster/internal/gradient_samples.h"

#include <algorithm>
#include <memory>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "base/log.h"
#include "muster/internal/full_state.h"
#include "muster/internal/model_slot.h"
#include "muster/internal/slots.h"
#include "worker/parallel/sharded_model.h"

namespace muster::internal {
namespace {

// Returns the first element of every parameter's gradient, as bytes; undefined if there is none.
// Versions would not do: they miss changes through data(), such as those of
// torch::nn::utils::clip_grad_norm_().
std::vector<at::Tensor> SampleOfGradients(const std::vector<at::Tensor>& parameters,
                                          const std::vector<std::shared_ptr<ModelSlot>>& models) {
  const at::NoGradGuard no_grad;
  // Gradients of a divided model's own parameters must not be used; the step reports that.
  const auto is_divided = [&](const at::Tensor& parameter) {
    return std::any_of(models.begin(), models.end(), [&](const auto& model) {
      const ShardedModel* const sharded = model->sharded();
      return sharded != nullptr && sharded->NameOf(parameter) == nullptr &&
             sharded->ShardOf(parameter).defined();
    });
  };
  std::vector<at::Tensor> sample(parameters.size());
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (is_divided(parameters[i])) continue;
    const at::Tensor& grad = parameters[i].grad();
    if (!grad.defined() || grad.layout() != at::kStrided || grad.numel() == 0) continue;
    sample[i] = grad.as_strided({1}, {1}).clone().view(at::kByte);
  }
  return sample;
}

// A gradient that is gone or zero now says nothing about the others, and is right with any scale.
bool HasChanged(const at::Tensor& before, const at::Tensor& now) {
  return before.defined() && now.defined() && !at::equal(before, now) && now.any().item<bool>();
}

}  // namespace

void GradientSamples::Record(bool scaled) {
  if (left_ == 0 || process_.rank() != 0 || process_.options().allow_local_gradients ||
      process_.sharding().offload_gradients != Offload::kNone ||
      process_.sharding().offload_parameters != Offload::kNone) {
    return;
  }
  for (const auto& optimizer : registry_.optimizers()) {
    if (!scaled && (process_.size() == 1 || !IsSharded(optimizer->handle(), registry_.models()))) {
      continue;
    }
    samples_[optimizer.get()] =
        SampleOfGradients(optimizer->handle().parameters(), registry_.models());
  }
}

void GradientSamples::WarnIfChanged(const OptimizerSlot& slot, bool scaled, bool taken_over) {
  const auto recorded = samples_.find(&slot);
  if (recorded == samples_.end()) return;
  const std::vector<at::Tensor> before = std::move(recorded->second);
  samples_.erase(recorded);
  if (--left_ == 0) samples_.clear();
  if (taken_over) return;
  const std::vector<at::Tensor> now =
      SampleOfGradients(slot.handle().parameters(), registry_.models());
  bool changed = false;
  for (size_t i = 0; i < std::min(before.size(), now.size()) && !changed; ++i) {
    changed = HasChanged(before[i], now[i]);
  }
  if (!changed) return;
  left_ = 0;
  samples_.clear();
  MUSTER_LOG(Warning)
      << "gradients have changed between backward() and optimizer.step(), and not by this "
         "accelerator: "
      << (scaled ? "they still held the loss scale, so call "
                   "accelerator.unscale_gradients() before you read or change them"
                 : "this process has only its part of them, so a norm or another value "
                   "of all of them would be wrong")
      << "; to clip, call accelerator.clip_grad_norm_() instead of "
         "torch::nn::utils::clip_grad_norm_()";
}

}  // namespace muster::internal
