// Core: how prepare() handles its arguments.
#include <algorithm>
#include <memory>
#include <string>
#include <unordered_set>
#include <utility>
#include <vector>

#include "ATen/Context.h"
#include "base/log.h"
#include "base/memory_left.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "muster/internal/backward_updates.h"
#include "muster/internal/configured_training.h"
#include "muster/internal/core.h"
#include "worker/collective/on_all.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/disk_parts.h"
#include "worker/train/optimizer.h"
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
  // The model's parameters become those of rank 0.
  steps_.AboutToChange();
  std::shared_ptr<ModelSlot> slot = registry_.AddModel(
      std::make_shared<ModelSlot>(&steps_, std::move(source), evaluation, MakeShardingGroups()));
  for (const auto& optimizer : registry_.optimizers()) GiveShards(*optimizer);
  if (!evaluation) CheckRoomForStates(nullptr);
  return slot;
}

const ShardingGroups& Core::MakeShardingGroups() {
  const ShardingOptions& sharding = process_.sharding();
  const int64_t size = process_.size();
  if (sharding_groups_made_ || sharding.strategy == ShardingStrategy::kNone || size == 1) {
    return sharding_groups_;
  }
  const int64_t group = sharding.group_size == 0 ? size : sharding.group_size;
  TORCH_CHECK(
      group != 1,
      "options.sharding.group_size is 1: each process would hold a whole copy of the model, "
      "and nothing would be divided. Without a group_size, hybrid sharding divides a copy among "
      "the processes of a machine: run more than one process on each machine, set group_size "
      "(MUSTER_SHARDING_GROUP_SIZE) to a larger number, or use zero3, which divides one copy among "
      "all");
  TORCH_CHECK(group > 1 && size % group == 0, "options.sharding.group_size is ", group, ", and ",
              size, " processes cannot be divided into groups of ", group,
              ", each of which holds a copy of the model: set a number that divides ", size,
              " (MUSTER_SHARDING_GROUP_SIZE; hybrid takes the number of processes of a machine), "
              "or 0 to divide one copy among all");
  const int64_t reshard = sharding.reshard_group_size;
  TORCH_CHECK(reshard == 0 || (reshard > 0 && reshard < group && group % reshard == 0),
              "options.sharding.reshard_group_size is ", reshard, "; it must be smaller than ",
              group, ", the number of processes that divide a copy of the model, and divide it");
  // All processes make all groups, in the same order.
  const auto make = [&](int64_t first, int64_t stride, int64_t count) {
    std::vector<int> ranks;
    for (int64_t i = 0; i < count; ++i) ranks.push_back(static_cast<int>(first + i * stride));
    return NewGroup(std::move(ranks));
  };
  if (group < size) {
    for (int64_t first = 0; first < size; first += group) {
      if (std::shared_ptr<Comm> mine = make(first, 1, group)) sharding_groups_.shard = mine;
    }
    for (int64_t first = 0; first < group; ++first) {
      if (std::shared_ptr<Comm> mine = make(first, group, size / group)) {
        sharding_groups_.replicas = mine;
      }
    }
  }
  if (reshard > 0) {
    for (int64_t first = 0; first < size; first += reshard) {
      if (std::shared_ptr<Comm> mine = make(first, 1, reshard)) sharding_groups_.reshard = mine;
    }
  }
  checkpoints_.SetShardComm(sharding_groups_.shard);
  sharding_groups_made_ = true;
  return sharding_groups_;
}

void Core::GiveShards(OptimizerSlot& optimizer) {
  for (const auto& model : registry_.models()) {
    ShardedModel* const sharded = model->sharded();
    if (sharded == nullptr) continue;
    const std::vector<at::Tensor>& parameters = optimizer.handle().parameters();
    const bool holds = std::any_of(
        parameters.begin(), parameters.end(),
        [&](const at::Tensor& parameter) { return sharded->ShardOf(parameter).defined(); });
    if (!holds) continue;
    optimizer.handle().ReplaceParameters(
        [&](const at::Tensor& parameter) { return sharded->ShardOf(parameter); });
    sharded->Hold(optimizer.handle().parameters());
    // The program may step the optimizer that it gave to prepare().
    if (StepsLeaveNoVersion(optimizer.handle())) sharded->ExpectUnseenSteps();
  }
}

void Core::OffloadStateOf(OptimizerHandle& optimizer) {
  const ShardingOptions& sharding = process_.sharding();
  if (!GoesElsewhere(sharding.offload_optimizer, process_.device())) return;
  const bool to_disk = sharding.offload_optimizer == Offload::kDisk;
  if (GoesElsewhere(sharding.offload_gradients, process_.device())) {
    // A window takes the gradients of one unit from the place where they are. Other optimizers are
    // refused below.
    if (auto* const fused = dynamic_cast<FusedOptimizer*>(&optimizer)) fused->OffloadByMemory();
  }
  OnAll(process_.comm(), "offload the state of an optimizer", [&] {
    optimizer.OffloadState(to_disk ? MakeScratchFile(sharding.offload_optimizer_path) : nullptr);
  });
}

void Core::CheckRoomForStates(const OptimizerHandle* added) const {
  if (process_.sharding().offload_optimizer != Offload::kCpu || process_.device().is_cpu()) return;
  // For the other parameters of an optimizer it is not known yet which part this process updates.
  std::unordered_set<const void*> prepared;
  for (const auto& model : registry_.models()) {
    if (model->sharded() != nullptr) {
      for (const at::Tensor& shard : model->sharded()->shards()) {
        prepared.insert(shard.unsafeGetTensorImpl());
      }
      continue;
    }
    for (const auto& [name, parameter] : model->source().parameters()) {
      prepared.insert(parameter.unsafeGetTensorImpl());
    }
  }
  const auto counted = [&](const at::Tensor& parameter) {
    return prepared.count(parameter.unsafeGetTensorImpl()) > 0;
  };
  uint64_t bytes = added == nullptr ? 0 : added->HostBytesToTake(counted);
  for (const auto& optimizer : registry_.optimizers()) {
    bytes += optimizer->handle().HostBytesToTake(counted);
  }
  const int ranks = process_.environment().local_world_size.value;
  OnAll(process_.comm(), "offload the states of its optimizers", [&] {
    // The machine's other processes need about as much memory, at the same time.
    const uint64_t left = MemoryLeft();
    TORCH_CHECK(bytes <= left / ranks, "offload_optimizer to the memory of the host (cpu) needs ",
                bytes, " bytes for the states of the parameters that this process updates, and ",
                "this machine or its cgroup has ", left, " left for ", ranks,
                ranks == 1 ? " process" : " processes",
                ": offload them to a disk, or use more machines");
  });
}

std::shared_ptr<OptimizerSlot> Core::AddOptimizer(std::shared_ptr<OptimizerSlot> slot) {
  checkpoints_.CheckProjectWritable();
  if (steps_.updates() != nullptr) BackwardUpdates::Prepare(*slot);
  OffloadStateOf(slot->handle());
  if (const std::string why = slot->handle().CannotSave(); !why.empty()) {
    MUSTER_LOG(Warning) << "save_state() will fail: " << why;
  }
  GiveShards(*slot);
  CheckRoomForStates(&slot->handle());
  return registry_.AddOptimizer(std::move(slot));
}

std::shared_ptr<OptimizerHandle> Core::MakeOptimizer(std::vector<ConfiguredGroup> groups,
                                                     const OptimizerArguments& arguments) {
  std::shared_ptr<OptimizerHandle> made =
      internal::MakeOptimizer(process_.configured(), std::move(groups), arguments);
  made_optimizers_.push_back(made->id());
  return made;
}

LrSchedulePtr Core::MakeScheduler(const OptimizerHandle& /*optimizer*/,
                                  const SchedulerArguments& arguments) {
  const int64_t ranks = process_.options().data_loader.split_batches ? 1 : process_.size();
  LrSchedulePtr made = internal::MakeScheduler(process_.configured(), arguments, ranks);
  made_schedules_.push_back(made);
  return made;
}

void Core::CheckMade(const OptimizerHandle* optimizer) const {
  if (!process_.configured().optimizer.has_value()) return;
  TORCH_CHECK(
      optimizer != nullptr && std::find(made_optimizers_.begin(), made_optimizers_.end(),
                                        optimizer->id()) != made_optimizers_.end(),
      "the DeepSpeed config has the section \"optimizer\", and the program prepares an optimizer "
      "of its own: create it with accelerator.make_optimizer(parameters), or remove the section");
}

void Core::CheckMade(const std::vector<LrSchedulePtr>& schedules) const {
  if (!process_.configured().scheduler.has_value()) return;
  const auto made = [this](const LrSchedulePtr& schedule) {
    return std::any_of(made_schedules_.begin(), made_schedules_.end(),
                       [&](const auto& weak) { return weak.lock() == schedule; });
  };
  TORCH_CHECK(
      !schedules.empty() && std::all_of(schedules.begin(), schedules.end(), made),
      "the DeepSpeed config has the section \"scheduler\", and the program prepares a schedule of "
      "its own: create it with accelerator.make_scheduler(optimizer), or remove the section");
}

std::shared_ptr<OptimizerSlot> Core::PrepareOptimizer(torch::optim::Optimizer& optimizer,
                                                      std::shared_ptr<void> keep) {
  std::shared_ptr<OptimizerSlot> slot = registry_.FindOptimizer(
      &optimizer, [&](const OptimizerSlot& known) { return known.handle().Wraps(optimizer); });
  if (slot == nullptr) {
    CheckMade(nullptr);
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
    CheckMade(&optimizer);
    slot = AddOptimizer(
        std::make_shared<OptimizerSlot>(&steps_, &optimizer, nullptr, &optimizer, optimizer.id()));
  }
  if (keep != nullptr) slot->Keep(std::move(keep));
  return slot;
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    LrSchedulePtr schedule, const std::shared_ptr<OptimizerSlot>& optimizer) {
  TORCH_CHECK(schedule != nullptr, "prepare() got an empty schedule");
  CheckMade(std::vector<LrSchedulePtr>{schedule});
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
  CheckMade(schedules);
  return registry_.AddSchedule(
      std::make_shared<SchedulerSlot>(
          &steps_, SchedulerSlot::Make([schedules = std::move(schedules)](OptimizerHandle& handle) {
            return std::make_unique<LrScheduler>(handle, schedules);
          })),
      optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    const PlateauSchedule& schedule, const std::shared_ptr<OptimizerSlot>& optimizer) {
  CheckMade(std::vector<LrSchedulePtr>());
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
  CheckMade(std::vector<LrSchedulePtr>());
  const SchedulerSlot::Make make = [&schedule](OptimizerHandle& handle) {
    return WrapTorchScheduler(schedule, handle);
  };
  return registry_.AddSchedule(
      std::make_shared<SchedulerSlot>(&steps_, make, &schedule, std::move(keep)), optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    torch::optim::ReduceLROnPlateauScheduler& schedule, std::shared_ptr<void> keep,
    const std::shared_ptr<OptimizerSlot>& optimizer) {
  CheckMade(std::vector<LrSchedulePtr>());
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
  registry_.AddLoader(std::move(loader), loops_.open_epoch());
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
