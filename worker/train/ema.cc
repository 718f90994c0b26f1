#include "worker/train/ema.h"

#include <algorithm>
#include <exception>
#include <map>
#include <set>
#include <string>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "ATen/ops/_foreach_lerp.h"
#include "c10/util/Exception.h"
#include "worker/parallel/paged_storage.h"
#include "worker/parallel/weight_changes.h"
#include "worker/train/guard.h"

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

// Announces that the parameters of these entries have been changed.
template <class Entries>
void NoteChangeOf(const Entries& entries) {
  std::vector<at::Tensor> changed;
  for (const auto& entry : entries) changed.push_back(entry.parameter);
  NoteWeightChange(changed);
}

}  // namespace

EmaWeights::EmaWeights(const Named& parameters, const EmaOptions& options, Witness witness)
    : options_(options), witness_(std::move(witness)) {
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
    if (IsPaged(parameter) || parameter.scalar_type() != type) {
      // One at a time, because an operator brings all its arguments into memory, and the fp32
      // copies of a whole model take twice its memory.
      entry.average.lerp_(parameter.detach().to(type), 1 - decay);
      continue;
    }
    auto list = std::find_if(lists.begin(), lists.end(), [&](const List& l) {
      return l.averages[0].device() == entry.average.device() &&
             l.averages[0].scalar_type() == type;
    });
    if (list == lists.end()) list = lists.emplace(lists.end());
    list->averages.push_back(entry.average);
    list->weights.push_back(parameter.detach());
  }
  for (const List& list : lists) at::_foreach_lerp_(list.averages, list.weights, 1 - decay);
  if (!copies) ++updates_;
}

uint32_t EmaWeights::VersionOf(const Entry& entry) const {
  const at::Tensor witness = witness_ == nullptr ? entry.parameter : witness_(entry.name);
  return static_cast<uint32_t>(witness._version());
}

EmaWeights::Scope::Scope(EmaWeights& ema, std::function<void()> changed)
    : ema_(ema), changed_(std::move(changed)), exceptions_(std::uncaught_exceptions()) {
  TORCH_CHECK(!ema.applied_, "the average of weights is applied already: scopes of it do not nest");
  const at::NoGradGuard no_grad;
  for (const Entry& entry : ema.entries_) weights_.push_back(entry.parameter.detach().clone());
  try {
    for (Entry& entry : ema.entries_) entry.parameter.copy_(entry.average);
    if (changed_ != nullptr) changed_();
    for (const Entry& entry : ema.entries_) versions_.push_back(ema.VersionOf(entry));
  } catch (const std::exception& error) {
    // The destructor will not run.
    const std::string why = error.what();
    try {
      GiveBack();
    } catch (const std::exception& second) {
      TORCH_CHECK(false, why,
                  "; and the weights could not be given back, so that some are their "
                  "average: load them again. ",
                  second.what());
    }
    throw;
  }
  ema.applied_ = true;
  NoteChangeOf(ema.entries_);
}

void EmaWeights::Scope::GiveBack() const {
  for (size_t i = 0; i < weights_.size(); ++i) ema_.entries_[i].parameter.copy_(weights_[i]);
  NoteChangeOf(ema_.entries_);
}

EmaWeights::Scope::~Scope() noexcept(false) {
  const at::NoGradGuard no_grad;
  std::string changed;
  for (size_t i = 0; i < weights_.size() && changed.empty(); ++i) {
    const Entry& entry = ema_.entries_[i];
    if (ema_.VersionOf(entry) != versions_[i]) changed = entry.name;
  }
  GiveBack();
  ema_.applied_ = false;
  if (changed_ != nullptr) changed_();
  TORCH_CHECK(changed.empty() || std::uncaught_exceptions() != exceptions_, "parameter '", changed,
              "' was changed while the weights were their average, and is now what it was before: "
              "train and load outside of the average's scope");
}

EmaWeights::Named EmaWeights::averages() const {
  Named averages;
  for (const Entry& entry : entries_) averages.emplace_back(entry.name, entry.average);
  return averages;
}

void EmaWeights::CopyAverages(const Named& averages, const Named& parameters) {
  std::map<std::string, at::Tensor> targets(parameters.begin(), parameters.end());
  for (const auto& [name, average] : averages) {
    const auto it = targets.find(name);
    TORCH_CHECK(it != targets.end(), "the model has no parameter '", name,
                "', of which there is an average");
    TORCH_CHECK(it->second.sizes() == average.sizes(), "parameter '", name, "' has shape ",
                it->second.sizes(), " and its average ", average.sizes());
  }
  // The other names of a shared parameter have no average of their own.
  std::set<const void*> filled;
  for (const auto& [name, unused] : averages) {
    filled.insert(targets.at(name).unsafeGetTensorImpl());
  }
  for (const auto& [name, target] : targets) {
    TORCH_CHECK(filled.count(target.unsafeGetTensorImpl()) > 0,
                "there is no average of the model's parameter '", name, "'");
  }
  const at::NoGradGuard no_grad;
  std::vector<at::Tensor> changed;
  for (const auto& [name, average] : averages) {
    changed.push_back(targets.at(name));
    changed.back().copy_(average);
  }
  NoteWeightChange(changed);
}

StateDict EmaWeights::SaveState() const {
  StateDict state;
  state.SetInt("calls", calls_);
  state.SetInt("updates", updates_);
  for (const Entry& entry : entries_) state.SetTensor(KeyOf(entry.name), entry.average);
  return state;
}

void EmaWeights::LoadState(const StateDict& state) {
  const absl::StatusOr<int64_t> calls = state.GetInt("calls");
  const absl::StatusOr<int64_t> updates = state.GetInt("updates");
  ThrowIfError(calls.status());
  ThrowIfError(updates.status());
  NamedTensors averages;
  for (const Entry& entry : entries_) averages.emplace_back(KeyOf(entry.name), entry.average);
  ThrowIfError(LoadTensors(state.tensors(), averages, "the average of weights"));
  calls_ = *calls;
  updates_ = *updates;
}

}  // namespace muster
