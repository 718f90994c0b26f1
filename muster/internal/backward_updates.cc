#include "muster/internal/backward_updates.h"

#include <algorithm>
#include <exception>

#include "ATen/core/grad_mode.h"
#include "c10/util/Exception.h"
#include "muster/internal/registry.h"
#include "muster/internal/slots.h"
#include "worker/parallel/shard_unit.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/clip.h"
#include "worker/train/optimizer.h"

namespace muster::internal {
namespace {

// The most units that have gradients and are not updated: one that is under way and one that waits.
constexpr size_t kUnitsWaiting = 2;

constexpr char kInBackward[] = "options.sharding.optimizer_in_backward";

FusedOptimizer& FusedOf(OptimizerSlot& optimizer) {
  auto* const fused = dynamic_cast<FusedOptimizer*>(&optimizer.handle());
  TORCH_CHECK(fused != nullptr, kInBackward,
              " works only with Muster's fused optimizers: use "
              "muster::FusedAdamW, FusedAdam, FusedSGD or FusedAdagrad, or leave the option out");
  return *fused;
}

bool IsGone(const at::Tensor& gradient) {
  return gradient.defined() && gradient.is_same(ShardUnit::UsedGradientMark());
}

}  // namespace

BackwardUpdates::BackwardUpdates(const Registry& registry, BeginPass begin_pass)
    : registry_(registry), begin_pass_(std::move(begin_pass)) {}

BackwardUpdates::~BackwardUpdates() { Settle(); }

void BackwardUpdates::Prepare(OptimizerSlot& optimizer) { FusedOf(optimizer).OffloadByMemory(); }

BackwardUpdates::Rates BackwardUpdates::RatesOf(const OptimizerSlot& optimizer) {
  Rates rates;
  const OptimizerHandle& handle = optimizer.handle();
  for (int64_t g = 0; g < handle.num_groups(); ++g) {
    rates.emplace_back(handle.lr(g), handle.momentum(g));
  }
  return rates;
}

bool BackwardUpdates::Begin(ShardedModel& model) {
  // A pass may contain several models, and the earlier ones may have been updated in it already.
  if (!pass_open_) CheckWhole();
  CheckNotPending(model, "another backward pass");
  const std::optional<double> factor = begin_pass_();
  if (!factor.has_value()) return false;
  factor_ = *factor;
  pass_open_ = true;
  for (const auto& optimizer : registry_.optimizers()) {
    const std::vector<at::Tensor>& parameters = optimizer->handle().parameters();
    for (size_t i = 0; i < parameters.size(); ++i) {
      if (model.NameOf(parameters[i]) == nullptr) continue;
      places_[parameters[i].unsafeGetTensorImpl()] = {optimizer, i};
      if (rates_.count(optimizer.get()) == 0) rates_[optimizer.get()] = RatesOf(*optimizer);
    }
  }
  return true;
}

void BackwardUpdates::WaitUntilLeft(size_t most) {
  while (tickets_.size() > most) {
    const CommThread::Ticket first = std::move(tickets_.front());
    tickets_.pop_front();
    thread_.Wait(first);
  }
}

void BackwardUpdates::Update(std::vector<at::Tensor> shards) {
  std::unordered_map<OptimizerSlot*, std::vector<size_t>> steps;
  std::vector<at::Tensor> updated;
  for (at::Tensor& shard : shards) {
    const auto place = places_.find(shard.unsafeGetTensorImpl());
    if (place == places_.end()) continue;  // no prepared optimizer has it
    steps[place->second.optimizer.get()].push_back(place->second.index);
    updated.push_back(std::move(shard));
  }
  shards.clear();
  if (updated.empty()) return;
  const bool on_cpu = updated.front().is_cpu();
  auto update = [steps = std::move(steps), updated = std::move(updated), factor = factor_] {
    const at::NoGradGuard no_grad;
    ScaleGradients(updated, factor);
    for (const auto& [optimizer, which] : steps) FusedOf(*optimizer).StepOnly(which);
    for (const at::Tensor& shard : updated) {
      shard.mutable_grad() = ShardUnit::UsedGradientMark();
    }
  };
  if (!on_cpu) return update();
  WaitUntilLeft(kUnitsWaiting - 1);
  tickets_.push_back(thread_.Submit(std::move(update)));
}

void BackwardUpdates::End(ShardedModel& model, const std::vector<at::Tensor>& trained) {
  WaitUntilLeft(0);
  for (const at::Tensor& shard : trained) {
    const auto place = places_.find(shard.unsafeGetTensorImpl());
    if (place == places_.end()) continue;
    const std::shared_ptr<OptimizerSlot>& optimizer = place->second.optimizer;
    // All ranks agree on which optimizers have updated, whichever parts they have.
    if (shard.numel() == 0) shard.mutable_grad() = ShardUnit::UsedGradientMark();
    Pending& pending = pending_[optimizer.get()];
    pending.optimizer = optimizer;
    pending.rates = rates_.at(optimizer.get());
    if (std::find(pending.models.begin(), pending.models.end(), &model) == pending.models.end()) {
      pending.models.push_back(&model);
    }
  }
  for (const at::Tensor& shard : model.shards()) places_.erase(shard.unsafeGetTensorImpl());
  if (!places_.empty()) return;  // another model of this pass has not ended
  rates_.clear();
  pass_open_ = under_way_ = false;
}

void BackwardUpdates::Settle() {
  while (!tickets_.empty()) {
    const CommThread::Ticket first = std::move(tickets_.front());
    tickets_.pop_front();
    thread_.WaitQuietly(first);
  }
  pass_open_ = false;
  if (under_way_) return;
  // Nothing has changed: the next pass begins from scratch.
  places_.clear();
  rates_.clear();
}

void BackwardUpdates::CheckWhole() const {
  TORCH_CHECK(!under_way_,
              "a backward pass has thrown after the optimizer had updated some of the parameters "
              "in it (",
              kInBackward,
              "): the model has changed in part. Call load_state(), or run the program again");
}

void BackwardUpdates::CheckStepped(const ShardedModel& model, const char* what) const {
  if (replacing_) return;
  CheckWhole();
  CheckNotPending(model, what);
}

void BackwardUpdates::CheckNotPending(const ShardedModel& model, const char* what) const {
  for (const auto& [optimizer, pending] : pending_) {
    TORCH_CHECK(
        std::find(pending.models.begin(), pending.models.end(), &model) == pending.models.end(),
        what, " between backward() and optimizer.step(): ", kInBackward,
        " has already updated the parameters inside the backward pass. Call "
        "optimizer.step() after each backward() of the last micro-step of a window (if there are "
        "several losses, add them up); a program that skips steps, or needs the parameters before "
        "the step, must leave the option off");
  }
}

bool BackwardUpdates::Updated(const OptimizerSlot& optimizer) const {
  return pending_.count(&optimizer) > 0;
}

void BackwardUpdates::CheckStepped(const OptimizerSlot& optimizer, const char* what) const {
  CheckWhole();
  TORCH_CHECK(!Updated(optimizer), what, " between backward() and optimizer.step(): ", kInBackward,
              " has already updated the parameters inside the backward pass, so a step cannot be "
              "skipped. Call optimizer.step() first, or leave the option out");
}

void BackwardUpdates::CheckGradientsThere(const std::vector<at::Tensor>& parameters,
                                          const char* what) {
  for (const at::Tensor& parameter : parameters) {
    TORCH_CHECK(!IsGone(parameter.grad()), what,
                " needs the gradients of all parameters, and with ", kInBackward,
                " those of a unit are gone once the optimizer has updated it inside the backward "
                "pass: leave the option out, or avoid ",
                what);
  }
}

void BackwardUpdates::CheckRates(OptimizerSlot& optimizer) const {
  const auto pending = pending_.find(&optimizer);
  if (pending == pending_.end()) return;
  TORCH_CHECK(
      pending->second.rates == RatesOf(optimizer),
      "the learning rate or momentum was changed between backward() and "
      "optimizer.step(), and ",
      kInBackward,
      " has already updated the parameters with the old value inside the backward pass: change "
      "it before backward(), or after optimizer.step()");
}

void BackwardUpdates::FinishStep(OptimizerSlot& optimizer, double factor) {
  const std::vector<at::Tensor>& parameters = optimizer.handle().parameters();
  std::vector<size_t> rest;
  std::vector<at::Tensor> with_gradients;
  for (size_t i = 0; i < parameters.size(); ++i) {
    if (!parameters[i].grad().defined() || IsGone(parameters[i].grad())) continue;
    rest.push_back(i);
    with_gradients.push_back(parameters[i]);
  }
  ScaleGradients(with_gradients, factor);
  FusedOf(optimizer).StepOnly(rest);
  pending_.erase(&optimizer);
}

void BackwardUpdates::ForgetGradients(OptimizerSlot& optimizer) {
  for (const at::Tensor& parameter : optimizer.handle().parameters()) {
    if (IsGone(parameter.grad())) parameter.mutable_grad().reset();
  }
}

void BackwardUpdates::Reset() {
  Settle();
  try {
    thread_.Drain();
  } catch (const std::exception&) {
    // The pass has thrown this error already.
  }
  places_.clear();
  rates_.clear();
  pending_.clear();
  pass_open_ = under_way_ = false;
}

}  // namespace muster::internal
