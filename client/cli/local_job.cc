#include "client/cli/local_job.h"

#include <unistd.h>

#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "worker/agent/job_signals.h"
#include "worker/agent/node_job.h"
#include "worker/agent/process.h"
#include "worker/agent/worker_environment.h"

namespace muster::client {
namespace {

LaunchOutcome Refused(absl::Status status) {
  LaunchOutcome outcome;
  outcome.kind = LaunchOutcome::Kind::kRefused;
  outcome.status = std::move(status);
  return outcome;
}

std::string AddressText(const std::string& ip, int port) {
  return absl::StrCat(absl::StrContains(ip, ':') ? absl::StrCat("[", ip, "]") : ip, ":", port);
}

agent::AgentOptions MakeAgentOptions(const LaunchPlan& plan, const std::string& coordinator) {
  const LaunchConfig& config = plan.config;
  agent::AgentOptions options;
  options.argv = plan.argv;
  options.slots = config.processes_here;
  options.inherited = plan.variables;
  if (!config.gpu_ids.empty() && config.gpu_ids != "all") {
    options.inherited["CUDA_VISIBLE_DEVICES"] = config.gpu_ids;
  }
  options.max_restarts = config.max_restarts;
  options.stop_grace = config.stop_grace;
  options.log_dir = config.log_dir;

  agent::WorkerEnvironment& worker = options.worker;
  worker.job = config.job_name;
  if (worker.job.empty()) {
    // Machines that do not share a made-up name must share a fixed one.
    worker.job =
        config.num_machines > 1 ? "launch" : absl::StrCat("launch-", RandomHex().substr(0, 8));
  }
  worker.coordinator = coordinator;
  worker.tls_ca = config.tls_ca;
  worker.tls_cert = config.tls_cert;
  worker.tls_key = config.tls_key;
  worker.mixed_precision = config.mixed_precision;
  worker.cpu = config.cpu;
  worker.gradient_accumulation_steps = config.gradient_accumulation_steps;
  worker.debug = config.debug;
  worker.threads = config.threads_per_process;
  worker.cores = plan.cores;
  worker.extra = config.env;
  return options;
}

LaunchOutcome Run(const LaunchPlan& plan, const CoordinatorFactory& start_coordinator) {
  const LaunchConfig& config = plan.config;
  for (const auto& [name, value] : config.env) {
    if (agent::IsPlaceVariable(name)) {
      return Refused(absl::InvalidArgumentError(absl::StrCat(
          "env: ", name, " cannot be set: it tells each process its place in the job")));
    }
  }
  // First, while this process has one thread. Not for other commands: Ctrl-C ends those as usual.
  agent::BlockJobSignals();
  absl::StatusOr<std::unique_ptr<agent::ProcessHost>> host = agent::ProcessHost::Start();
  if (!host.ok()) return Refused(host.status());

  const std::string ip = config.coordinator_ip.empty() ? "127.0.0.1" : config.coordinator_ip;
  std::string address = AddressText(ip, config.coordinator_port);
  std::unique_ptr<EmbeddedCoordinator> coordinator;
  if (config.machine_rank == 0 && !plan.coordinator_runs) {
    absl::StatusOr<std::unique_ptr<EmbeddedCoordinator>> started =
        start_coordinator({address, config.tls_ca, config.tls_cert, config.tls_key});
    if (!started.ok()) return Refused(started.status());
    coordinator = *std::move(started);
    address = coordinator->address();
  }

  agent::NodeJobOptions options;
  options.agent = MakeAgentOptions(plan, address);
  options.channel.tls_ca = config.tls_ca;
  options.channel.tls_cert = config.tls_cert;
  options.channel.tls_key = config.tls_key;
  options.num_nodes = config.num_machines;
  options.node_rank = config.machine_rank;
  options.host = config.machine_rank == 0 ? ip : "";
  options.join_timeout = config.join_timeout;
  options.outage_tolerance = config.outage_tolerance;
  options.log_limits = {.max_bytes = int64_t{config.log_max_mib} << 20, .files = config.log_files};
  options.show_output = config.log_dir.empty() || config.tee;
  options.prefix = config.prefix.value_or(isatty(STDOUT_FILENO) != 0);
  const agent::NodeJobResult result = agent::RunNodeJob(std::move(options), **host);
  // Everything that may still run ends before the coordinator does.
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
      return Refused(result.job.status);
  }
  return outcome;
}

}  // namespace

LaunchBackend LocalBackend(CoordinatorFactory start_coordinator) {
  return {.find_program = agent::FindProgram,
          .run = [start_coordinator = std::move(start_coordinator)](const LaunchPlan& plan) {
            return Run(plan, start_coordinator);
          }};
}

}  // namespace muster::client
