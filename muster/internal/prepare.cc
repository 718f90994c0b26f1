// Core: what prepare() is given, and what becomes of it.
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "base/log.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "muster/internal/core.h"
#include "worker/train/torch_optimizer.h"
#include "worker/train/torch_scheduler.h"

namespace muster::internal {

void Core::ForgetUnheld() {
  if (steps_.between_windows()) registry_.ForgetUnheld();
}

std::shared_ptr<ModelSlot> Core::PrepareModel(std::unique_ptr<ModelSource> source,
                                              bool evaluation) {
  TORCH_CHECK(source->identity() != nullptr,
              "prepare() got an empty module: construct the module first");
  if (auto known = registry_.FindModel(source->identity(), evaluation)) return known;
  // Its parameters become those of rank 0.
  steps_.AboutToChange();
  return registry_.AddModel(std::make_shared<ModelSlot>(&steps_, std::move(source), evaluation));
}

std::shared_ptr<OptimizerSlot> Core::AddOptimizer(std::shared_ptr<OptimizerSlot> slot) {
  checkpoints_.CheckProjectWritable();
  if (const std::string why = slot->handle().CannotSave(); !why.empty()) {
    MUSTER_LOG(Warning) << "save_state() is going to fail: " << why;
  }
  return registry_.AddOptimizer(std::move(slot));
}

std::shared_ptr<OptimizerSlot> Core::PrepareOptimizer(torch::optim::Optimizer& optimizer,
                                                      std::shared_ptr<void> keep) {
  std::shared_ptr<OptimizerSlot> slot = registry_.FindOptimizer(
      &optimizer, [&](const OptimizerSlot& known) { return known.handle().Wraps(optimizer); });
  if (slot == nullptr) {
    std::unique_ptr<OptimizerHandle> handle = WrapTorchOptimizer(optimizer);
    OptimizerHandle* const borrowed = handle.get();
    slot = AddOptimizer(
        std::make_shared<OptimizerSlot>(&steps_, borrowed, std::move(handle), &optimizer));
  }
  if (keep != nullptr) slot->Keep(std::move(keep));
  return slot;
}

std::shared_ptr<OptimizerSlot> Core::PrepareOptimizer(OptimizerHandle& optimizer,
                                                      std::shared_ptr<void> keep) {
  std::shared_ptr<OptimizerSlot> slot = registry_.FindOptimizer(
      &optimizer, [&](const OptimizerSlot& known) { return known.source_id() == optimizer.id(); });
  if (slot == nullptr) {
    slot = AddOptimizer(
        std::make_shared<OptimizerSlot>(&steps_, &optimizer, nullptr, &optimizer, optimizer.id()));
  }
  if (keep != nullptr) slot->Keep(std::move(keep));
  return slot;
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    LrSchedulePtr schedule, const std::shared_ptr<OptimizerSlot>& optimizer) {
  TORCH_CHECK(schedule != nullptr, "prepare() got an empty schedule");
  return registry_.AddSchedule(
      std::make_shared<SchedulerSlot>(&steps_,
                                      SchedulerSlot::Make([schedule](OptimizerHandle& handle) {
                                        return std::make_unique<LrScheduler>(handle, schedule);
                                      })),
      optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    std::vector<LrSchedulePtr> schedules, const std::shared_ptr<OptimizerSlot>& optimizer) {
  for (const LrSchedulePtr& schedule : schedules) {
    TORCH_CHECK(schedule != nullptr, "prepare() got an empty schedule in a list of schedules");
  }
  return registry_.AddSchedule(
      std::make_shared<SchedulerSlot>(
          &steps_, SchedulerSlot::Make([schedules = std::move(schedules)](OptimizerHandle& handle) {
            return std::make_unique<LrScheduler>(handle, schedules);
          })),
      optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    const PlateauSchedule& schedule, const std::shared_ptr<OptimizerSlot>& optimizer) {
  return registry_.AddSchedule(
      std::make_shared<SchedulerSlot>(
          &steps_, SchedulerSlot::MakePlateau([schedule](OptimizerHandle& handle) {
            return std::make_unique<ReduceLROnPlateau>(handle, schedule.options);
          })),
      optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    torch::optim::LRScheduler& schedule, std::shared_ptr<void> keep,
    const std::shared_ptr<OptimizerSlot>& optimizer) {
  const SchedulerSlot::Make make = [&schedule](OptimizerHandle& handle) {
    return WrapTorchScheduler(schedule, handle);
  };
  return registry_.AddSchedule(
      std::make_shared<SchedulerSlot>(&steps_, make, &schedule, std::move(keep)), optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    torch::optim::ReduceLROnPlateauScheduler& schedule, std::shared_ptr<void> keep,
    const std::shared_ptr<OptimizerSlot>& optimizer) {
  const SchedulerSlot::MakePlateau make = [&schedule](OptimizerHandle& handle) {
    return WrapTorchPlateau(schedule, handle);
  };
  return registry_.AddSchedule(
      std::make_shared<SchedulerSlot>(&steps_, make, &schedule, std::move(keep)), optimizer);
}

LoaderOptions Core::loader_options() const {
  LoaderOptions loader;
  loader.split_batches = process_.options().data_loader.split_batches;
  loader.even_batches = process_.options().data_loader.even_batches;
  loader.dispatch_batches = process_.options().data_loader.dispatch_batches;
  loader.data_seed = process_.options().data_loader.data_seed;
  loader.use_seedable_sampler = process_.options().data_loader.use_seedable_sampler;
  loader.non_blocking = process_.options().data_loader.non_blocking;
  if (process_.options().device_placement) loader.device = process_.device();
  return loader;
}

void Core::RegisterLoader(std::shared_ptr<LoaderStateHandle> loader) {
  registry_.AddLoader(std::move(loader));
  loops_.LoadersAdded();
}

void Core::FreeMemory() {
  steps_.AboutToChange();
  registry_.Clear();
  loops_.LoadersCleared();
  steps_.Reset();
  if (process_.device().is_cuda()) at::getDeviceAllocator(c10::kCUDA)->emptyCache();
}

}  // namespace muster::internal
