#include "muster/internal/core.h"

#include <algorithm>
#include <cmath>
#include <exception>
#include <limits>
#include <unordered_set>

#include "ATen/Context.h"
#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "base/failpoint.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "c10/core/CachingDeviceAllocator.h"
#include "worker/metrics/gather_for_metrics.h"
#include "worker/process/collectives.h"
#include "worker/process/coordinator_client.h"
#include "worker/process/nested_collectives.h"
#include "worker/train/clip.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"
#include "worker/train/sync_state.h"
#include "worker/train/torch_optimizer.h"

namespace muster::internal {
namespace {

JoinedProcess Join(const AcceleratorOptions& options) {
  EnvironmentArguments arguments;
  arguments.mixed_precision = options.mixed_precision;
  arguments.use_cpu = options.cpu;
  arguments.gradient_accumulation_steps = options.gradient_accumulation_steps;
  arguments.debug = options.debug;
  if (!options.project.directory.empty()) arguments.project_dir = options.project.directory;
  arguments.timeout = options.timeout;
  const absl::StatusOr<Environment> environment = ReadEnvironment(ProcessVariables(), arguments);
  ThrowIfError(environment.status());
  JoinJobOptions join;
  join.on_generation_ended = [](const absl::Status& why) {
    MUSTER_LOG(Error) << "this generation of the job is over: " << why.message();
  };
  absl::StatusOr<JoinedProcess> process = JoinJob(*environment, join);
  ThrowIfError(process.status());
  if (process->comm->size() > 1) SetLogIdentity(absl::StrCat("rank ", process->comm->rank()));
  return *std::move(process);
}

// The number of steps a single process's scheduler would have made.
int64_t NumSteps(const AcceleratorOptions& options, const Environment& environment) {
  const int64_t steps = environment.gradient_accumulation_steps.value;
  // The plug-in's own num_steps counts where neither an argument nor a variable says anything.
  if (environment.gradient_accumulation_steps.is_default() && options.accumulation.num_steps != 1) {
    return options.accumulation.num_steps;
  }
  return steps;
}

AccumulationOptions WithSteps(AccumulationOptions options, int64_t steps) {
  options.num_steps = steps;
  return options;
}

}  // namespace

// Keeps the stack of live loops as loaders tell of their batches.
class Core::Observer : public LoaderObserver {
 public:
  explicit Observer(Core* core) : core_(core) {}
  void OnStart() override {
    if (core_ != nullptr) core_->SynchronizeRngTypes();
  }
  void OnBatch(uint64_t iteration, const BatchInfo& info) override {
    if (core_ == nullptr) return;
    ++core_->batches_;
    for (LiveLoop& loop : core_->live_) {
      if (loop.id == iteration) {
        loop.info = info;
        return;
      }
    }
    core_->live_.push_back({iteration, info});
  }
  void OnEnd(uint64_t iteration) override {
    if (core_ == nullptr) return;
    for (const LiveLoop& loop : core_->live_) {
      if (loop.id == iteration && loop.trained && !loop.info.is_last) core_->interrupted_ = true;
    }
    std::erase_if(core_->live_, [&](const LiveLoop& loop) { return loop.id == iteration; });
  }
  // Loaders may outlive the Accelerator.
  void Forget() { core_ = nullptr; }

 private:
  Core* core_;
};

// Core: construction and state.

Core::Core(const AcceleratorOptions& options) : Core(options, Join(options)) {}

Core::Core(const AcceleratorOptions& options, JoinedProcess process)
    : options_(options),
      process_(std::move(process)),
      device_(process_.device),
      precision_(ParseMixedPrecision(process_.environment.mixed_precision.value)),
      observer_(std::make_shared<Observer>(this)),
      triggers_(std::make_unique<JobTriggers>(
          process_.coordinator, process_.comm.get(),
          JobTriggers::Options{.stop_on_sigterm = options.stop_on_sigterm})),
      accumulation_(WithSteps(options.accumulation, NumSteps(options, process_.environment))) {
  CheckMixedPrecision(precision_, device_.type());
  for (const std::string& type : options.rng_types) {
    TORCH_CHECK(type == "generator" || type == "torch" || type == "cuda", "rng_types: unknown \"",
                type, "\"; use generator, torch or cuda");
  }
  if (NeedsGradScaler(precision_) && options.grad_scaler.enabled) {
    scaler_ = std::make_unique<GradScaler>(options.grad_scaler);
  }
  if (size() == 1) return;
  // Ranks that step at different times would wait for each other in vain, or mix their gradients.
  const std::vector<std::string> all = comm().AllGatherBytes(
      absl::StrCat("mixed_precision=", mixed_precision(),
                   " gradient_accumulation_steps=", gradient_accumulation_steps()));
  for (size_t r = 1; r < all.size(); ++r) {
    TORCH_CHECK(all[r] == all[0], "rank ", r, " has ", all[r], " and rank 0 has ", all[0],
                ": give all processes of a job the same settings");
  }
}

Core::~Core() {
  observer_->Forget();
  FinishTrackers();
}

// prepare.

Core::PrepareCall::PrepareCall(Core* core) : core_(core), exceptions_(std::uncaught_exceptions()) {
  if (core_->prepare_depth_++ == 0) {
    core_->call_optimizers_.clear();
    core_->call_schedulers_.clear();
  }
}

Core::PrepareCall::~PrepareCall() noexcept(false) {
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

std::shared_ptr<ModelSlot> Core::PrepareModel(std::shared_ptr<torch::nn::Module> module,
                                              bool evaluation) {
  TORCH_CHECK(module != nullptr,
              "prepare() got an empty module holder: construct the module first");
  for (const auto& slot : models_) {
    if (slot->shared_module() == module) return slot;
  }
  models_.push_back(std::make_shared<ModelSlot>(this, std::move(module), evaluation));
  return models_.back();
}

std::shared_ptr<OptimizerSlot> Core::PrepareOptimizer(torch::optim::Optimizer& optimizer) {
  for (const auto& slot : optimizers_) {
    if (slot->source_ == &optimizer) {
      call_optimizers_.push_back(slot);
      return slot;
    }
  }
  std::unique_ptr<OptimizerHandle> handle = WrapTorchOptimizer(optimizer);
  OptimizerHandle* const borrowed = handle.get();
  auto slot = std::make_shared<OptimizerSlot>(this, borrowed, std::move(handle));
  slot->source_ = &optimizer;
  optimizers_.push_back(slot);
  call_optimizers_.push_back(slot);
  return slot;
}

std::shared_ptr<OptimizerSlot> Core::PrepareOptimizer(OptimizerHandle& optimizer) {
  for (const auto& slot : optimizers_) {
    if (&slot->handle() == &optimizer) {
      call_optimizers_.push_back(slot);
      return slot;
    }
  }
  auto slot = std::make_shared<OptimizerSlot>(this, &optimizer, nullptr);
  optimizers_.push_back(slot);
  call_optimizers_.push_back(slot);
  return slot;
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(LrSchedulePtr schedule) {
  TORCH_CHECK(schedule != nullptr, "prepare() got an empty schedule");
  schedulers_.push_back(std::make_shared<SchedulerSlot>(this, std::move(schedule)));
  call_schedulers_.push_back(schedulers_.back());
  return schedulers_.back();
}

std::shared_ptr<SchedulerSlot> Core::PrepareSchedule(LrSchedulePtr schedule,
                                                     std::shared_ptr<OptimizerSlot> optimizer) {
  TORCH_CHECK(schedule != nullptr, "prepare_scheduler() got an empty schedule");
  // The handle's pointer keeps this object alive; held in here it would do so for ever.
  for (const auto& slot : optimizers_) {
    if (slot.get() != optimizer.get()) continue;
    schedulers_.push_back(std::make_shared<SchedulerSlot>(this, std::move(schedule)));
    schedulers_.back()->Bind(slot);
    return schedulers_.back();
  }
  TORCH_CHECK(false,
              "prepare_scheduler() got an optimizer that this Accelerator did not prepare, or has "
              "forgotten since in free_memory()");
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

// The step.

AccumulateScope Core::Accumulate() {
  const BatchInfo* batch = current_batch();
  if (batch != nullptr) return Accumulate(*batch);
  return Accumulate(std::optional<BatchFacts>());
}

AccumulateScope Core::Accumulate(const BatchInfo& info) {
  return Accumulate(BatchFacts{.is_last = info.is_last, .batches_left = info.batches_left});
}

AccumulateScope Core::Accumulate(const std::optional<BatchFacts>& facts) {
  TORCH_CHECK(!in_micro_step_,
              "accumulate() inside of accumulate(): the scope of the micro-step before is still "
              "alive; end it before the next one begins");
  if (accumulation_.at_boundary()) BeginWindow();
  if (join_ == nullptr) {
    accumulation_.Begin(facts);
  } else {
    const UnevenInputs::Decision decision =
        join_->MicroStep(accumulation_.WouldSync(facts), accumulation_.options().sync_each_batch);
    accumulation_.Begin(facts, decision.sync);
    join_factor_ = decision.gradient_factor;
  }
  in_micro_step_ = true;
  progress().SetPhase("forward");
  if (!live_.empty()) live_.back().trained = true;
  return AccumulateScope(this);
}

void Core::BeginWindow() {
  window_factor_.reset();
  if (scaler_ != nullptr && scaler_->pending()) scaler_->Update();
  scaler_steps_ = 0;
  for (const auto& optimizer : optimizers_) optimizer->gradients_finished_ = false;
}

void Core::EndMicroStep() {
  in_micro_step_ = false;
  progress().SetPhase("between steps");
}

void Core::Backward(const at::Tensor& loss, std::optional<double> weight) {
  TORCH_CHECK(loss.defined(), "backward() got an undefined loss");
  TORCH_CHECK(loss.numel() == 1, "backward() needs a loss of one element, got shape ", loss.sizes(),
              ": reduce it to its mean or sum first");
  TORCH_CHECK(
      loss.requires_grad(),
      "backward() got a loss that depends on no parameter: was it computed under NoGradGuard?");
  TORCH_CHECK(
      scaler_ == nullptr || !optimizers_.empty(),
      "backward() under fp16 without a prepared optimizer: nobody would take the loss scale "
      "out of the gradients again; pass the optimizer to prepare()");
  TORCH_CHECK(
      !in_micro_step_ || gradient_accumulation_steps() == 1 || models_.empty() ||
          !optimizers_.empty(),
      "backward() in accumulate() with gradient_accumulation_steps=", gradient_accumulation_steps(),
      " and no prepared optimizer: one that is not prepared does not wait for the end of "
      "the window; pass it to prepare()");
  TORCH_CHECK(
      join_ == nullptr || !weight.has_value(),
      "weighted losses inside join_uneven_inputs() would need an exchange that processes without "
      "batches do not take part in: use one or the other");
  if (options_.check_finite_loss) {
    const double value = loss.item<double>();
    // Agreed over all ranks, so that no rank goes on into a collective that the others have left.
    at::Tensor bad = at::full({size()}, 0, at::kDouble);
    if (!std::isfinite(value)) bad[rank()] = 1;
    // Processes that ran out of batches take no part in this exchange.
    if (size() > 1 && join_ == nullptr) {
      bad = bad.to(device_);
      comm().AllReduce(bad, ReduceOp::kMax);
      bad = bad.cpu();
    }
    std::string ranks;
    for (int r = 0; r < size(); ++r) {
      if (bad[r].item<double>() != 0) absl::StrAppend(&ranks, ranks.empty() ? "" : ", ", r);
    }
    TORCH_CHECK(ranks.empty(), "the loss is NaN or infinite on rank ", ranks, " at step ",
                global_step(), " (here: ", value,
                "); lower the learning rate or look at the batch");
  }
  // Outside of accumulate() every call is a window of its own, divided as Accelerate does.
  if (!in_micro_step_) {
    BeginWindow();
    accumulation_.BeginAlone();
  }
  const double divisor =
      weight.has_value() ? accumulation_.WeightedDivisor(*weight) : accumulation_.current().divisor;
  at::Tensor scaled = divisor == 1 ? loss : loss / divisor;
  if (scaler_ != nullptr) scaled = scaler_->Scale(scaled);
  progress().SetPhase(size() > 1 && communicate() ? "backward and gradient exchange" : "backward");
  scaled.backward();
  progress().SetPhase("after backward");
}

double Core::WindowFactor() {
  if (window_factor_.has_value()) return *window_factor_;
  window_factor_ = accumulation_.current().gradient_factor * join_factor_;
  if (accumulation_.weighted()) {
    at::Tensor total = at::full({1}, accumulation_.local_weight(), at::kDouble);
    if (size() > 1) {
      total = total.to(device_);
      comm().AllReduce(total, ReduceOp::kSum);
    }
    window_factor_ = accumulation_.WeightedFactor(total.item<double>(), size()) * join_factor_;
  }
  return *window_factor_;
}

void Core::FinishGradients(OptimizerSlot* only) {
  if (!sync_gradients()) return;
  const double factor = WindowFactor();
  for (const auto& optimizer : optimizers_) {
    if ((only != nullptr && optimizer.get() != only) || optimizer->gradients_finished_) continue;
    optimizer->gradients_finished_ = true;
    if (scaler_ != nullptr) scaler_->Unscale(optimizer->handle());
    ScaleGradients(optimizer->handle().parameters(), factor);
  }
}

void Core::WarnOfLocalParameters(const OptimizerHandle& optimizer) const {
  if (size() == 1) return;
  std::unordered_set<const void*> exchanged;
  for (const auto& model : models_) {
    if (model->ddp() == nullptr) continue;
    for (const at::Tensor& p : model->ddp()->parameters())
      exchanged.insert(p.unsafeGetTensorImpl());
  }
  for (size_t i = 0; i < optimizer.parameters().size(); ++i) {
    if (exchanged.count(optimizer.parameters()[i].unsafeGetTensorImpl()) > 0) continue;
    MUSTER_LOG(Warning) << "the optimizer steps parameter " << optimizer.parameter_names()[i]
                        << ", which belongs to no model that was prepared for training: its "
                           "gradient is not exchanged between processes";
    return;
  }
}

void Core::EndScalerStep() {
  if (++scaler_steps_ < optimizers_.size()) return;
  scaler_->Update();
  scaler_steps_ = 0;
}

void Core::FinishGradientsOf(const std::vector<at::Tensor>& parameters) {
  std::unordered_set<const void*> wanted;
  for (const at::Tensor& parameter : parameters) wanted.insert(parameter.unsafeGetTensorImpl());
  bool owned = false;
  for (const auto& optimizer : optimizers_) {
    for (const at::Tensor& parameter : optimizer->handle().parameters()) {
      if (wanted.count(parameter.unsafeGetTensorImpl()) == 0) continue;
      FinishGradients(optimizer.get());
      owned = true;
      break;
    }
  }
  TORCH_CHECK(owned || wanted.empty() ||
                  (scaler_ == nullptr && !accumulation_.weighted() &&
                   accumulation_.current().gradient_factor == 1),
              "these parameters belong to no prepared optimizer, so their gradients still hold the "
              "loss scale or the weights of their window: pass the optimizer to prepare()");
}

at::Tensor Core::ClipGradNorm(const std::vector<at::Tensor>& parameters, double max_norm,
                              double norm_type) {
  TORCH_CHECK(sync_gradients(),
              "clip_grad_norm_ in the middle of an accumulation window would clip partial "
              "gradients: call it "
              "only where accelerator.sync_gradients()");
  FinishGradientsOf(parameters);
  return muster::ClipGradNorm(parameters, max_norm, norm_type);
}

void Core::ClipGradValue(const std::vector<at::Tensor>& parameters, double clip_value) {
  TORCH_CHECK(sync_gradients(),
              "clip_grad_value_ in the middle of an accumulation window would clip partial "
              "gradients: call it "
              "only where accelerator.sync_gradients()");
  FinishGradientsOf(parameters);
  muster::ClipGradValue(parameters, clip_value);
}

bool Core::optimizer_step_was_skipped() const {
  for (const auto& optimizer : optimizers_) {
    if (optimizer->step_was_skipped()) return true;
  }
  return false;
}

void Core::BeginJoin(bool even_batches) {
  TORCH_CHECK(join_ == nullptr, "join_uneven_inputs() is active already: scopes do not nest");
  std::vector<DataParallel*> models;
  for (const auto& model : models_) {
    if (model->ddp() != nullptr) models.push_back(model->ddp());
  }
  join_ = std::make_unique<UnevenInputs>(comm(), models);
  for (const auto& loader : loaders_) loader->OverrideEvenBatches(even_batches);
}

void Core::EndJoin(bool finish) {
  const std::unique_ptr<UnevenInputs> join = std::move(join_);
  join_factor_ = 1;
  for (const auto& loader : loaders_) loader->OverrideEvenBatches(std::nullopt);
  if (!finish) return;
  join->Finish([&](int root) {
    // Whoever ran out of batches early missed steps: it takes over what the longest-trained process
    // has.
    for (const auto& optimizer : optimizers_) {
      BroadcastOptimizerState(comm(), optimizer->handle(), root);
      optimizer->set_steps(BroadcastObject(comm(), optimizer->steps(), root));
      optimizer->handle().ZeroGrad();
    }
    for (const auto& scheduler : schedulers_) {
      scheduler->scheduler().LoadState(
          BroadcastPlainState(comm(), scheduler->scheduler().SaveState(), root));
    }
    if (scaler_ != nullptr) {
      scaler_->LoadState(BroadcastPlainState(comm(), scaler_->SaveState(), root));
    }
    accumulation_.LoadState(BroadcastPlainState(comm(), accumulation_.SaveState(), root));
  });
}

// Collectives.

at::Tensor Core::GatherForMetrics(const at::Tensor& tensor) {
  const BatchInfo* batch = current_batch();
  if (batch == nullptr) return GatherTensors(comm(), {tensor}).front();
  return muster::GatherForMetrics(comm(), tensor, *batch);
}

// Process control.

bool Core::CheckTrigger() {
  at::Tensor flag = at::full({1}, trigger_ ? 1 : 0, at::kInt);
  if (size() > 1) {
    flag = flag.to(device_);
    comm().AllReduce(flag, ReduceOp::kMax);
  }
  const bool raised = flag.item<int>() != 0;
  if (raised) trigger_ = false;
  return raised;
}

int64_t Core::global_step() const { return optimizers_.empty() ? 0 : optimizers_.front()->steps(); }

void Core::SynchronizeRngTypes() {
  const auto wanted = [&](const char* type) {
    const std::vector<std::string>& types = options_.rng_types;
    return size() > 1 && std::find(types.begin(), types.end(), type) != types.end();
  };
  if (wanted("torch") || wanted("cuda")) SynchronizeRng(comm(), 0, wanted("cuda"));
}

void Core::FreeMemory() {
  models_.clear();
  optimizers_.clear();
  schedulers_.clear();
  loaders_.clear();
  accumulation_ = Accumulation(accumulation_.options());
  window_factor_.reset();
  scaler_steps_ = 0;
  // It knows optimizers by their address, which others may get.
  if (scaler_ != nullptr) scaler_->Reset();
  if (device_.is_cuda()) at::getDeviceAllocator(c10::kCUDA)->emptyCache();
}

void Core::WaitForEveryone(absl::Duration timeout, const std::string& name,
                           std::source_location where) {
  if (size() == 1) return;
  if (process_.coordinator == nullptr) {
    comm().Barrier();
    return;
  }
  progress().SetPhase("wait_for_everyone");
  // Ranks may come from different lines: Accelerate's may.
  const absl::StatusOr<BarrierResult> result = process_.coordinator->Barrier(
      name, timeout > absl::ZeroDuration() ? timeout : environment().timeout.value,
      BarrierCall{.same_line = environment().debug.value}, where);
  progress().SetPhase("after wait_for_everyone");
  if (result.ok()) return;
  // One process prints what all could: the report is the same for everybody.
  absl::StatusOr<BarrierReport> report = absl::NotFoundError("");
  if (IsBarrierVerdict(result.status())) report = process_.coordinator->DescribeBarrier(name);
  if (report.ok() && report->first_rank == rank()) {
    for (const AbsentRank& absent : report->absent) {
      if (absent.native_stack.empty()) continue;
      MUSTER_LOG(Error) << "rank " << absent.rank << " did not come; it stands at\n"
                        << absent.native_stack;
    }
  }
  TORCH_CHECK(false, std::string(result.status().message()));
}

void Core::FinishTrackers() {
  if (trackers_ == nullptr) return;
  if (absl::Status status = trackers_->Finish(); !status.ok()) {
    MUSTER_LOG(Warning) << "trackers: " << status.message();
  }
}

absl::Status Core::NameCulprit(const absl::Status& error) {
  // Gloo throws from the Reducer what has no type of its own.
  const bool lost_peer = error.code() == absl::StatusCode::kUnavailable ||
                         absl::StrContains(error.message(), "gloo/transport");
  if (!lost_peer || size() == 1 || process_.coordinator == nullptr) return error;
  // It knows, or is about to: who lost a connection waits for the exit of whoever closed it. A
  // barrier fails as soon as one of its ranks is gone.
  const auto why_ended = [&] {
    const absl::StatusOr<Heartbeat> beat = process_.coordinator->Beat();
    return beat.ok() && beat->generation_ended ? beat->why : std::string();
  };
  std::string who = why_ended();
  if (who.empty()) {
    const absl::Status reached =
        process_.coordinator->Barrier("after a lost connection", absl::Seconds(10)).status();
    who = why_ended();
    if (who.empty()) {
      who = reached.ok() ? "all are still here, so it is the network between them"
                         : std::string(reached.message());
    }
  }
  return absl::UnavailableError(absl::StrCat("lost another process at step ", global_step(), ": ",
                                             who, " (", error.message(), ")"));
}

void Core::EndTraining() {
  if (std::exchange(ended_, true)) return;
  FinishTrackers();
  // Before the seat is given up: it tells what was acted upon.
  triggers_->Close();
  if (process_.coordinator == nullptr) return;
  // Only a hint to the coordinator: a worker that cannot say goodbye leaves by its exit.
  if (absl::Status status = process_.coordinator->Leave("training ended"); !status.ok()) {
    MUSTER_LOG(Debug) << "leaving the rendezvous: " << status.message();
  }
}

std::string Core::ProjectDirectory() const {
  return environment().project_dir.value.empty() ? "muster-run" : environment().project_dir.value;
}

std::string Core::LoggingDirectory() const {
  if (!options_.project.logging_directory.empty()) return options_.project.logging_directory;
  return ProjectDirectory();
}

absl::Status Core::InitTrackers(const std::string& project, const TrackerValues& config,
                                const std::vector<std::string>& kinds,
                                std::vector<std::unique_ptr<GeneralTracker>> own) {
  if (trackers_ != nullptr) {
    return absl::FailedPreconditionError("init_trackers() was called already");
  }
  const TrackerContext context{.project_name = project,
                               .logging_dir = LoggingDirectory(),
                               .rank = rank(),
                               .start_time = absl::Now()};
  for (const std::string& kind : kinds) {
    MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<GeneralTracker> tracker, MakeTracker(kind, context));
    own.push_back(std::move(tracker));
  }
  MUSTER_ASSIGN_OR_RETURN(trackers_, TrackerSet::Start(std::move(own), rank(), config, {}));
  return absl::OkStatus();
}

void Core::Log(TrackerValues values, std::optional<int64_t> step) {
  TORCH_CHECK(trackers_ != nullptr, "log() before init_trackers(): there is nothing to log to");
  trackers_->Log(std::move(values), step);
}

void Core::RegisterForCheckpointing(std::function<StateDict()> save,
                                    std::function<void(const StateDict&)> load) {
  TORCH_CHECK(save != nullptr && load != nullptr,
              "register_for_checkpointing() needs both a save and a load function");
  registered_.push_back({std::move(save), std::move(load)});
}

// Slots.

ModelSlot::ModelSlot(Core* core, std::shared_ptr<torch::nn::Module> module, bool evaluation)
    : core_(core), module_(std::move(module)) {
  if (core_->options().device_placement) module_->to(core_->device());
  if (core_->size() == 1 || evaluation) return;
  std::vector<at::Tensor> parameters, buffers;
  std::vector<std::string> names;
  for (const auto& parameter : module_->named_parameters()) {
    names.push_back(parameter.key());
    parameters.push_back(parameter.value());
  }
  for (const at::Tensor& buffer : module_->buffers()) buffers.push_back(buffer);
  if (parameters.empty()) return;
  ddp_ = std::make_unique<DataParallel>(core_->comm(), std::move(parameters), std::move(names),
                                        std::move(buffers), core_->options().data_parallel);
}

ModelSlot::~ModelSlot() = default;

void ModelSlot::BeforeForward() {
  TORCH_CHECK(!core_->joining() || core_->in_micro_step() || !at::GradMode::is_enabled(),
              "inside join_uneven_inputs() every training step needs accelerator.accumulate(): it "
              "tells the "
              "processes that ran out of batches what to take part in");
  ddp_->BeforeForward(core_->communicate());
}

OptimizerSlot::OptimizerSlot(Core* core, OptimizerHandle* handle,
                             std::unique_ptr<OptimizerHandle> owned)
    : core_(core), owned_(std::move(owned)), handle_(handle) {}

void OptimizerSlot::Step() {
  if (!core_->sync_gradients()) return;
  core_->progress().SetPhase("optimizer step");
  if (steps_ == 0) core_->WarnOfLocalParameters(*handle_);
  core_->FinishGradients(this);
  MUSTER_FAILPOINT("worker.step");
  if (core_->scaler() != nullptr) {
    core_->scaler()->Step(*handle_);
    step_was_skipped_ = core_->scaler()->step_was_skipped(*handle_);
    core_->EndScalerStep();
  } else {
    handle_->Step();
  }
  if (!step_was_skipped_) ++steps_;
  core_->progress().SetStep(core_->global_step());
  core_->progress().SetPhase("after optimizer step");
  gradients_finished_ = false;
}

void OptimizerSlot::ZeroGrad(bool set_to_none) {
  if (!core_->sync_gradients()) return;
  handle_->ZeroGrad(set_to_none && !core_->options().data_parallel.gradient_as_bucket_view
                        ? GradZeroing::kSetToNone
                        : GradZeroing::kInPlace);
}

void SchedulerSlot::Bind(std::shared_ptr<OptimizerSlot> optimizer) {
  optimizer_ = std::move(optimizer);
  scheduler_ = std::make_unique<LrScheduler>(optimizer_->handle(), schedule_);
  gate_ = std::make_unique<PreparedScheduler>(
      *scheduler_, PreparedSchedulerOptions{
                       .step_with_optimizer = core_->options().step_scheduler_with_optimizer,
                       .units = core_->options().scheduler_units,
                       .num_processes = core_->size(),
                       .split_batches = core_->options().data_loader.split_batches,
                       .adjust_scheduler = core_->options().accumulation.adjust_scheduler});
}

void SchedulerSlot::Step() {
  TORCH_CHECK(gate_ != nullptr, "this schedule has no optimizer: pass both to one prepare() call");
  MicroStep step = core_->micro_step();
  step.sync = core_->sync_gradients();
  gate_->Step(step, optimizer_->step_was_skipped());
}

double SchedulerSlot::last_lr() const { return optimizer_->handle().lr(0); }
std::vector<double> SchedulerSlot::last_lrs() const {
  std::vector<double> rates;
  for (int64_t g = 0; g < optimizer_->handle().num_groups(); ++g) {
    rates.push_back(optimizer_->handle().lr(g));
  }
  return rates;
}
int64_t SchedulerSlot::step_count() const { return scheduler_->step_count(); }

AccumulateScope::~AccumulateScope() {
  if (core_ != nullptr) core_->EndMicroStep();
}

NoSyncScope::NoSyncScope(Core* core) : core_(core) {
  TORCH_CHECK(!core_->joining(),
              "no_sync() inside join_uneven_inputs() would leave the processes without batches "
              "waiting: use "
              "gradient_accumulation_steps");
  core_->ChangeNoSync(+1);
}
NoSyncScope::~NoSyncScope() { core_->ChangeNoSync(-1); }

LocalScope::LocalScope(Core* core) : core_(core) {
  TORCH_CHECK(!core_->joining(),
              "LocalSGD inside join_uneven_inputs(): there is no exchange to take part in");
  core_->ChangeLocal(+1);
}
LocalScope::~LocalScope() { core_->ChangeLocal(-1); }

JoinScope::JoinScope(Core* core, bool even_batches)
    : core_(core), exceptions_(std::uncaught_exceptions()) {
  core_->BeginJoin(even_batches);
}
JoinScope::~JoinScope() noexcept(false) {
  core_->EndJoin(/*finish=*/std::uncaught_exceptions() == exceptions_);
}

FirstScope::FirstScope(Core* core, bool per_host)
    : core_(core), first_(per_host ? core->local_rank() == 0 : core->rank() == 0) {
  if (!first_) core_->comm().Barrier();
}
FirstScope::~FirstScope() {
  if (!first_) return;
  // Also when an exception is leaving the scope: the others wait for this barrier.
  try {
    core_->comm().Barrier();
  } catch (const c10::Error& e) {
    MUSTER_LOG(Error) << "main_process_first: " << e.what_without_backtrace();
  }
}

int64_t EpochRange::Iterator::operator*() const {
  core_->SetEpoch(epoch_, /*open=*/true);
  return epoch_;
}
EpochRange::Iterator& EpochRange::Iterator::operator++() {
  ++epoch_;
  core_->SetEpoch(epoch_, /*open=*/false);
  return *this;
}
EpochRange::Iterator EpochRange::begin() const { return Iterator(core_, core_->first_epoch()); }

}  // namespace muster::internal
