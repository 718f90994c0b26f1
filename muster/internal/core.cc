#include "muster/internal/core.h"

#include <algorithm>
#include <exception>

#include "ATen/Functions.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "muster/internal/loops.h"
#include "worker/checkpoint/async_saver.h"
#include "worker/collective/collective_error.h"
#include "worker/job/agent_tells.h"
#include "worker/job/coordinator_client.h"
#include "worker/train/guard.h"
#include "worker/train/seed.h"
#include "worker/train/sync_state.h"

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
    if (AgentTells(why, ProcessVariables())) return;
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

// Collectives.

at::Tensor Core::MeanOfAll(const at::Tensor& number) {
  if (size() == 1) return number;
  at::Tensor mean = number.to(device_, at::kDouble, /*non_blocking=*/false, /*copy=*/true);
  comm().AllReduce(mean, ReduceOp::kMean);
  return mean;
}

std::shared_ptr<Comm> Core::NewGroup(std::vector<int> ranks) {
  CheckAllTakePart("new_group()");
  absl::StatusOr<std::unique_ptr<Comm>> group = MakeSubgroup(process_, std::move(ranks));
  ThrowIfError(group.status());
  return *std::move(group);
}

void Core::CheckAllTakePart(const char* call) const {
  TORCH_CHECK(
      join_ == nullptr || size() == 1, call,
      " inside join_uneven_inputs(): processes that have run out of batches take no part in "
      "it, and the others would wait for them; keep the values and exchange them after the "
      "scope");
}

// Process control.

bool Core::CheckTrigger() {
  CheckAllTakePart("check_trigger()");
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

void Core::WaitForEveryone(absl::Duration timeout, const std::string& name,
                           std::source_location where) {
  if (size() == 1) return;
  CheckAllTakePart("wait_for_everyone()");
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
      MUSTER_LOG(Error) << "rank " << absent.rank << " did not come; it stands at";
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
  // Gloo throws from the Reducer what has no type of its own.
  if (IsExplained(error.message())) {
    // It names the time that was waited only where that was up.
    if (absl::StrContains(error.message(), " within ")) return error;
    return absl::UnavailableError(
        absl::StrCat("lost another process at step ", global_step(), ": ", error.message()));
  }
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
  // A job that has lost its last checkpoint has not ended well.
  ThrowIfError(WaitForCheckpoint());
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

}  // namespace muster::internal
