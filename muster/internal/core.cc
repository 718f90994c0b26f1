#include "muster/internal/core.h"

#include <algorithm>
#include <exception>
#include <nlohmann/json.hpp>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/barrier_names.h"
#include "base/identity.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "base/variable_list.h"
#include "worker/collective/collective_error.h"
#include "worker/collective/nccl.h"
#include "worker/job/agent_tells.h"
#include "worker/job/coordinator_client.h"
#include "worker/job/device.h"
#include "worker/job/lost_collective.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"
#include "worker/train/sync_state.h"

namespace muster::internal {
namespace {

// Describes the settings that must be equal on all ranks, because their collectives depend on them.
// Folders are each rank's own. `group_size`: false to leave out the group size, which may differ.
std::string Describe(const ShardingOptions& sharding, bool group_size = true) {
  const bool divides = sharding.strategy != ShardingStrategy::kNone;
  std::string text =
      divides ? absl::StrCat("zero", static_cast<int>(sharding.strategy)) : "no_shard";
  const auto add = [&text](absl::string_view name, const auto& value) {
    absl::StrAppend(&text, " ", name, "=", value);
  };
  if (sharding.output_dtype) add("output_dtype", c10::toString(*sharding.output_dtype));
  if (sharding.buffer_dtype) add("buffer_dtype", c10::toString(*sharding.buffer_dtype));
  if (sharding.offload_optimizer != Offload::kNone) {
    add("offload_optimizer", sharding.offload_optimizer == Offload::kDisk ? "disk" : "cpu");
  }
  if (!divides) return text;
  if (group_size && sharding.group_size != 0) add("group_size", sharding.group_size);
  if (!sharding.reshard_after_forward) add("reshard_after_forward", "false");
  if (sharding.reshard_group_size != 0) add("reshard_group_size", sharding.reshard_group_size);
  if (sharding.parameter_dtype) add("parameter_dtype", c10::toString(*sharding.parameter_dtype));
  if (sharding.reduce_dtype) add("reduce_dtype", c10::toString(*sharding.reduce_dtype));
  if (sharding.overlap) add("overlap", "true");
  if (sharding.optimizer_in_backward) add("optimizer_in_backward", "true");
  if (sharding.offload_gradients != Offload::kNone) {
    add("offload_gradients", sharding.offload_gradients == Offload::kDisk ? "disk" : "cpu");
  }
  if (sharding.offload_parameters != Offload::kNone) {
    add("offload_parameters", sharding.offload_parameters == Offload::kDisk ? "disk" : "cpu");
  }
  if (!sharding.ignored_modules.empty()) add("ignored_modules", sharding.ignored_modules);
  if (!sharding.ignored_parameters.empty()) {
    add("ignored_parameters", sharding.ignored_parameters);
  }
  if (!sharding.no_split.empty()) add("no_split", absl::StrJoin(sharding.no_split, ","));
  if (!sharding.unit_types.empty()) add("unit_types", absl::StrJoin(sharding.unit_types, ","));
  if (!sharding.unit_names.empty()) add("unit_names", absl::StrJoin(sharding.unit_names, ","));
  if (sharding.min_unit_parameters != 0) add("min_unit_parameters", sharding.min_unit_parameters);
  return text;
}

// Describes likewise how checkpoints are written and which are kept, each setting with a blank
// before it. options.checkpoint.divide_above is compared when a state is saved.
std::string Describe(const CheckpointOptions& checkpoint, const ProjectOptions& project) {
  std::string text;
  const CheckpointOptions usual;
  const auto add = [&text](absl::string_view name, const auto& value) {
    absl::StrAppend(&text, " ", name, "=", value);
  };
  const auto add_bool = [&](absl::string_view name, bool here, bool usually) {
    if (here != usually) add(name, here ? "true" : "false");
  };
  add_bool("checkpoint.asynchronous", checkpoint.asynchronous, usual.asynchronous);
  add_bool("checkpoint.memory", checkpoint.memory, usual.memory);
  add_bool("checkpoint.mirror", checkpoint.mirror, usual.mirror);
  add_bool("checkpoint.promote", checkpoint.promote, usual.promote);
  if (checkpoint.disk_every != usual.disk_every) {
    add("checkpoint.disk_every", checkpoint.disk_every);
  }
  if (checkpoint.keep.has_value()) add("checkpoint.keep", *checkpoint.keep);
  if (checkpoint.keep_every != usual.keep_every) {
    add("checkpoint.keep_every", checkpoint.keep_every);
  }
  if (project.total_limit.has_value()) add("project.total_limit", *project.total_limit);
  add_bool("project.save_on_each_node", project.save_on_each_node, false);
  return text;
}

// Describes likewise how gradients become steps. Differences would silently take the weights of the
// ranks apart, and machines read these settings from files of their own. Contains each setting that
// is not the usual one, with a blank before it.
std::string DescribeSteps(const Process& process) {
  std::string text;
  // JSON keeps enough digits to tell numbers apart.
  const auto add = [&text](absl::string_view name, const auto& value) {
    absl::StrAppend(&text, " ", name, "=", nlohmann::json(value).dump());
  };
  const auto add_unless = [&add](absl::string_view name, const auto& value, const auto& usual) {
    if (value != usual) add(name, value);
  };
  const auto add_given = [&add](absl::string_view name, const auto& value) {
    if (value.has_value()) add(name, *value);
  };
  add_unless("gradient_clipping", process.gradient_clipping(), 0.0);
  if (NeedsGradScaler(process.precision())) {
    const GradScalerOptions& scaler = process.grad_scaler();
    const GradScalerOptions usual;
    add_unless("grad_scaler.enabled", scaler.enabled, usual.enabled);
    add_unless("grad_scaler.dynamic", scaler.dynamic, usual.dynamic);
    add_unless("grad_scaler.init_scale", scaler.init_scale, usual.init_scale);
    add_unless("grad_scaler.growth_factor", scaler.growth_factor, usual.growth_factor);
    add_unless("grad_scaler.backoff_factor", scaler.backoff_factor, usual.backoff_factor);
    add_unless("grad_scaler.growth_interval", scaler.growth_interval, usual.growth_interval);
    add_unless("grad_scaler.hysteresis", scaler.hysteresis, usual.hysteresis);
    add_unless("grad_scaler.min_scale", scaler.min_scale, usual.min_scale);
  }
  const AcceleratorOptions& options = process.options();
  const AccumulationOptions& windows = options.accumulation;
  add_unless("accumulation.sync_with_dataloader", windows.sync_with_dataloader, true);
  add_unless("accumulation.sync_each_batch", windows.sync_each_batch, false);
  add_unless("accumulation.adjust_scheduler", windows.adjust_scheduler, false);
  if (windows.short_window != ShortWindow::kRescale) {
    absl::StrAppend(&text, " accumulation.short_window=kLikeAccelerate");
  }
  add_unless("check_finite_loss", options.check_finite_loss, false);
  add_unless("step_scheduler_with_optimizer", options.step_scheduler_with_optimizer, true);
  if (options.scheduler_units != SchedulerUnits::kOptimizerSteps) {
    absl::StrAppend(&text, " scheduler_units=kProcesses");
  }
  const ConfiguredTraining& configured = process.configured();
  if (configured.optimizer.has_value()) {
    const client::PlannedOptimizer& optimizer = *configured.optimizer;
    add("optimizer.type", optimizer.type);
    add_given("optimizer.lr", optimizer.lr);
    add_given("optimizer.weight_decay", optimizer.weight_decay);
    add_given("optimizer.eps", optimizer.eps);
    add_given("optimizer.beta1", optimizer.beta1);
    add_given("optimizer.beta2", optimizer.beta2);
    add_given("optimizer.momentum", optimizer.momentum);
    add_given("optimizer.nesterov", optimizer.nesterov);
  }
  if (configured.scheduler.has_value()) {
    const client::PlannedScheduler& scheduler = *configured.scheduler;
    add("scheduler.type", scheduler.type);
    add("scheduler.logarithmic", scheduler.logarithmic);
    add_given("scheduler.min_lr", scheduler.min_lr);
    add_given("scheduler.max_lr", scheduler.max_lr);
    add_given("scheduler.min_ratio", scheduler.min_ratio);
    add_given("scheduler.cosine_min_ratio", scheduler.cosine_min_ratio);
    add_given("scheduler.warmup_steps", scheduler.warmup_steps);
    add_given("scheduler.total_steps", scheduler.total_steps);
  }
  for (const std::string& key : configured.autos) absl::StrAppend(&text, " ", key, "=auto");
  return text;
}

// Returns the kind of this process's device and, on a second line, its host and why it has that
// kind.
std::string DescribeDevice(const Process& process) {
  std::string why;
  if (process.environment().use_cpu.value) {
    const std::string& source = process.environment().use_cpu.source;
    why = absl::StrCat("; ", source == "argument" ? "options.cpu" : source, " asks for it");
  } else if (process.device().is_cpu()) {
    why = absl::StrCat("; ", WhyNoGpu());
  }
  return absl::StrCat(c10::DeviceTypeName(process.device().type(), /*lower_case=*/true), "\n (",
                      HostName(), why, ")");
}

// Throws if ranks differ. `all`: for each rank, the lines of DescribeDevice(), its settings, the
// settings without the size of groups, and this size.
void CheckSettings(const std::vector<std::string>& all) {
  std::vector<std::vector<std::string>> said;
  for (const std::string& text : all) said.push_back(absl::StrSplit(text, '\n'));
  const std::vector<std::string>& first = said[0];
  for (size_t r = 1; r < said.size(); ++r) {
    const std::vector<std::string>& other = said[r];
    // Tensors of each kind use separate connections, so the ranks would wait for each other
    // forever.
    TORCH_CHECK(first[0] == other[0], "rank ", r, " computes on ", other[0], other[1],
                ", and rank 0 on ", first[0], first[1],
                ": all processes of a job need the same kind of device. Repair or exclude the "
                "machine that lacks it, or set MUSTER_CPU=yes for all");
    // If "hybrid" is all that the program says, the machines decide.
    TORCH_CHECK(first[2] == other[2] || first[3] != other[3] || first[4] == "0" || other[4] == "0",
                "rank ", r, " has groups of ", other[4], " processes for each copy of the model ",
                "(options.sharding.group_size=", other[4], ") and rank 0 has groups of ", first[4],
                ": hybrid sharding uses the number of processes on a machine. Run the same number "
                "on each machine, or set the same group_size on all (MUSTER_SHARDING_GROUP_SIZE)");
    TORCH_CHECK(first[2] == other[2], "rank ", r, " has ", other[2], " and rank 0 has ", first[2],
                ": give all processes of a job the same settings");
  }
}

JoinedProcess JoinOrThrow(const AcceleratorOptions& options) {
  JoinJobOptions join;
  join.on_generation_ended = [](const absl::Status& why) {
    if (AgentTells(why, ProcessVariables())) return;
    MUSTER_LOG(Error) << "this generation of the job ended: " << why.message();
  };
  absl::StatusOr<JoinedProcess> process = Core::Join(options, join);
  ThrowIfError(process.status());
  return *std::move(process);
}

}  // namespace

absl::StatusOr<JoinedProcess> Core::Join(const AcceleratorOptions& options,
                                         const JoinJobOptions& join) {
  EnvironmentArguments arguments;
  arguments.mixed_precision = options.mixed_precision;
  arguments.use_cpu = options.cpu;
  MUSTER_RETURN_IF_ERROR(
      Guard([&] { arguments.gradient_accumulation_steps = AccumulationStepsOfProgram(options); }));
  arguments.debug = options.debug;
  if (!options.project.directory.empty()) arguments.project_dir = options.project.directory;
  arguments.timeout = options.timeout;
  MUSTER_ASSIGN_OR_RETURN(const Environment environment,
                          ReadEnvironment(ProcessVariables(), arguments));
  if (GetLogLevel() == LogLevel::kDebug) {
    for (const absl::string_view line :
         absl::StrSplit(Describe(environment), '\n', absl::SkipEmpty())) {
      MUSTER_LOG(Debug) << line;
    }
  }
  MUSTER_ASSIGN_OR_RETURN(JoinedProcess process, JoinJob(environment, join));
  if (process.comm->size() > 1) SetLogIdentity(absl::StrCat("rank ", process.comm->rank()));
  return process;
}

Core::Core(const AcceleratorOptions& options) : Core(options, JoinOrThrow(options)) {}

Core::Core(const AcceleratorOptions& options, JoinedProcess process)
    : process_(options, std::move(process)),
      registry_([this] { steps_.OptimizerForgotten(); }),
      loops_(registry_, [this] { SynchronizeRngTypes(); }),
      steps_(process_, registry_, loops_),
      checkpoints_(process_, registry_, loops_, steps_,
                   [this] { return triggers_ != nullptr && triggers_->stop().has_value(); }),
      triggers_(std::make_unique<JobTriggers>(
          process_.coordinator(), &process_.comm(),
          JobTriggers::Options{.stop_on_sigterm = options.stop_on_sigterm})) {
  if (process_.size() == 1) return;
  // Ranks that step at different times would wait for each other forever, or mix their gradients.
  const std::string settings =
      absl::StrCat("mixed_precision=", process_.mixed_precision(),
                   " gradient_accumulation_steps=", steps_.gradient_accumulation_steps(),
                   DescribeSteps(process_), Describe(options.checkpoint, options.project));
  const ShardingOptions& sharding = process_.sharding();
  CheckSettings(process_.comm().AllGatherBytes(
      absl::StrCat(DescribeDevice(process_), "\n", settings, " sharding=", Describe(sharding), "\n",
                   settings, Describe(sharding, /*group_size=*/false), "\n", sharding.group_size)));
}

Core::~Core() { FinishTrackers(); }

// Collectives.

std::shared_ptr<Comm> Core::NewGroup(std::vector<int> ranks) {
  steps_.CheckAllTakePart("new_group()");
  absl::StatusOr<std::unique_ptr<Comm>> group = MakeSubgroup(process_.joined(), std::move(ranks));
  ThrowIfError(group.status());
  std::shared_ptr<Comm> comm = process_.InOrder(*std::move(group));
  if (comm != nullptr) groups_.emplace_back(comm);
  return comm;
}

const BatchInfo* Core::BatchOfMetrics() const {
  return process_.size() == 1 ? loops_.current_batch() : loops_.BatchOfMetrics();
}

// Process control.

JobTriggers& Core::triggers(const char* call) {
  if (process_.coordinator() == nullptr) steps_.CheckAllTakePart(call);
  return *triggers_;
}

bool Core::CheckTrigger() {
  steps_.CheckAllTakePart("check_trigger()");
  at::Tensor flag = at::full({1}, trigger_ ? 1 : 0, at::kInt);
  // A tensor on the CPU uses the CPU's connections, so that nothing waits for a GPU.
  if (process_.size() > 1) process_.comm().AllReduce(flag, ReduceOp::kMax);
  const bool raised = flag.item<int>() != 0;
  if (raised) trigger_ = false;
  return raised;
}

void Core::SynchronizeRngTypes() {
  const auto wanted = [&](const char* type) {
    const std::vector<std::string>& types = process_.options().rng_types;
    return process_.size() > 1 && std::find(types.begin(), types.end(), type) != types.end();
  };
  if (wanted("torch") || wanted("cuda")) SynchronizeRng(process_.comm(), 0, wanted("cuda"));
}

void Core::WaitForEveryone(absl::Duration timeout, const std::string& name,
                           std::source_location where) {
  TORCH_CHECK(!absl::StartsWith(name, kOwnBarriers),
              "wait_for_everyone(): names that begin with \"", kOwnBarriers,
              "\" are Muster's own; give \"", name, "\" another one");
  if (process_.size() == 1) return;
  steps_.CheckAllTakePart("wait_for_everyone()");
  if (process_.coordinator() == nullptr) {
    process_.comm().Barrier();
    return;
  }
  process_.progress().SetPhase("wait_for_everyone");
  // Ranks may call it from different lines, as in Accelerate.
  const absl::StatusOr<BarrierResult> result = process_.coordinator()->Barrier(
      name, timeout > absl::ZeroDuration() ? timeout : process_.environment().timeout.value,
      BarrierCall{.same_line = process_.environment().debug.value}, where);
  process_.progress().SetPhase("after wait_for_everyone");
  if (result.ok()) return;
  // Only one process prints it: the report is the same for all.
  absl::StatusOr<BarrierReport> report = absl::NotFoundError("");
  if (IsBarrierVerdict(result.status())) report = process_.coordinator()->DescribeBarrier(name);
  if (report.ok() && report->first_rank == process_.rank()) {
    for (const AbsentRank& absent : report->absent) {
      if (absent.native_stack.empty()) continue;
      MUSTER_LOG(Error) << "rank " << absent.rank << " did not arrive; its stack:";
      for (const absl::string_view frame :
           absl::StrSplit(absent.native_stack, '\n', absl::SkipEmpty())) {
        MUSTER_LOG(Error) << "  " << frame;
      }
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
  // Gloo's errors that come through the Reducer have no type of their own.
  if (IsExplained(error.message())) {
    // The message names the time that was waited only if that time was up.
    if (absl::StrContains(error.message(), " within ")) return error;
    return absl::UnavailableError(absl::StrCat("lost another process at step ",
                                               registry_.global_step(), ": ", error.message()));
  }
  const bool lost_peer = error.code() == absl::StatusCode::kUnavailable ||
                         absl::StrContains(error.message(), "gloo/transport");
  if (!lost_peer || process_.size() == 1 || process_.coordinator() == nullptr) return error;
  // The coordinator knows the cause, or will soon: a process that lost a connection waits for the
  // exit of the peer that closed it, and a barrier fails as soon as one of its ranks is gone.
  const auto why_ended = [&] {
    const absl::StatusOr<Heartbeat> beat = process_.coordinator()->Beat();
    return beat.ok() && beat->generation_ended ? beat->why : std::string();
  };
  std::string who = why_ended();
  if (who.empty()) {
    const absl::Status reached = process_.coordinator()
                                     ->Barrier(std::string(kAfterLostConnection), absl::Seconds(10))
                                     .status();
    who = why_ended();
    if (who.empty() && !reached.ok()) {
      const absl::StatusOr<std::vector<MemberInfo>> members = process_.coordinator()->Members();
      if (members.ok()) who = DescribeGone(*members);
      if (who.empty()) who = std::string(reached.message());
    }
    if (who.empty()) who = "all ranks are alive, so the cause is the network between them";
  }
  return absl::UnavailableError(absl::StrCat("lost another process at step ",
                                             registry_.global_step(), ": ", who, " (",
                                             error.message(), ")"));
}

void Core::EndTraining() {
  if (std::exchange(ended_, true)) return;
  for (const auto& scheduler : registry_.schedulers()) scheduler->WarnIfLeftOut(/*at_end=*/true);
  FinishTrackers();
  const absl::Status saved = checkpoints_.Wait();
  // Close the triggers before the seat is given up, because that reports those that were acted on.
  triggers_->Close();
  // A job that has lost its last checkpoint has not ended well: this process gives its seat up by
  // its exit.
  ThrowIfError(saved);
  FlushNcclAtEnd(true);
  if (process_.coordinator() == nullptr) return;
  // This is only a hint to the coordinator: a worker that cannot send it leaves by its exit.
  if (absl::Status status = process_.coordinator()->Leave("training ended"); !status.ok()) {
    MUSTER_LOG(Debug) << "leaving the rendezvous: " << status.message();
  }
}

Handed Core::Abandon() {
  ended_ = true;
  FinishTrackers();
  // The thread of the triggers uses comm().
  triggers_->Close();
  Handed handed;
  handed.objects = std::move(groups_);
  for (const std::shared_ptr<LoaderStateHandle>& loader : registry_.loaders()) {
    handed.objects.emplace_back(loader);
  }
  for (const std::shared_ptr<ModelSlot>& model : registry_.models()) {
    for (const auto& [name, parameter] : model->source().parameters()) {
      handed.parameters.emplace_back(parameter.getIntrusivePtr());
    }
  }
  // This comes before waiting for saves: the other processes may wait for this one, which must
  // close its connections first.
  const absl::Status freed = Guard([this] { FreeMemory(); });
  if (!freed.ok()) MUSTER_LOG(Debug) << "after a lost process: " << freed.message();
  sharding_groups_ = {};
  process_.LoseComm();
  if (const absl::Status saved = checkpoints_.Abandon(); !saved.ok()) {
    MUSTER_LOG(Warning) << "a save in progress is lost: " << saved.message();
  }
  return handed;
}

absl::Status Core::InitTrackers(const std::string& project, const TrackerValues& config,
                                const std::vector<std::string>& kinds,
                                std::vector<std::unique_ptr<GeneralTracker>> own) {
  if (ended_) {
    return absl::FailedPreconditionError(
        "init_trackers() was called after end_training(): call it before that");
  }
  // Ends the trackers of the previous run (another fold, or another attempt).
  FinishTrackers();
  trackers_.reset();
  const TrackerContext context{.project_name = project,
                               .logging_dir = process_.LoggingDirectory(),
                               .rank = process_.rank(),
                               .start_time = absl::Now()};
  // The program's trackers may throw, and starting a thread for them may fail.
  return Guard([&] {
    for (const std::string& kind : kinds) {
      absl::StatusOr<std::unique_ptr<GeneralTracker>> tracker = MakeTracker(kind, context);
      ThrowIfError(tracker.status());
      own.push_back(*std::move(tracker));
    }
    absl::StatusOr<std::unique_ptr<TrackerSet>> started =
        TrackerSet::Start(std::move(own), process_.rank(), config, {});
    ThrowIfError(started.status());
    trackers_ = *std::move(started);
  });
}

void Core::Log(TrackerValues values, std::optional<int64_t> step) {
  TORCH_CHECK(trackers_ != nullptr, "log() before init_trackers(): there is nothing to log to");
  trackers_->Log(std::move(values), step);
}

int64_t Core::trigger_step() const {
  const auto& optimizers = registry_.optimizers();
  return optimizers.empty() ? loops_.batches() : optimizers.front()->tried_steps();
}

int64_t Core::FirstEpoch(int64_t count) {
  return loops_.FirstEpoch(count, process_.rank() == 0 ? checkpoints_.last_checkpoint() : "");
}

}  // namespace muster::internal
