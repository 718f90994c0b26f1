// Core: what prepare() is given, and what becomes of it.
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <unordered_set>

#include "ATen/Context.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/log.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "muster/internal/loops.h"
#include "worker/parallel/sync_batch_norm.h"
#include "worker/train/guard.h"
#include "worker/train/torch_optimizer.h"
#include "worker/train/torch_scheduler.h"

namespace muster::internal {

PrepareCall::PrepareCall(Core* core) : core_(core), exceptions_(std::uncaught_exceptions()) {
  if (core_->prepare_depth_++ == 0) {
    core_->call_optimizers_.clear();
    core_->call_schedulers_.clear();
    core_->ForgetUnheld();
  }
}

PrepareCall::~PrepareCall() noexcept(false) {
  if (--core_->prepare_depth_ > 0) return;
  const auto schedulers = std::move(core_->call_schedulers_);
  const auto optimizers = std::move(core_->call_optimizers_);
  core_->call_schedulers_.clear();
  core_->call_optimizers_.clear();
  if (schedulers.empty()) return;
  const auto& candidates = optimizers.empty() ? core_->optimizers_ : optimizers;
  const bool failed = std::uncaught_exceptions() > exceptions_;
  if (failed || candidates.size() != 1) {
    // Refused schedules must not stay behind without an optimizer.
    std::erase_if(core_->schedulers_, [&](const std::shared_ptr<SchedulerSlot>& slot) {
      return std::find(schedulers.begin(), schedulers.end(), slot) != schedulers.end();
    });
  }
  if (failed) return;
  TORCH_CHECK(candidates.size() == 1, "prepare() got a schedule and ", candidates.size(),
              " optimizers: pass the schedule in one call with its optimizer, or use "
              "prepare_scheduler(optimizer, schedule)");
  for (const auto& scheduler : schedulers) scheduler->Bind(candidates.front());
}

// Slots: who is remembered, and until when.

void Core::ForgetUnheld() {
  // In the middle of a window gradients are on their way to a step.
  if (in_micro_step_ || !accumulation_.at_boundary()) return;
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

void Core::ForgetOptimizer(const OptimizerSlot* slot) {
  // Its step ends with the optimizers that are left.
  if (scaler_ != nullptr) {
    if (scaler_->pending()) scaler_->Update();
    scaler_->Reset();
    scaler_steps_ = 0;
  }
  std::erase_if(optimizers_, [&](const auto& other) { return other.get() == slot; });
}

std::shared_ptr<ModelSlot> Core::PrepareModel(std::unique_ptr<ModelSource> source,
                                              bool evaluation) {
  TORCH_CHECK(source->identity() != nullptr,
              "prepare() got an empty module: construct the module first");
  for (const auto& slot : models_) {
    if (slot->source().identity() != source->identity()) continue;
    TORCH_CHECK(slot->evaluation() == evaluation, "this model is prepared already, for ",
                slot->evaluation() ? "evaluation" : "training",
                ": prepare it once, with the evaluation_mode you need");
    return slot;
  }
  models_.push_back(std::make_shared<ModelSlot>(this, std::move(source), evaluation));
  ++models_version_;
  return models_.back();
}

std::shared_ptr<OptimizerSlot> Core::AddOptimizer(std::shared_ptr<OptimizerSlot> slot) {
  CheckProjectWritable();
  if (const std::string why = slot->handle().CannotSave(); !why.empty()) {
    MUSTER_LOG(Warning) << "save_state() is going to fail: " << why;
  }
  optimizers_.push_back(slot);
  call_optimizers_.push_back(slot);
  return slot;
}

std::shared_ptr<OptimizerSlot> Core::Find(const void* source,
                                          absl::FunctionRef<bool(const OptimizerSlot&)> is_same) {
  for (const auto& slot : optimizers_) {
    if (slot->source_ != source) continue;
    if (is_same(*slot)) {
      call_optimizers_.push_back(slot);
      return slot;
    }
    // The address alone proves nothing: the optimizer of the fold before was there.
    const std::shared_ptr<OptimizerSlot> stale = slot;
    std::erase_if(schedulers_, [&](const auto& s) { return s->optimizer_ == stale; });
    ForgetOptimizer(stale.get());
    return nullptr;
  }
  return nullptr;
}

std::shared_ptr<OptimizerSlot> Core::PrepareOptimizer(torch::optim::Optimizer& optimizer,
                                                      std::shared_ptr<void> keep) {
  std::shared_ptr<OptimizerSlot> slot =
      Find(&optimizer, [&](const OptimizerSlot& known) { return known.handle_->Wraps(optimizer); });
  if (slot == nullptr) {
    std::unique_ptr<OptimizerHandle> handle = WrapTorchOptimizer(optimizer);
    OptimizerHandle* const borrowed = handle.get();
    slot = AddOptimizer(std::make_shared<OptimizerSlot>(this, borrowed, std::move(handle)));
    slot->source_ = &optimizer;
  }
  if (keep != nullptr) slot->keep_ = std::move(keep);
  return slot;
}

std::shared_ptr<OptimizerSlot> Core::PrepareOptimizer(OptimizerHandle& optimizer,
                                                      std::shared_ptr<void> keep) {
  std::shared_ptr<OptimizerSlot> slot = Find(
      &optimizer, [&](const OptimizerSlot& known) { return known.source_id_ == optimizer.id(); });
  if (slot == nullptr) {
    slot = AddOptimizer(std::make_shared<OptimizerSlot>(this, &optimizer, nullptr));
    slot->source_ = &optimizer;
    slot->source_id_ = optimizer.id();
  }
  if (keep != nullptr) slot->keep_ = std::move(keep);
  return slot;
}

std::shared_ptr<SchedulerSlot> Core::AddSchedule(std::shared_ptr<SchedulerSlot> slot,
                                                 const std::shared_ptr<OptimizerSlot>& optimizer) {
  // LibTorch's schedules have no identity but their address: the last one prepared there counts.
  if (slot->source_ != nullptr) {
    std::erase_if(schedulers_, [&](const auto& other) { return other->source_ == slot->source_; });
  }
  if (optimizer == nullptr) {
    TORCH_CHECK(prepare_depth_ > 0, "a schedule needs an optimizer: prepare both in one call");
    schedulers_.push_back(slot);
    call_schedulers_.push_back(std::move(slot));
    return schedulers_.back();
  }
  // The handle's pointer keeps this object alive; held in here it would do so for ever.
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

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    LrSchedulePtr schedule, const std::shared_ptr<OptimizerSlot>& optimizer) {
  TORCH_CHECK(schedule != nullptr, "prepare() got an empty schedule");
  return AddSchedule(std::make_shared<SchedulerSlot>(
                         this, SchedulerSlot::Make([schedule](OptimizerHandle& handle) {
                           return std::make_unique<LrScheduler>(handle, schedule);
                         })),
                     optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    std::vector<LrSchedulePtr> schedules, const std::shared_ptr<OptimizerSlot>& optimizer) {
  for (const LrSchedulePtr& schedule : schedules) {
    TORCH_CHECK(schedule != nullptr, "prepare() got an empty schedule in a list of schedules");
  }
  return AddSchedule(
      std::make_shared<SchedulerSlot>(
          this, SchedulerSlot::Make([schedules = std::move(schedules)](OptimizerHandle& handle) {
            return std::make_unique<LrScheduler>(handle, schedules);
          })),
      optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    const PlateauSchedule& schedule, const std::shared_ptr<OptimizerSlot>& optimizer) {
  return AddSchedule(std::make_shared<SchedulerSlot>(
                         this, SchedulerSlot::MakePlateau([schedule](OptimizerHandle& handle) {
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
  return AddSchedule(std::make_shared<SchedulerSlot>(this, make, &schedule, std::move(keep)),
                     optimizer);
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(
    torch::optim::ReduceLROnPlateauScheduler& schedule, std::shared_ptr<void> keep,
    const std::shared_ptr<OptimizerSlot>& optimizer) {
  const SchedulerSlot::MakePlateau make = [&schedule](OptimizerHandle& handle) {
    return WrapTorchPlateau(schedule, handle);
  };
  return AddSchedule(std::make_shared<SchedulerSlot>(this, make, &schedule, std::move(keep)),
                     optimizer);
}

LoaderOptions Core::loader_options() const {
  LoaderOptions loader;
  loader.split_batches = options_.data_loader.split_batches;
  loader.even_batches = options_.data_loader.even_batches;
  loader.dispatch_batches = options_.data_loader.dispatch_batches;
  loader.data_seed = options_.data_loader.data_seed;
  loader.use_seedable_sampler = options_.data_loader.use_seedable_sampler;
  loader.non_blocking = options_.data_loader.non_blocking;
  if (options_.device_placement) loader.device = device_;
  return loader;
}

std::shared_ptr<LoaderObserver> Core::loader_observer() { return observer_; }

void Core::RegisterLoader(std::shared_ptr<LoaderStateHandle> loader) {
  for (auto& known : loaders_) {
    // Held by nobody but this object, so its loop is over and it cannot begin another one.
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
  finished_passes_.resize(std::max(finished_passes_.size(), loaders_.size()));
  passes_per_epoch_.resize(std::max(passes_per_epoch_.size(), loaders_.size()));
}

void Core::CheckProjectWritable(bool always) {
  // A program that names no folder may never save.
  if (project_checked_ || (!always && environment().project_dir.value.empty())) return;
  project_checked_ = true;
  std::string error;
  if (rank() == 0) {
    const std::string folder = ProjectDirectory();
    absl::Status made = MakeDirectories(folder);
    if (made.ok() && access(folder.c_str(), W_OK | X_OK) != 0) {
      made = absl::PermissionDeniedError(absl::StrCat(folder, " is not writable"));
    }
    if (!made.ok()) {
      error = absl::StrCat("the project folder cannot hold checkpoints: ", made.message(),
                           "; name another one (MUSTER_PROJECT_DIR, or options.project.directory)");
    }
  }
  if (size() > 1) error = comm().BroadcastBytes(error, 0);
  if (!error.empty()) ThrowIfError(absl::PermissionDeniedError(error));
}

void Core::FreeMemory() {
  models_.clear();
  ++models_version_;
  optimizers_.clear();
  schedulers_.clear();
  loaders_.clear();
  pending_loaders_.clear();
  finished_passes_.clear();
  passes_per_epoch_.clear();
  passes_to_skip_.clear();
  accumulation_ = Accumulation(accumulation_.options());
  window_factor_.reset();
  window_backwards_ = 0;
  scaler_steps_ = 0;
  if (scaler_ != nullptr) scaler_->Reset();
  if (device_.is_cuda()) at::getDeviceAllocator(c10::kCUDA)->emptyCache();
}

ModelSlot::ModelSlot(Core* core, std::unique_ptr<ModelSource> source, bool evaluation)
    : core_(core), source_(std::move(source)), evaluation_(evaluation) {
  if (core_->options().device_placement) source_->MoveTo(core_->device());
  if (core_->size() == 1 || evaluation) return;
  std::unordered_set<const void*> sparse_parameters;
  if (source_->module() != nullptr) {
    for (const auto& part : source_->module()->modules()) {
      if (auto* norm = part->as<SyncBatchNormImpl>()) norm->Bind(&core_->comm());
    }
    for (const at::Tensor& parameter : SparseParametersOf(*source_->module())) {
      sparse_parameters.insert(parameter.unsafeGetTensorImpl());
    }
  }
  std::vector<at::Tensor> parameters, buffers;
  std::vector<std::string> names;
  std::vector<bool> sparse;
  for (const auto& [name, parameter] : source_->parameters()) {
    names.push_back(name);
    parameters.push_back(parameter);
    sparse.push_back(sparse_parameters.count(parameter.unsafeGetTensorImpl()) > 0);
  }
  for (const auto& [name, buffer] : source_->buffers()) buffers.push_back(buffer);
  if (parameters.empty()) return;
  ddp_ = std::make_unique<DataParallel>(core_->comm(), std::move(parameters), std::move(names),
                                        std::move(buffers), core_->options().data_parallel,
                                        std::move(sparse));
}

ModelSlot::~ModelSlot() = default;

void SchedulerSlot::Bind(std::shared_ptr<OptimizerSlot> optimizer) {
  optimizer_ = std::move(optimizer);
  if (make_plateau_ != nullptr) {
    plateau_ = make_plateau_(optimizer_->handle());
    return;
  }
  scheduler_ = make_(optimizer_->handle());
  gate_ = std::make_unique<PreparedScheduler>(
      *scheduler_, PreparedSchedulerOptions{
                       .step_with_optimizer = core_->options().step_scheduler_with_optimizer,
                       .units = core_->options().scheduler_units,
                       .num_processes = core_->size(),
                       .split_batches = core_->options().data_loader.split_batches,
                       .adjust_scheduler = core_->options().accumulation.adjust_scheduler});
}

void SchedulerSlot::CheckBound() const {
  TORCH_CHECK(optimizer_ != nullptr,
              "this schedule has no optimizer: pass both to one prepare() call");
}

void SchedulerSlot::Step() {
  CheckBound();
  MicroStep step = core_->micro_step();
  step.sync = core_->sync_gradients();
  gate_->Step(step, optimizer_->step_was_skipped());
}

void SchedulerSlot::StepMetric(double metric) {
  CheckBound();
  core_->CheckAllTakePart("step(metric) of a schedule");
  plateau_->Step(core_->MeanOfAll(at::full({1}, metric, at::kDouble)).item<double>());
}

double SchedulerSlot::last_lr() const {
  CheckBound();
  return optimizer_->handle().lr(0);
}
std::vector<double> SchedulerSlot::last_lrs() const {
  CheckBound();
  std::vector<double> rates;
  for (int64_t g = 0; g < optimizer_->handle().num_groups(); ++g) {
    rates.push_back(optimizer_->handle().lr(g));
  }
  return rates;
}
int64_t SchedulerSlot::step_count() const {
  CheckBound();
  return plateau_ != nullptr ? plateau_->step_count() : scheduler_->step_count();
}
PlainState SchedulerSlot::SaveState() const {
  CheckBound();
  return plateau_ != nullptr ? plateau_->SaveState() : scheduler_->SaveState();
}
void SchedulerSlot::LoadState(const PlainState& state) {
  CheckBound();
  if (plateau_ != nullptr) {
    plateau_->LoadState(state);
  } else {
    scheduler_->LoadState(state);
  }
}

}  // namespace muster::internal
