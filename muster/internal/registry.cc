#include "muster/internal/registry.h"

#include <algorithm>
#include <utility>

#include "base/log.h"
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
    // Schedules that were refused must not stay behind without an optimizer.
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
    // The address alone proves nothing: the optimizer of the previous fold may have been there.
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
  // The handle's pointer keeps this object alive; stored in this object it would do so forever.
  for (const auto& own : optimizers_) {
    if (own.get() != optimizer.get()) continue;
    slot->Bind(own);
    schedulers_.push_back(std::move(slot));
    return schedulers_.back();
  }
  TORCH_CHECK(false,
              "prepare_scheduler() got an optimizer that this Accelerator did not prepare, or has "
              "since forgotten in free_memory()");
}

namespace {

// Does nothing if the program itself has set the next epoch (set_epoch()).
void Put(LoaderStateHandle& loader, const LoaderState& place,
         const std::map<std::string, at::Tensor>& tensors) {
  const int64_t own = loader.NextState().epoch;
  if (own == 0 || own == place.epoch) loader.LoadState(place, tensors);
}

// Makes `next` continue where `before` stopped.
void Continue(const LoaderStateHandle& before, LoaderStateHandle& next) {
  LoaderState place = before.NextState();
  if (place.inside_epoch()) return Put(next, place, before.StateTensors());
  // If the order has not begun, the new loader determines it.
  if (before.signature() != next.signature()) {
    const int64_t epoch = place.epoch;
    place = next.NextState();
    place.epoch = epoch;
  }
  Put(next, place, {});
}

}  // namespace

void Registry::AddLoader(std::shared_ptr<LoaderStateHandle> loader, int64_t epoch) {
  bool settled = true;
  for (size_t i = 0; i < loaders_.size(); ++i) {
    if (origins_[i].succeeded) continue;
    const bool same = loaders_[i]->signature() == loader->signature();
    // Only the registry holds the old loader, so its loop has ended and it cannot begin another
    // one.
    if (same && loaders_[i].use_count() == 1) {
      Continue(*loaders_[i], *loader);
      loaders_[i] = std::move(loader);
      origins_[i].epoch = epoch;
      return;
    }
    if (same || (epoch >= 0 && origins_[i].epoch != epoch)) settled = false;
  }
  if (settled) TakeLoadedPlace(loaders_.size(), *loader);
  loaders_.push_back(std::move(loader));
  origins_.push_back({.epoch = epoch, .settled = settled});
}

void Registry::SettleLoaders(absl::FunctionRef<bool(size_t)> trained) {
  for (size_t i = 0; i < loaders_.size(); ++i) {
    if (origins_[i].settled) continue;
    const std::optional<size_t> before = PredecessorOf(i, trained);
    if (!before.has_value()) {
      // The place of a loader that has moved is free: in a resumed run nothing was ever there.
      const auto free = std::find_if(origins_.begin(), origins_.begin() + static_cast<int64_t>(i),
                                     [](const LoaderOrigin& origin) { return origin.succeeded; });
      const size_t place = static_cast<size_t>(free - origins_.begin());
      std::swap(loaders_[place], loaders_[i]);
      std::swap(origins_[place], origins_[i]);
      TakeLoadedPlace(place, *loaders_[place]);
      origins_[place].settled = true;
      WarnIfHeldBefore(place);
      continue;
    }
    Continue(*loaders_[*before], *loaders_[i]);
    origins_[i].settled = true;
    std::swap(loaders_[*before], loaders_[i]);
    std::swap(origins_[*before], origins_[i]);
    origins_[i].succeeded = true;
  }
  while (!loaders_.empty() && origins_.back().succeeded) {
    loaders_.pop_back();
    origins_.pop_back();
  }
}

std::optional<size_t> Registry::PredecessorOf(size_t place,
                                              absl::FunctionRef<bool(size_t)> trained) const {
  const LoaderStateHandle& loader = *loaders_[place];
  const int64_t epoch = origins_[place].epoch;
  std::optional<size_t> other;
  for (size_t i = 0; i < place; ++i) {
    const LoaderOrigin& origin = origins_[i];
    if (origin.succeeded || !origin.settled || loaders_[i].use_count() > 1) continue;
    if (loaders_[i]->signature() == loader.signature()) return i;
    if (other.has_value() || epoch < 0 || origin.epoch == epoch) continue;
    const bool of_epochs = origin.epoch >= 0 || trained(i);
    if (of_epochs && loaders_[i]->shuffles() == loader.shuffles()) other = i;
  }
  return other;
}

void Registry::WarnIfHeldBefore(size_t place) {
  if (origins_[place].epoch < 0 || told_held_) return;
  for (size_t i = 0; i < place; ++i) {
    if (origins_[i].succeeded || origins_[i].epoch < 0 ||
        origins_[i].epoch == origins_[place].epoch ||
        loaders_[i]->signature() != loaders_[place]->signature()) {
      continue;
    }
    told_held_ = true;
    MUSTER_LOG(Warning)
        << "a loader that was prepared in epoch " << origins_[place].epoch
        << " is described as one that was prepared in epoch " << origins_[i].epoch
        << " and that the program still holds: it does not continue that loader, but begins with "
           "the order of the first epoch, and has its own place in checkpoints; assign it to the "
           "variable of the older one, or prepare one loader before the loop";
    return;
  }
}

void Registry::TakeLoadedPlace(size_t place, LoaderStateHandle& loader) {
  const auto pending = pending_loaders_.find(place);
  if (pending == pending_loaders_.end()) return;
  Put(loader, pending->second.state, pending->second.tensors);
  pending_loaders_.erase(pending);
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
  const size_t optimizers =
      std::erase_if(optimizers_, [](const auto& slot) { return slot.use_count() == 1; });
  if (optimizers > 0) optimizer_forgotten_();
  const size_t models = std::erase_if(models_, [](const std::shared_ptr<ModelSlot>& slot) {
    return slot.use_count() == 1 && !slot->source().held_elsewhere();
  });
  if (models > 0) ++models_version_;
}

void Registry::ForgetOptimizer(const OptimizerSlot* slot) {
  // The program may have destroyed it: nothing may look at its parameters any more.
  std::erase_if(optimizers_, [&](const auto& other) { return other.get() == slot; });
  optimizer_forgotten_();
}

void Registry::Clear() {
  models_.clear();
  ++models_version_;
  optimizers_.clear();
  schedulers_.clear();
  loaders_.clear();
  origins_.clear();
  pending_loaders_.clear();
}

}  // namespace muster::internal
