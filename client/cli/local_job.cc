#include "client/cli/local_job.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/time/clock.h"
#include "agent/job_signals.h"
#include "agent/node_job.h"
#include "agent/process.h"
#include "agent/process_limits.h"
#include "agent/worker_environment.h"
#include "base/file.h"
#include "base/log.h"
#include "base/status_macros.h"
#include "client/cli/running_launch.h"
#include "proto/failure_policy.h"
#include "rpc/address.h"
#include "rpc/own_address.h"

namespace muster::client {
namespace {

constexpr char kLoopback[] = "127.0.0.1";

LaunchOutcome Refused(absl::Status status) {
  LaunchOutcome outcome;
  outcome.kind = LaunchOutcome::Kind::kRefused;
  outcome.status = std::move(status);
  return outcome;
}

rpc::Address CoordinatorOf(const LaunchConfig& config) {
  return {.host = config.coordinator_ip.empty() ? kLoopback : config.coordinator_ip,
          .port = config.coordinator_port,
          .path = ""};
}

std::string JobName(const LaunchConfig& config) {
  if (!config.job_name.empty()) return config.job_name;
  // Machines that cannot agree on a generated name must share a fixed one.
  return config.num_machines > 1 ? "launch" : absl::StrCat("launch-", RandomHex().substr(0, 8));
}

// Returns the reason for the other machines.
std::string WhyEnded(const LaunchOutcome& outcome) {
  switch (outcome.kind) {
    case LaunchOutcome::Kind::kSucceeded:
      return "the job has succeeded";
    case LaunchOutcome::Kind::kFailed:
      return outcome.why;
    case LaunchOutcome::Kind::kStopped:
      return absl::StrCat("it was stopped by ", agent::SignalName(outcome.signal));
    case LaunchOutcome::Kind::kRefused:
      return std::string(outcome.status.message());
  }
  return "";
}

// Returns an absolute path, because other processes may run in another folder.
std::string Absolute(const std::string& path) {
  std::error_code error;
  return path.empty() ? "" : std::filesystem::absolute(path, error).string();
}

// The credentials that the agent of this machine shows to the coordinator, and checks of it.
struct Access {
  rpc::TlsFiles tls = {};
  std::string token_file = {};
};

agent::AgentOptions MakeAgentOptions(const LaunchPlan& plan, const std::string& job,
                                     const std::string& coordinator) {
  const LaunchConfig& config = plan.config;
  agent::AgentOptions options;
  options.argv = plan.argv;
  options.slots = config.processes_here;
  options.inherited = plan.variables;
  if (!config.gpu_ids.empty() && config.gpu_ids != "all") {
    options.inherited["CUDA_VISIBLE_DEVICES"] = config.gpu_ids;
  }
  options.max_restarts = config.max_restarts;
  options.class_limits = ToClassCounts(config.class_limits);
  options.user_error_codes = config.user_error_codes;
  options.stop_grace = config.stop_grace;
  options.log_dir = config.log_dir;

  agent::WorkerEnvironment& worker = options.worker;
  worker.job = job;
  worker.coordinator = coordinator;
  worker.mixed_precision = config.mixed_precision;
  worker.sharding = config.sharding;
  worker.activation_checkpointing = config.activation_checkpointing;
  worker.activation_blocks = config.activation_blocks;
  worker.offload_activations = config.offload_activations;
  worker.cpu = config.cpu;
  worker.gradient_accumulation_steps = config.gradient_accumulation_steps;
  worker.debug = config.debug;
  worker.threads = config.threads_per_process;
  worker.cores = plan.cores;
  worker.extra = config.env;
  return options;
}

// A coordinator that this launch runs, and the record by which others find it.
struct Held {
  std::unique_ptr<LaunchRecord> record = nullptr;  // outlives the coordinator, which uses its files
  std::unique_ptr<EmbeddedCoordinator> coordinator = nullptr;
  Access access = {};
};

// Starts it. Without other machines it listens on a socket that only this user can reach; a
// requested address is protected by certificates or a token, which is created for this job if none
// was given.
absl::StatusOr<Held> HoldCoordinator(const LaunchConfig& config, const std::string& job,
                                     const std::map<std::string, std::string>& variables,
                                     const CoordinatorFactory& start_coordinator) {
  Held held;
  absl::StatusOr<std::unique_ptr<LaunchRecord>> record = LaunchRecord::Create(variables);
  EmbeddedCoordinatorOptions options;
  const bool one_machine = config.num_machines == 1;
  if (one_machine && config.coordinator_ip.empty() && config.coordinator_port == 0) {
    if (!record.ok()) return record.status();
    options.listen = absl::StrCat("unix:", (*record)->socket_path());
  } else {
    const bool certificates = !config.tls.ca.empty() && !config.tls.cert.empty();
    held.access = {config.tls, config.token_file};
    if (held.access.token_file.empty() && !certificates) {
      if (!record.ok()) return record.status();
      MUSTER_ASSIGN_OR_RETURN(held.access.token_file, (*record)->MakeToken());
    }
    options.listen = CoordinatorOf(config).ToString();
    options.tls.cert = config.tls.cert;
    options.tls.key = config.tls.key;
    options.token_file = held.access.token_file;
    // With a token, machines need no own certificates.
    if (options.token_file.empty()) options.tls.ca = config.tls.ca;
  }
  options.checkpoint_key = config.checkpoint_key;
  MUSTER_ASSIGN_OR_RETURN(held.coordinator, start_coordinator(options));
  if (record.ok()) {
    held.record = *std::move(record);
    const absl::Status published = held.record->Publish({
        .job = job,
        .pid = getpid(),
        .started = absl::Now(),
        .address = held.coordinator->address(),
        .token_file = Absolute(held.access.token_file),
        .tls = {.ca = Absolute(held.access.tls.ca),
                .cert = Absolute(held.access.tls.cert),
                .key = Absolute(held.access.tls.key)},
    });
    // The job runs anyway; muster status needs an address then.
    if (!published.ok()) MUSTER_LOG(Warning) << published.message();
  }
  return held;
}

LaunchOutcome Run(const LaunchPlan& plan, const CoordinatorFactory& start_coordinator) {
  const LaunchConfig& config = plan.config;
  absl::Status enough = agent::EnsureDescriptors(config.processes_here);
  enough.Update(agent::EnsureThreads(config.processes_here));
  if (!enough.ok()) return Refused(std::move(enough));
  // First, while this process has one thread. Not for other commands, which Ctrl-C ends as usual.
  agent::BlockJobSignals();
  absl::StatusOr<std::unique_ptr<agent::ProcessHost>> host = agent::ProcessHost::Start();
  if (!host.ok()) return Refused(host.status());

  const rpc::Address coordinator = CoordinatorOf(config);
  std::string address = coordinator.ToString();
  const std::string job = JobName(config);
  Held held = {
      .access = {config.tls, config.token_file},
  };
  int machine_rank = config.machine_rank;
  const bool any_rank = machine_rank < 0;
  if ((machine_rank == 0 || (any_rank && rpc::IsOwnAddress(coordinator.host))) &&
      !plan.coordinator_runs) {
    absl::StatusOr<Held> started = HoldCoordinator(config, job, plan.variables, start_coordinator);
    // For the same reason as in RunNodeJob: NOT_FOUND means that the program is missing.
    if (absl::IsNotFound(started.status())) {
      return Refused(absl::InvalidArgumentError(started.status().message()));
    }
    // Another launch on this host may be machine 0.
    const bool taken = any_rank && absl::IsAlreadyExists(started.status());
    if (!started.ok() && !taken) return Refused(started.status());
    if (started.ok()) {
      held = *std::move(started);
      address = held.coordinator->address();
      machine_rank = 0;
    }
  }

  agent::NodeJobOptions options;
  options.agent = MakeAgentOptions(plan, job, address);
  options.channel.tls = held.access.tls;
  options.channel.token_file = held.access.token_file;
  options.num_nodes = config.num_machines;
  options.min_nodes = config.min_machines;
  options.last_call = config.last_call;
  options.grow_after = config.grow_after;
  options.node_rank = machine_rank;
  options.another_is_first = machine_rank != 0 && !plan.coordinator_runs;
  options.hosts_coordinator = held.coordinator != nullptr;
  options.host = machine_rank == 0 ? coordinator.host : rpc::OwnAddressTowards(coordinator);
  options.join_timeout = config.join_timeout;
  options.outage_tolerance = config.outage_tolerance;
  options.hang_timeout = config.hang_timeout;
  options.hub_listen = config.hub_listen;
  options.lease = config.lease;
  options.log_limits = {.max_bytes = int64_t{config.log_max_mib} << 20, .files = config.log_files};
  options.show_output = config.log_dir.empty() || config.tee;
  options.prefix = config.prefix.value_or(isatty(STDOUT_FILENO) != 0);
  const agent::NodeJobResult result = agent::RunNodeJob(std::move(options), **host);
  // Nothing that would have to be stopped in order runs any longer.
  agent::EndByJobSignals();
  // All processes that may still run end before the coordinator does.
  host->reset();

  LaunchOutcome outcome;
  outcome.restarts = result.job.restarts;
  outcome.signal = result.signal;
  switch (result.job.outcome) {
    case agent::JobResult::Outcome::kSucceeded:
      outcome.kind = LaunchOutcome::Kind::kSucceeded;
      break;
    case agent::JobResult::Outcome::kFailed:
      outcome.kind = LaunchOutcome::Kind::kFailed;
      outcome.why = result.job.failure.why;
      outcome.last_lines = result.job.failure.last_lines;
      break;
    case agent::JobResult::Outcome::kStopped:
      outcome.kind = LaunchOutcome::Kind::kStopped;
      break;
    case agent::JobResult::Outcome::kRefused:
      outcome = Refused(result.job.status);
      break;
  }
  if (held.coordinator != nullptr) held.coordinator->End(WhyEnded(outcome));
  return outcome;
}

absl::StatusOr<ProgramOutput> RunProgram(const std::vector<std::string>& argv,
                                         const std::vector<std::string>& without) {
  MUSTER_ASSIGN_OR_RETURN(const std::unique_ptr<agent::ProcessHost> host,
                          agent::ProcessHost::Start());
  ProgramOutput output;
  agent::ProcessOptions options;
  options.argv = argv;
  for (char** entry = environ; *entry != nullptr; ++entry) {
    const absl::string_view word = *entry;
    const absl::string_view name = word.substr(0, word.find('='));
    if (std::find(without.begin(), without.end(), name) != without.end()) continue;
    options.env.emplace_back(word);
  }
  // Both are called on one thread, which is done with them when Wait returns.
  options.on_line = [&output](agent::OutputStream stream, absl::string_view line) {
    absl::StrAppend(stream == agent::OutputStream::kStdout ? &output.out : &output.err, line, "\n");
  };
  MUSTER_ASSIGN_OR_RETURN(const std::shared_ptr<agent::Process> process,
                          host->Spawn(std::move(options)));
  const agent::ProcessExit exit = process->Wait();
  if (!exit.stuck.empty()) {
    return absl::InternalError(absl::StrCat(argv[0], " ", exit.ToString()));
  }
  output.exit_code = exit.signal != 0 ? 128 + exit.signal : exit.exit_code;
  return output;
}

absl::Status ReplaceProcess(const std::vector<std::string>& argv) {
  std::vector<char*> words;
  for (const std::string& word : argv) words.push_back(const_cast<char*>(word.c_str()));
  words.push_back(nullptr);
  execv(words[0], words.data());
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot run ", argv[0]));
}

}  // namespace

LaunchBackend LocalBackend(CoordinatorFactory start_coordinator) {
  return {.find_program = agent::FindProgram,
          .run = [start_coordinator = std::move(start_coordinator)](
                     const LaunchPlan& plan) { return Run(plan, start_coordinator); },
          .replace_process = ReplaceProcess,
          .run_program = RunProgram};
}

}  // namespace muster::client
