#include "muster/accelerator.h"

#include <unistd.h>

#include <cstdio>
#include <exception>

#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/variable_list.h"
#include "muster/checkpoint.h"
#include "muster/internal/core.h"
#include "muster/internal/elastic_join.h"
#include "muster/internal/full_state.h"
#include "muster/internal/slots.h"
#include "worker/job/agent_tells.h"
#include "worker/job/environment.h"
#include "worker/job/stop_signal.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/guard.h"

namespace muster {

namespace internal {

std::map<std::string, at::Tensor> StateDictOf(
    ModelSlot& model, const std::function<bool(const std::string& name)>& wanted) {
  if (wanted != nullptr) return SomeWeights(model, wanted, model.on_main_process());
  std::map<std::string, at::Tensor> tensors;
  const FullWeights weights(model, model.on_main_process());
  tensors.insert(weights.tensors().begin(), weights.tensors().end());
  return tensors;
}

}  // namespace internal

Accelerator::Accelerator() : Accelerator(Options{}) {}
Accelerator::Accelerator(const Options& options)
    : core_(std::make_shared<internal::Core>(options)) {}
Accelerator::Accelerator(std::shared_ptr<internal::Core> core) : core_(std::move(core)) {}
// Handles keep the core alive, but the job ends with the Accelerator. A process that leaves by an
// exception has not completed its training: the others learn that from its exit.
Accelerator::~Accelerator() {
  if (std::uncaught_exceptions() > 0) {
    core_->FinishTrackers();
  } else {
    try {
      core_->EndTraining();
    } catch (const std::exception& error) {
      // end_training() throws this; a destructor cannot.
      MUSTER_LOG(Error) << error.what();
    }
  }
}

at::Device Accelerator::device() const { return core_->process().device(); }
int Accelerator::num_processes() const { return core_->process().size(); }
int Accelerator::process_index() const { return core_->process().rank(); }
int Accelerator::local_process_index() const { return core_->process().local_rank(); }
const std::string& Accelerator::mixed_precision() const {
  return core_->process().mixed_precision();
}
const Environment& Accelerator::environment() const { return core_->process().environment(); }
std::string Accelerator::project_dir() const { return core_->process().ProjectDirectory(); }
std::string Accelerator::logging_dir() const { return core_->process().LoggingDirectory(); }
const Accelerator::Options& Accelerator::options() const { return core_->process().options(); }
bool Accelerator::sync_gradients() const { return core_->steps().sync_gradients(); }
int64_t Accelerator::gradient_accumulation_steps() const {
  return core_->steps().gradient_accumulation_steps();
}
void Accelerator::set_gradient_accumulation_steps(int64_t steps) {
  core_->steps().set_gradient_accumulation_steps(steps);
}
std::shared_ptr<OptimizerHandle> Accelerator::make_optimizer(std::vector<at::Tensor> parameters,
                                                             const OptimizerArguments& arguments) {
  std::vector<ConfiguredGroup> groups(1);
  groups[0].params = std::move(parameters);
  return core_->MakeOptimizer(std::move(groups), arguments);
}
std::shared_ptr<OptimizerHandle> Accelerator::make_optimizer(std::vector<ConfiguredGroup> groups,
                                                             const OptimizerArguments& arguments) {
  return core_->MakeOptimizer(std::move(groups), arguments);
}
LrSchedulePtr Accelerator::make_scheduler(const OptimizerHandle& optimizer,
                                          const SchedulerArguments& arguments) {
  return core_->MakeScheduler(optimizer, arguments);
}
void Accelerator::backward(const at::Tensor& loss) { core_->steps().Backward(loss); }
void Accelerator::backward(const at::Tensor& loss, const BackwardOptions& how) {
  core_->steps().Backward(loss, std::nullopt, how);
}
void Accelerator::backward(const at::Tensor& loss, double weight) {
  core_->steps().Backward(loss, weight);
}
at::Tensor Accelerator::clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                                        double norm_type) {
  return core_->steps().ClipGradNorm(parameters, max_norm, norm_type);
}
void Accelerator::clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value) {
  core_->steps().ClipGradValue(parameters, clip_value);
}
void Accelerator::unscale_gradients() { core_->steps().FinishGradients(); }
void Accelerator::unscale_gradients(AcceleratedOptimizer& optimizer) {
  core_->steps().FinishGradients(optimizer.slot().get());
}
bool Accelerator::optimizer_step_was_skipped() const {
  return core_->steps().optimizer_step_was_skipped();
}
AutocastGuard Accelerator::autocast() { return core_->process().Autocast(options().autocast); }
AutocastGuard Accelerator::autocast(const AutocastOptions& autocast_options) {
  return core_->process().Autocast(autocast_options);
}
Subgroup Accelerator::new_group(const std::vector<int>& process_indices) {
  // The group may outlive the Accelerator, which the program is asked to keep.
  const auto check = [core = std::weak_ptr<internal::Core>(core_)](const char* call) {
    if (const auto alive = core.lock()) alive->steps().CheckAllTakePart(call);
  };
  return Subgroup(core_->NewGroup(process_indices), check);
}
void Accelerator::wait_for_everyone(absl::Duration timeout, const std::string& name,
                                    std::source_location where) {
  core_->WaitForEveryone(timeout, name, where);
}
void Accelerator::set_trigger() { core_->SetTrigger(); }
bool Accelerator::check_trigger() { return core_->CheckTrigger(); }
std::optional<Trigger> Accelerator::check_trigger(const std::string& name) {
  return core_->triggers("check_trigger(name)").Check(name, core_->trigger_step());
}
absl::Status Accelerator::set_trigger(const std::string& name, const std::string& payload) {
  return core_->triggers().Raise(name, payload);
}
bool Accelerator::should_stop() {
  return core_->triggers("should_stop()").ShouldStop(core_->trigger_step());
}
const std::string& Accelerator::last_checkpoint() const {
  return core_->checkpoints().last_checkpoint();
}
int64_t Accelerator::save_iteration() const { return core_->checkpoints().save_iteration(); }
HookHandle Accelerator::register_for_checkpointing(std::function<PlainState()> save,
                                                   std::function<void(const PlainState&)> load) {
  return HandleOf({core_->checkpoints().objects().Register(std::move(save), std::move(load))});
}
HookHandle Accelerator::register_save_state_pre_hook(SaveStateHook hook) {
  return HandleOf({core_->checkpoints().objects().AddSaveHook(std::move(hook))});
}
HookHandle Accelerator::register_load_state_pre_hook(LoadStateHook hook) {
  return HandleOf({core_->checkpoints().objects().AddLoadHook(std::move(hook))});
}
int64_t Accelerator::global_step() const { return core_->registry().global_step(); }
void Accelerator::free_memory() { core_->FreeMemory(); }
void Accelerator::end_training() { core_->EndTraining(); }
absl::Status Accelerator::init_trackers(const std::string& project_name,
                                        const TrackerValues& config,
                                        const std::vector<std::string>& kinds,
                                        std::vector<std::unique_ptr<GeneralTracker>> own) {
  return core_->InitTrackers(project_name, config, kinds, std::move(own));
}
void Accelerator::log(TrackerValues values, std::optional<int64_t> step) {
  core_->Log(std::move(values), step);
}
Comm& Accelerator::comm() { return core_->process().comm(); }

template <class Slot>
std::shared_ptr<Slot> Accelerator::Keep(std::shared_ptr<Slot> slot) const {
  Slot* const raw = slot.get();
  auto both = std::make_shared<std::pair<std::shared_ptr<internal::Core>, std::shared_ptr<Slot>>>(
      core_, std::move(slot));
  return std::shared_ptr<Slot>(std::move(both), raw);
}

Comm& Accelerator::CommFor(const char* call) {
  core_->steps().CheckAllTakePart(call);
  return core_->process().comm();
}
const BatchInfo* Accelerator::BatchOfMetrics() const { return core_->BatchOfMetrics(); }
internal::AccumulateScope Accelerator::Accumulate(const BatchInfo& info) {
  core_->loops().NoteDecides(info.iteration);
  return core_->steps().Accumulate(info);
}
int64_t Accelerator::Register(std::function<StateDict()> save,
                              std::function<void(const StateDict&)> load,
                              std::shared_ptr<internal::DividedObject> divided,
                              std::optional<std::weak_ptr<const void>> lifetime) {
  return core_->checkpoints().objects().Register(std::move(save), std::move(load),
                                                 std::move(divided), std::move(lifetime));
}
void Accelerator::Summon(internal::ModelSlot& model, const std::function<void()>& body) {
  core_->steps().CheckAllTakePart("summon_full_params()");
  if (model.sharded() == nullptr) return body();
  // A nested call: the outer one has announced the change.
  if (!model.sharded()->summoned()) core_->steps().AboutToChange(&model);
  model.sharded()->Summon(body);
}
absl::Status Accelerator::SaveModel(internal::ModelSlot& model, const std::string& directory,
                                    const std::string& max_shard_size) {
  return core_->checkpoints().SaveModel(model, directory, max_shard_size);
}

std::shared_ptr<internal::ModelSlot> Accelerator::PrepareSlot(
    std::unique_ptr<internal::ModelSource> model, bool evaluation) {
  return Keep(core_->PrepareModel(std::move(model), evaluation));
}
Accelerator::OptimizerSlotPtr Accelerator::PrepareSlot(torch::optim::Optimizer& optimizer,
                                                       std::shared_ptr<void> keep) {
  return Keep(core_->PrepareOptimizer(optimizer, std::move(keep)));
}
Accelerator::OptimizerSlotPtr Accelerator::PrepareSlot(OptimizerHandle& optimizer,
                                                       std::shared_ptr<void> keep) {
  return Keep(core_->PrepareOptimizer(optimizer, std::move(keep)));
}
Accelerator::SchedulerSlotPtr Accelerator::PrepareSlot(LrSchedulePtr schedule,
                                                       const OptimizerSlotPtr& optimizer) {
  return Keep(core_->PrepareSchedule(std::move(schedule), optimizer));
}
Accelerator::SchedulerSlotPtr Accelerator::PrepareSlot(std::vector<LrSchedulePtr> schedules,
                                                       const OptimizerSlotPtr& optimizer) {
  return Keep(core_->PrepareSchedule(std::move(schedules), optimizer));
}
Accelerator::SchedulerSlotPtr Accelerator::PrepareSlot(const PlateauSchedule& schedule,
                                                       const OptimizerSlotPtr& optimizer) {
  return Keep(core_->PrepareSchedule(schedule, optimizer));
}
Accelerator::SchedulerSlotPtr Accelerator::PrepareSlot(torch::optim::LRScheduler& schedule,
                                                       std::shared_ptr<void> keep,
                                                       const OptimizerSlotPtr& optimizer) {
  return Keep(core_->PrepareSchedule(schedule, std::move(keep), optimizer));
}
Accelerator::SchedulerSlotPtr Accelerator::PrepareSlot(
    torch::optim::ReduceLROnPlateauScheduler& schedule, std::shared_ptr<void> keep,
    const OptimizerSlotPtr& optimizer) {
  return Keep(core_->PrepareSchedule(schedule, std::move(keep), optimizer));
}
LoaderOptions Accelerator::loader_options() const { return core_->loader_options(); }
std::shared_ptr<LoaderObserver> Accelerator::loader_observer() const {
  return core_->loops().observer();
}
void Accelerator::RegisterLoader(std::shared_ptr<LoaderStateHandle> loader) {
  core_->RegisterLoader(std::move(loader));
}

internal::AccumulateScope Accelerator::accumulate() { return core_->steps().Accumulate(); }

void Accelerator::print(const char* format, ...) {
  if (!is_local_main_process()) return;
  va_list arguments;
  va_start(arguments, format);
  std::vprintf(format, arguments);
  va_end(arguments);
  std::fflush(stdout);
}

absl::Status Accelerator::save_state(const std::string& directory) {
  return core_->checkpoints().Save(directory);
}
std::optional<RunningSave> Accelerator::save_progress() const {
  return core_->process().joined().saves->Read();
}
absl::Status Accelerator::wait_for_checkpoint() { return core_->checkpoints().WaitForAll(); }
absl::Status Accelerator::load_state(const std::string& directory) {
  return core_->checkpoints().Load(directory, /*may_be_missing=*/false);
}
absl::Status Accelerator::load_state_if_present(const std::string& directory) {
  return core_->checkpoints().Load(directory, /*may_be_missing=*/true);
}

absl::StatusOr<LoadedState> Accelerator::load_weights(const std::string& directory,
                                                      const LoadWeightsOptions& options) {
  return core_->checkpoints().LoadWeights(directory, options);
}

absl::Status Accelerator::save(const std::map<std::string, at::Tensor>& tensors,
                               const std::string& path) {
  const bool on_each_node = core_->process().own_node().has_value();
  return is_main_process() || (on_each_node && is_local_main_process()) ? SaveTensors(path, tensors)
                                                                        : absl::OkStatus();
}

HookHandle Accelerator::HandleOf(std::vector<int64_t> numbers) {
  return HookHandle([core = std::weak_ptr<internal::Core>(core_), numbers = std::move(numbers)] {
    const auto alive = core.lock();
    if (alive == nullptr) return;
    for (const int64_t number : numbers) alive->checkpoints().objects().Remove(number);
  });
}

absl::StatusOr<GeneralTracker*> Accelerator::get_tracker(const std::string& name) {
  if (core_->trackers() == nullptr) {
    return absl::FailedPreconditionError(
        "get_tracker(): there are no trackers yet; call init_trackers() first");
  }
  return core_->trackers()->Get(name);
}

Progress Accelerator::progress(int64_t total, const std::string& description) {
  return Progress(OptionsOfBar(total, description));
}

ProgressOptions Accelerator::OptionsOfBar(int64_t total, const std::string& description) const {
  ProgressOptions options;
  options.description = description;
  options.total = total;
  options.enabled = is_local_main_process();
  return options;
}

Profile Accelerator::profile(const std::string& output_dir) {
  ProfileOptions options;
  options.output_dir = output_dir;
  return profile(std::move(options));
}

Profile Accelerator::profile(ProfileOptions options) {
  options.rank = process_index();
  options.cuda = device().is_cuda();
  return Profile(std::move(options));
}

namespace {

// How long a process that failed because of another one waits to be stopped by its agent, which
// takes milliseconds.
constexpr absl::Duration kStopPatience = absl::Seconds(30);

// If no handler notes SIGTERM, the signal ends the process during this wait.
bool WaitForStop(absl::Duration timeout) {
  const absl::Time give_up = Clock::Real().Now() + timeout;
  while (!StopSignal::Received()) {
    if (Clock::Real().Now() >= give_up) return false;
    Notification().WaitForNotificationWithTimeout(absl::Milliseconds(10));
  }
  return true;
}

}  // namespace

int internal::Run(int argc, char** argv, const AcceleratorOptions& options, bool elastic,
                  const std::function<absl::Status(Accelerator&, const Arguments&)>& train) {
  const Arguments arguments(argv + std::min(argc, 1), argv + argc);
  std::string who = absl::StrCat("pid ", getpid());
  bool told = false;
  const absl::Status status = Guard([&] {
    ElasticJoin generations(options, elastic);
    const std::string pid = who;
    for (bool again = true; again;) {
      Accelerator accelerator(generations.Join());
      if (accelerator.use_distributed()) {
        who = absl::StrCat("rank ", accelerator.process_index(), " (", pid, ")");
      }
      const absl::Status trained = Guard([&] {
        ThrowIfError(train(accelerator, arguments));
        if (elastic) {
          // Without waiting for what all processes report of the last save in memory: some may end
          // much later.
          ThrowIfError(accelerator.core().checkpoints().Wait());
          generations.Finished();
        }
        accelerator.end_training();
      });
      again = generations.Leaves(accelerator.core(), trained);
      if (again) continue;
      // While this process is still connected to the others.
      const absl::Status named = accelerator.core().NameCulprit(trained);
      told = AgentTells(named, ProcessVariables());
      ThrowIfError(named);
    }
  });
  std::fflush(stdout);
  if (status.ok()) return 0;
  // The agent knows which process failed first, and stops the others. A process that exits before
  // that might be taken for the culprit.
  if (told && WaitForStop(kStopPatience)) return 1;
  const absl::string_view program = argc > 0 ? argv[0] : "muster";
  // An exception of the program or of a check has no code, only a message.
  const std::string what = absl::IsInternal(status) && !status.message().empty()
                               ? std::string(status.message())
                               : status.ToString();
  std::fprintf(stderr, "%s: %s: %s\n", std::string(program.substr(program.rfind('/') + 1)).c_str(),
               who.c_str(), what.c_str());
  return 1;
}

}  // namespace muster
