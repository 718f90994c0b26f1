#include "worker/train/ema.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_foreach_lerp.h"
#include "c10/util/Exception.h"
#include "worker/parallel/paged_storage.h"
#include "worker/train/guard.h"
#include "worker/train/optimizer_handle.h"

namespace muster {
namespace {

at::ScalarType AverageType(const at::Tensor& parameter) {
  const at::ScalarType type = parameter.scalar_type();
  return type == at::kHalf || type == at::kBFloat16 ? at::kFloat : type;
}

at::Tensor NewAverage(const at::Tensor& parameter) {
  return parameter.detach().to(parameter.device(), AverageType(parameter), /*non_blocking=*/false,
                               /*copy=*/true);
}

}  // namespace

EmaWeights::EmaWeights(const std::vector<std::pair<std::string, at::Tensor>>& parameters,
                       const EmaOptions& options)
    : options_(options) {
  TORCH_CHECK(options.decay >= 0 && options.decay <= 1,
              "the decay of an average of weights must be "
              "in [0, 1], got ",
              options.decay);
  TORCH_CHECK(options.update_every >= 1, "update_every must be at least 1, got ",
              options.update_every);
  TORCH_CHECK(options.update_after_step >= 0, "update_after_step must not be negative, got ",
              options.update_after_step);
  std::set<const void*> seen;
  for (const auto& [name, parameter] : parameters) {
    TORCH_CHECK(parameter.defined(), "parameter '", name, "' is undefined");
    TORCH_CHECK(!IsPaged(parameter),
                "an average of weights (muster::Ema) needs whole parameters, "
                "and '",
                name,
                "' is of a sharded model, divided among the ranks: train without "
                "sharding, or without the average");
    if (!seen.insert(parameter.unsafeGetTensorImpl()).second) continue;
    entries_.push_back({name, parameter, NewAverage(parameter)});
  }
  TORCH_CHECK(!entries_.empty(), "there are no parameters to average");
}

void EmaWeights::Update() {
  TORCH_CHECK(!applied_,
              "the average of weights is updated inside its own scope, where the weights are the "
              "average: end the scope before training continues");
  if (++calls_ % options_.update_every != 0) return;
  const bool copies = calls_ <= options_.update_after_step;
  const auto n = static_cast<double>(updates_);
  const double decay =
      options_.warmup ? std::min(options_.decay, (1 + n) / (10 + n)) : options_.decay;
  const at::NoGradGuard no_grad;
  // The foreach kernel takes lists of one device and dtype.
  struct List {
    std::vector<at::Tensor> averages, weights;
  };
  std::vector<List> lists;
  for (Entry& entry : entries_) {
    const at::Tensor& parameter = entry.parameter;
    const at::ScalarType type = AverageType(parameter);
    if (entry.average.device() != parameter.device() || entry.average.scalar_type() != type) {
      entry.average = entry.average.to(parameter.device(), type);
    }
    if (copies || !(at::isFloatingType(type) || at::isComplexType(type))) {
      entry.average.copy_(parameter);
      continue;
    }
    auto list = std::find_if(lists.begin(), lists.end(), [&](const List& l) {
      return l.averages[0].device() == entry.average.device() &&
             l.averages[0].scalar_type() == type;
    });
    if (list == lists.end()) list = lists.emplace(lists.end());
    list->averages.push_back(entry.average);
    list->weights.push_back(parameter.detach().to(type));
  }
  for (const List& list : lists) at::_foreach_lerp_(list.averages, list.weights, 1 - decay);
  if (!copies) ++updates_;
}

EmaWeights::Scope::Scope(EmaWeights& ema) : ema_(ema), exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK(!ema.applied_, "the average of weights is applied already: scopes of it do not nest");
  const at::NoGradGuard no_grad;
  for (const Entry& entry : ema.entries_) weights_.push_back(entry.parameter.detach().clone());
  for (Entry& entry : ema.entries_) {
    entry.parameter.copy_(entry.average);
    versions_.push_back(static_cast<uint32_t>(entry.parameter._version()));
  }
  ema.applied_ = true;
  ForgetCastWeights();
}

EmaWeights::Scope::~Scope() noexcept(false) {
  const at::NoGradGuard no_grad;
  std::string changed;
  for (size_t i = 0; i < weights_.size(); ++i) {
    Entry& entry = ema_.entries_[i];
    if (changed.empty() && static_cast<uint32_t>(entry.parameter._version()) != versions_[i]) {
      changed = entry.name;
    }
    entry.parameter.copy_(weights_[i]);
  }
  ema_.applied_ = false;
  ForgetCastWeights();
  TORCH_CHECK(changed.empty() || std::uncaught_exceptions() != exceptions_, "parameter '", changed,
              "' was changed while the weights were their average, and is now what it was before: "
              "train and load outside of the average's scope");
}

void EmaWeights::CopyTo(const std::vector<std::pair<std::string, at::Tensor>>& parameters) const {
  std::map<std::string, at::Tensor> targets(parameters.begin(), parameters.end());
  for (const Entry& entry : entries_) {
    const auto it = targets.find(entry.name);
    TORCH_CHECK(it != targets.end(), "the model has no parameter '", entry.name,
                "', of which there is an average");
    TORCH_CHECK(it->second.sizes() == entry.average.sizes(), "parameter '", entry.name,
                "' has shape ", it->second.sizes(), " and its average ", entry.average.sizes());
  }
  // The other names of a shared parameter have no average of their own.
  std::set<const void*> filled;
  for (const Entry& entry : entries_) {
    filled.insert(targets.at(entry.name).unsafeGetTensorImpl());
  }
  for (const auto& [name, target] : targets) {
    TORCH_CHECK(filled.count(target.unsafeGetTensorImpl()) > 0,
                "there is no average of the model's parameter '", name, "'");
  }
  const at::NoGradGuard no_grad;
  for (const Entry& entry : entries_) targets.at(entry.name).copy_(entry.average);
  ForgetCastWeights();
}

StateDict EmaWeights::SaveState() const {
  StateDict state;
  state.SetInt("calls", calls_);
  state.SetInt("updates", updates_);
  for (const Entry& entry : entries_) state.SetTensor("average." + entry.name, entry.average);
  return state;
}

void EmaWeights::LoadState(const StateDict& state) {
  const absl::StatusOr<int64_t> calls = state.GetInt("calls");
  const absl::StatusOr<int64_t> updates = state.GetInt("updates");
  ThrowIfError(calls.status());
  ThrowIfError(updates.status());
  NamedTensors averages;
  for (const Entry& entry : entries_) averages.emplace_back("average." + entry.name, entry.average);
  ThrowIfError(LoadTensors(state.tensors(), averages, "the average of weights"));
  calls_ = *calls;
  updates_ = *updates;
}

}  // namespace muster
