#include "muster/internal/registry.h"

#include <algorithm>
#include <utility>

#include "c10/util/Exception.h"

namespace muster::internal {

bool Registry::BeginCall() {
  if (call_depth_++ > 0) return false;
  call_optimizers_.clear();
  call_schedulers_.clear();
  return true;
}

void Registry::EndCall(bool failed) {
  if (--call_depth_ > 0) return;
  const auto schedulers = std::exchange(call_schedulers_, {});
  const auto optimizers = std::exchange(call_optimizers_, {});
  if (schedulers.empty()) return;
  const auto& candidates = optimizers.empty() ? optimizers_ : optimizers;
  if (failed || candidates.size() != 1) {
    // Refused schedules must not stay behind without an optimizer.
    std::erase_if(schedulers_, [&](const std::shared_ptr<SchedulerSlot>& slot) {
      return std::find(schedulers.begin(), schedulers.end(), slot) != schedulers.end();
    });
  }
  if (failed) return;
  TORCH_CHECK(candidates.size() == 1, "prepare() got a schedule and ", candidates.size(),
              " optimizers: pass the schedule in one call with its optimizer, or use "
              "prepare_scheduler(optimizer, schedule)");
  for (const auto& scheduler : schedulers) scheduler->Bind(candidates.front());
}

std::shared_ptr<ModelSlot> Registry::FindModel(const void* identity, bool evaluation) const {
  for (const auto& slot : models_) {
    if (slot->source().identity() != identity) continue;
    TORCH_CHECK(slot->evaluation() == evaluation, "this model is prepared already, for ",
                slot->evaluation() ? "evaluation" : "training",
                ": prepare it once, with the evaluation_mode you need");
    return slot;
  }
  return nullptr;
}

std::shared_ptr<ModelSlot> Registry::AddModel(std::shared_ptr<ModelSlot> slot) {
  models_.push_back(std::move(slot));
  ++models_version_;
  return models_.back();
}

std::shared_ptr<OptimizerSlot> Registry::FindOptimizer(
    const void* source, absl::FunctionRef<bool(const OptimizerSlot&)> is_same) {
  for (const auto& slot : optimizers_) {
    if (slot->source() != source) continue;
    if (is_same(*slot)) {
      call_optimizers_.push_back(slot);
      return slot;
    }
    // The address alone proves nothing: the optimizer of the fold before was there.
    const std::shared_ptr<OptimizerSlot> stale = slot;
    std::erase_if(schedulers_, [&](const auto& s) { return s->optimizer() == stale; });
    ForgetOptimizer(stale.get());
    return nullptr;
  }
  return nullptr;
}

std::shared_ptr<OptimizerSlot> Registry::AddOptimizer(std::shared_ptr<OptimizerSlot> slot) {
  optimizers_.push_back(slot);
  call_optimizers_.push_back(slot);
  return slot;
}

std::shared_ptr<SchedulerSlot> Registry::AddSchedule(
    std::shared_ptr<SchedulerSlot> slot, const std::shared_ptr<OptimizerSlot>& optimizer) {
  // LibTorch's schedules have no identity but their address: the last one prepared there counts.
  if (slot->source() != nullptr) {
    std::erase_if(schedulers_,
                  [&](const auto& other) { return other->source() == slot->source(); });
  }
  if (optimizer == nullptr) {
    TORCH_CHECK(call_depth_ > 0, "a schedule needs an optimizer: prepare both in one call");
    schedulers_.push_back(slot);
    call_schedulers_.push_back(std::move(slot));
    return schedulers_.back();
  }
  // The handle's pointer keeps this object alive; held in here it would do so forever.
  for (const auto& own : optimizers_) {
    if (own.get() != optimizer.get()) continue;
    slot->Bind(own);
    schedulers_.push_back(std::move(slot));
    return schedulers_.back();
  }
  TORCH_CHECK(false,
              "prepare_scheduler() got an optimizer that this Accelerator did not prepare, or has "
              "forgotten since in free_memory()");
}

void Registry::AddLoader(std::shared_ptr<LoaderStateHandle> loader) {
  for (auto& known : loaders_) {
    // Only this object holds it, so its loop has ended and it cannot begin another one.
    if (known.use_count() > 1 || known->signature() != loader->signature()) continue;
    // An order that has not begun is the new loader's own to say.
    const LoaderState next = known->NextState();
    loader->LoadState(
        next, next.inside_epoch() ? known->StateTensors() : std::map<std::string, at::Tensor>());
    known = std::move(loader);
    return;
  }
  const auto pending = pending_loaders_.find(loaders_.size());
  if (pending != pending_loaders_.end()) {
    loader->LoadState(pending->second.state, pending->second.tensors);
    pending_loaders_.erase(pending);
  }
  loaders_.push_back(std::move(loader));
}

void Registry::CheckLoader(size_t place, const LoaderState& state,
                           const std::map<std::string, at::Tensor>& tensors) const {
  if (place < loaders_.size()) loaders_[place]->CheckState(state, tensors);
}

void Registry::LoadLoader(size_t place, const LoaderState& state,
                          std::map<std::string, at::Tensor> tensors) {
  if (place < loaders_.size()) {
    loaders_[place]->LoadState(state, tensors);
  } else {
    pending_loaders_.insert({place, {state, std::move(tensors)}});
  }
}

void Registry::ForgetUnheld() {
  std::erase_if(schedulers_, [](const auto& slot) { return slot.use_count() == 1; });
  const std::vector<std::shared_ptr<OptimizerSlot>> optimizers = optimizers_;
  for (const auto& slot : optimizers) {
    // Here and in the copy.
    if (slot.use_count() == 2) ForgetOptimizer(slot.get());
  }
  const size_t models = std::erase_if(models_, [](const std::shared_ptr<ModelSlot>& slot) {
    return slot.use_count() == 1 && !slot->source().held_elsewhere();
  });
  if (models > 0) ++models_version_;
}

void Registry::ForgetOptimizer(const OptimizerSlot* slot) {
  optimizer_forgotten_();
  std::erase_if(optimizers_, [&](const auto& other) { return other.get() == slot; });
}

void Registry::Clear() {
  models_.clear();
  ++models_version_;
  optimizers_.clear();
  schedulers_.clear();
  loaders_.clear();
  pending_loaders_.clear();
}

}  // namespace muster::internal
