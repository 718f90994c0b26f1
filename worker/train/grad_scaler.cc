#include "worker/train/grad_scaler.h"

#include <algorithm>
#include <cmath>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_amp_foreach_non_finite_check_and_unscale.h"
#include "ATen/ops/_amp_update_scale.h"
#include "ATen/ops/full.h"
#include "ATen/ops/maximum.h"
#include "ATen/ops/zeros.h"
#include "ATen/ops/zeros_like.h"
#include "c10/util/Exception.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/clip.h"

namespace muster {
namespace {

at::Tensor Scalar(double value, at::ScalarType type, c10::Device device) {
  return at::full({}, value, at::TensorOptions().dtype(type).device(device));
}

}  // namespace

GradScaler::GradScaler(const GradScalerOptions& options, Comm* comm)
    : options_(options), comm_(comm), patience_(options.hysteresis) {
  TORCH_CHECK(options.init_scale > 0, "init_scale must be above 0, got ", options.init_scale);
  TORCH_CHECK(options.growth_factor > 1, "growth_factor must be above 1, got ",
              options.growth_factor);
  TORCH_CHECK(options.backoff_factor > 0 && options.backoff_factor < 1,
              "backoff_factor must be in (0, 1), got ", options.backoff_factor);
  TORCH_CHECK(options.growth_interval >= 1, "growth_interval must be at least 1, got ",
              options.growth_interval);
  TORCH_CHECK(options.hysteresis >= 1, "hysteresis must be at least 1, got ", options.hysteresis);
  TORCH_CHECK(options.min_scale >= 0 && options.min_scale <= options.init_scale,
              "min_scale must be from 0 to init_scale (", options.init_scale, "), got ",
              options.min_scale);
  scale_ = Scalar(options.init_scale, at::kFloat, at::kCPU);
  tracker_ = Scalar(0, at::kInt, at::kCPU);
}

void GradScaler::EnsureOn(c10::Device device) {
  if (scale_.device() == device) return;
  scale_ = scale_.to(device);
  tracker_ = tracker_.to(device);
}

at::Tensor GradScaler::Scale(const at::Tensor& loss) {
  if (!options_.enabled) return loss;
  EnsureOn(loss.device());
  // Never below fp32: the first scale, 65536, is itself infinite in fp16. An fp64 loss stays fp64.
  const bool is_double = loss.scalar_type() == at::kDouble;
  const at::ScalarType type = is_double ? at::kDouble : at::kFloat;
  return loss.to(type).mul(scale_.to(type));
}

at::Tensor GradScaler::Multiply(OptimizerHandle& optimizer, const at::Tensor& factor) {
  at::NoGradGuard no_grad;
  struct List {
    c10::Device device;
    at::ScalarType type;
    std::vector<at::Tensor> grads;
  };
  std::vector<List> lists;
  const std::vector<at::Tensor>& parameters = optimizer.parameters();
  for (size_t p = 0; p < parameters.size(); ++p) {
    if (!parameters[p].grad().defined()) continue;
    TORCH_CHECK(parameters[p].grad().scalar_type() != at::kHalf, "parameter ",
                optimizer.parameter_names()[p],
                " is fp16 itself, and its gradients cannot be unscaled: keep parameters in fp32 "
                "and let autocast run the forward pass in fp16");
    const at::Tensor grad = parameters[p].grad().layout() == at::kStrided
                                ? parameters[p].grad()
                                : GradientValues(parameters[p], optimizer.parameter_names()[p]);
    size_t i = 0;
    while (i < lists.size() &&
           (lists[i].device != grad.device() || lists[i].type != grad.scalar_type())) {
      ++i;
    }
    if (i == lists.size()) lists.push_back({grad.device(), grad.scalar_type(), {}});
    lists[i].grads.push_back(grad);
  }
  at::Tensor found_inf = Scalar(0, at::kFloat, factor.device());
  for (List& list : lists) {
    const bool here = list.device == factor.device();
    at::Tensor found = here ? found_inf : Scalar(0, at::kFloat, list.device);
    const at::Tensor there = here ? factor : factor.to(list.device);
    ForEachPage(list.grads, [&](const std::vector<at::Tensor>& grads, const auto&) {
      at::_amp_foreach_non_finite_check_and_unscale_(grads, found, there);
    });
    if (!here) found_inf = at::maximum(found_inf, found.to(found_inf.device()));
  }
  return found_inf;
}

void GradScaler::Unscale(OptimizerHandle& optimizer) {
  if (!options_.enabled) return;
  PerOptimizer& state = optimizers_[optimizer.id()];
  TORCH_CHECK(state.stage != Stage::kStepped,
              "gradients are unscaled (or clipped) after the optimizer's step: do it before");
  if (state.stage == Stage::kUnscaled) return;
  if (!optimizer.parameters().empty()) EnsureOn(optimizer.parameters()[0].device());
  // Use double, because 1/scale would otherwise be rounded twice if the scale is no power of two.
  state.found_inf = Multiply(optimizer, scale_.to(at::kDouble).reciprocal().to(at::kFloat));
  if (comm_ != nullptr && comm_->size() > 1) comm_->AllReduce(state.found_inf, ReduceOp::kMax);
  state.unscaled_inf = state.found_inf;
  state.stage = Stage::kUnscaled;
}

void GradScaler::Reopen(const OptimizerHandle& optimizer) {
  if (!options_.enabled) return;
  PerOptimizer& state = optimizers_[optimizer.id()];
  if (state.stage != Stage::kReady) {
    state.earlier_inf = state.earlier_inf.defined()
                            ? at::maximum(state.earlier_inf, state.found_inf)
                            : state.found_inf;
  }
  state.stage = Stage::kReady;
  state.found_inf = state.unscaled_inf = at::Tensor();
}

void GradScaler::Rescale(OptimizerHandle& optimizer) {
  if (!options_.enabled) return;
  Reopen(optimizer);
  if (!optimizer.parameters().empty()) EnsureOn(optimizer.parameters()[0].device());
  Multiply(optimizer, scale_);
}

void GradScaler::Step(OptimizerHandle& optimizer) {
  if (!options_.enabled) {
    optimizer.Step();
    return;
  }
  PerOptimizer& state = optimizers_[optimizer.id()];
  TORCH_CHECK(state.stage != Stage::kStepped,
              "the optimizer has stepped already since the gradient scaler's last update");
  Unscale(optimizer);
  if (state.unscaled_inf.is_cpu() || !optimizer.supports_scaled_step()) {
    if (state.unscaled_inf.item<float>() == 0) optimizer.Step();
  } else {
    optimizer.StepScaled(at::Tensor(), state.unscaled_inf);
  }
  state.last_found_inf = state.unscaled_inf;
  state.stage = Stage::kStepped;
}

void GradScaler::StepUnscaled(OptimizerHandle& optimizer) {
  PerOptimizer& state = optimizers_[optimizer.id()];
  if (options_.enabled && state.stage == Stage::kReady) {
    TORCH_CHECK(state.unscaled_inf.defined(),
                "the gradient scaler is to step on unscaled gradients, and has unscaled none");
    state.found_inf = at::zeros_like(state.unscaled_inf);
    state.stage = Stage::kUnscaled;
  }
  Step(optimizer);
}

bool GradScaler::step_was_skipped(const OptimizerHandle& optimizer) const {
  const auto it = optimizers_.find(optimizer.id());
  return it != optimizers_.end() && it->second.last_found_inf.defined() &&
         it->second.last_found_inf.item<float>() != 0;
}

bool GradScaler::pending() const {
  for (const auto& [optimizer, state] : optimizers_) {
    if (state.stage != Stage::kReady || state.earlier_inf.defined()) return true;
  }
  return false;
}

void GradScaler::Reset() {
  std::erase_if(optimizers_, [](const auto& of) { return !of.second.unscaled_inf.defined(); });
  for (auto& [optimizer, state] : optimizers_) {
    at::Tensor unscaled_inf = std::move(state.unscaled_inf);
    state = PerOptimizer();
    state.unscaled_inf = std::move(unscaled_inf);
  }
}

void GradScaler::Update() {
  if (!options_.enabled) return;
  at::NoGradGuard no_grad;
  at::Tensor found_inf;
  for (auto& [optimizer, state] : optimizers_) {
    for (at::Tensor* const found : {&state.found_inf, &state.earlier_inf}) {
      if (!found->defined()) continue;
      found_inf = found_inf.defined() ? at::maximum(found_inf, *found) : *found;
      *found = at::Tensor();
    }
    state.stage = Stage::kReady;
  }
  TORCH_CHECK(found_inf.defined(),
              "the gradient scaler was updated without an optimizer step since the last update");
  if (!options_.dynamic) return;
  const bool decides = options_.hysteresis > 1 || options_.min_scale > 0;
  const bool overflow = decides && found_inf.item<float>() != 0;
  if (overflow && patience_ > 1) {
    --patience_;
    tracker_.zero_();
    return;
  }
  const double before = decides ? scale_.item<float>() : 0;
  TORCH_CHECK(
      !overflow || options_.min_scale == 0 || before > options_.min_scale,
      "the gradients overflow fp16 at the smallest loss scale, ", before,
      " (grad_scaler.min_scale, or fp16.min_loss_scale of a DeepSpeed config): look for NaN "
      "or infinity in the loss, lower the learning rate, or train in bf16");
  at::_amp_update_scale_(scale_, tracker_, found_inf, options_.growth_factor,
                         options_.backoff_factor, options_.growth_interval);
  if (overflow) {
    scale_.clamp_min_(options_.min_scale);
  } else if (decides && scale_.item<float>() > before) {
    patience_ = options_.hysteresis;
  }
}

double GradScaler::scale() const { return options_.enabled ? scale_.item<float>() : 1; }
int64_t GradScaler::growth_tracker() const { return tracker_.item<int>(); }

PlainState GradScaler::SaveState() const {
  if (pending()) {
    GradScaler after(*this);
    after.scale_ = scale_.clone();
    after.tracker_ = tracker_.clone();
    after.Update();
    return after.SaveState();
  }
  PlainState state = {{"scale", {static_cast<double>(scale_.item<float>())}},
                      {"growth_tracker", {static_cast<double>(growth_tracker())}}};
  if (options_.hysteresis > 1) state["hysteresis"] = {static_cast<double>(patience_)};
  return state;
}

void GradScaler::CheckState(const PlainState& state) const {
  const auto value = [&state](const char* name) {
    const auto it = state.find(name);
    TORCH_CHECK(it != state.end() && it->second.size() == 1,
                "gradient scaler state has no number '", name, "'");
    return it->second[0];
  };
  const double scale = value("scale");
  TORCH_CHECK(scale > 0 && std::isfinite(scale), "gradient scaler state 'scale' is ", scale);
  value("growth_tracker");
  if (options_.hysteresis <= 1 || state.count("hysteresis") == 0) return;
  const double patience = value("hysteresis");
  TORCH_CHECK(patience >= 1, "gradient scaler state 'hysteresis' is ", patience);
}

void GradScaler::LoadState(const PlainState& state) {
  CheckState(state);
  const double scale = state.at("scale")[0];
  const double tracker = state.at("growth_tracker")[0];
  // The options of this run apply: they may fix the scale or set its minimum.
  scale_ = Scalar(options_.dynamic ? std::max(scale, options_.min_scale) : options_.init_scale,
                  at::kFloat, scale_.device());
  tracker_ = Scalar(options_.dynamic ? tracker : 0, at::kInt, tracker_.device());
  // With a state of a scaler without a hysteresis, the count begins again.
  patience_ = options_.hysteresis;
  if (options_.hysteresis > 1 && state.count("hysteresis") > 0) {
    patience_ = std::min(options_.hysteresis, static_cast<int64_t>(state.at("hysteresis")[0]));
  }
}

}  // namespace muster
