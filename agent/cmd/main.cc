#include <fcntl.h>
#include <sys/prctl.h>
#include <sys/resource.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <climits>
#include <cstdio>
#include <filesystem>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/time/time.h"
#include "agent/attempt_end.h"
#include "agent/attempt_files.h"
#include "agent/attempt_restarts.h"
#include "agent/descriptors.h"
#include "agent/gpu_facts.h"
#include "agent/job_gpus.h"
#include "agent/job_signals.h"
#include "agent/node_job.h"
#include "agent/node_service.h"
#include "agent/process.h"
#include "agent/process_limits.h"
#include "agent/worker_groups.h"
#include "base/defaults.h"
#include "base/descriptor_limit.h"
#include "base/exit_code.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/flags/service_settings.h"
#include "base/log.h"
#include "base/log_variables.h"
#include "base/machine.h"
#include "base/mutex.h"
#include "base/service_notifier.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "base/variable_list.h"
#include "base/version.h"
#include "proto/failure_policy.h"
#include "proto/job_limits.h"
#include "proto/name_value.h"
#include "rpc/address.h"
#include "rpc/token.h"

namespace muster::agent {
namespace {

constexpr char kAbout[] =
    "Muster's node agent: starts and watches this machine's workers of a job whose coordinator "
    "already runs.";
constexpr char kUsage[] =
    "Usage: muster-agent --coordinator IP:PORT [OPTIONS] -- PROGRAM [ARGS...]\n"
    "       muster-agent --serve --coordinator IP:PORT --state_dir FOLDER [OPTIONS]";
constexpr char kFooter[] =
    "\nExit codes are those of muster launch (docs/cli.md): 0 the job succeeded; 1 a worker "
    "failed; 2 wrong options;\n"
    "5 the other machines did not join in time; 7 no coordinator; 8 it refuses this agent's token; "
    "126, 127 the\n"
    "program; 130, 143 stopped.\n"
    "--config and --print_config work only with --serve (muster-agent --serve --help), whose file "
    "has a machine's settings.\n"
    "For the settings of one job use muster launch --config_file, or job.yaml with muster "
    "submit.";

int Fail(int code, absl::string_view message) {
  std::fprintf(stderr, "muster-agent: %s\n", std::string(message).c_str());
  return code;
}

int CodeOf(const absl::Status& status) {
  switch (status.code()) {
    case absl::StatusCode::kInvalidArgument:
    case absl::StatusCode::kFailedPrecondition:
      return kExitUsage;
    case absl::StatusCode::kAborted:
    case absl::StatusCode::kAlreadyExists:  // the port of --hub_listen
      return kExitConflict;
    case absl::StatusCode::kDeadlineExceeded:
      return kExitTimeout;
    case absl::StatusCode::kUnavailable:
      return kExitUnreachable;
    case absl::StatusCode::kPermissionDenied:
    case absl::StatusCode::kUnauthenticated:
      return kExitDenied;
    case absl::StatusCode::kNotFound:
      return kExitProgramMissing;
    default:
      return kExitInternal;
  }
}

int Report(const NodeJobResult& result) {
  switch (result.job.outcome) {
    case JobResult::Outcome::kSucceeded:
      return 0;
    case JobResult::Outcome::kStopped:
      return kExitSignal + result.signal;
    case JobResult::Outcome::kRefused:
      return Fail(CodeOf(result.job.status), result.job.status.message());
    case JobResult::Outcome::kFailed:
      break;
  }
  std::string text = absl::StrCat(result.job.failure.why, "; the job has failed");
  for (const std::string& line : result.job.failure.last_lines)
    absl::StrAppend(&text, "\n  | ", line);
  return Fail(kExitJobFailed, text);
}

struct Flags {
  NodeJobOptions options;
  int processes = 0;
  std::string join_timeout = "10m", stop_grace = "10s";
  std::string outage_tolerance = absl::StrCat(absl::ToInt64Seconds(kDefaultOutageTolerance), "s");
  std::string hang_timeout = "0";
  std::string failure_policy;
  std::string lease = absl::StrCat(absl::ToInt64Seconds(kDefaultLease), "s");
  bool no_prefix = false, tee = false;
  int log_max_mib = static_cast<int>(options.log_limits.max_bytes >> 20);
  std::string host;
  // For one attempt of a submitted job.
  std::string attempt_dir, workdir, env_file;
  int attempt_lock = -1;
  rlim_t open_files = 0;
  int restarts_in_place = 0;
  WorkerGroups::Options groups;
};

// The job's coordinator and machines.
void AddLayoutFlags(CLI::App* app, Flags* flags) {
  NodeJobOptions* const options = &flags->options;
  WorkerEnvironment* const worker = &options->agent.worker;
  app->add_option("--coordinator", worker->coordinator, "IP:PORT or unix:PATH of the coordinator");
  app->add_option("--num_processes", flags->processes,
                  "processes of the whole job (default: one for each machine)")
      ->check(CLI::Range(1, 1'000'000));
  app->add_option("--num_machines", options->num_nodes, "machines of the job")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app->add_option("--machine_rank", options->node_rank,
                  "index of this machine; -1: the coordinator assigns it")
      ->capture_default_str();
  app->add_option(
         "--rack", worker->rack,
         "rack of this machine; without --machine_rank, machines in one rack get adjacent ranks")
      ->envname("MUSTER_RACK");
  app->add_option("--nvlink_domain", worker->nvlink_domain,
                  "NVLink domain of this machine, within its rack")
      ->envname("MUSTER_NVLINK_DOMAIN");
  app->add_option("--job_name", worker->job,
                  "name of the job at the coordinator (default: generated); required with several "
                  "machines, the same on all");
  app->add_option(
      "--host", flags->host,
      "address at which programs on other machines reach programs on this one (default: "
      "the coordinator's)");
}

// Flags of the runner that a node agent starts for one attempt.
void AddAttemptFlags(CLI::App* app, Flags* flags) {
  app->add_option("--attempt_dir", flags->attempt_dir,
                  "folder of an attempt: this process writes runner.pid and, at its end, end.json");
  app->add_option("--attempt_lock", flags->attempt_lock,
                  "descriptor that this process and all that it starts keep open")
      ->check(CLI::Range(3, 1'000'000));
  app->add_option("--open_files", flags->open_files,
                  "soft limit of open files of the program (default: that of this process)");
  app->add_option("--memory_socket", flags->options.memory_socket,
                  "name of the node agent's socket that holds memory between attempts");
  app->add_option("--earlier_attempts", flags->options.agent.worker.restart_count,
                  "attempts of the job before this one, for the variables of the processes")
      ->check(CLI::Range(0, 1'000'000'000));
  app->add_option("--restarts_of_job", flags->options.agent.worker.max_restarts,
                  "restarts that the job may have, for the variables of the processes")
      ->check(CLI::Range(0, 1'000'000'000));
  app->add_option("--restarts_in_place", flags->restarts_in_place,
                  "with --attempt_dir: how often lost processes of an attempt may restart while "
                  "the others continue")
      ->check(CLI::Range(0, 1'000'000'000));
  app->add_option("--env_file", flags->env_file,
                  "file of NAME=VALUE, each with a null byte at its end: variables of the program; "
                  "it is removed");
  app->add_option("--workdir", flags->workdir, "folder in which the program runs");
  app->add_option("--control_group", flags->groups.folder,
                  "folder of a control group for this process and those of the program");
  app->add_option("--memory_limit", flags->groups.memory_bytes,
                  "bytes of memory for each process, with --control_group")
      ->check(CLI::NonNegativeNumber);
  app->add_option("--cpu_limit", flags->groups.cpus, "CPUs for each process, with --control_group")
      ->check(CLI::Range(1, 1'000'000));
}

void AddTrainingFlags(CLI::App* app, Flags* flags) {
  NodeJobOptions* const options = &flags->options;
  WorkerEnvironment* const worker = &options->agent.worker;
  app->add_option_function<std::string>(
         "--mixed_precision", [worker](const std::string& text) { worker->mixed_precision = text; },
         "precision of the forward pass; default: $MUSTER_MIXED_PRECISION, else no")
      ->check(CLI::IsMember({"no", "bf16", "fp16"}));
  app->add_option("--gradient_accumulation_steps", worker->gradient_accumulation_steps,
                  "backward passes per optimizer step; default: the program's own setting, else 1")
      ->check(CLI::Range(1, 1'000'000));
  app->add_flag_callback(
      "--cpu", [worker] { worker->cpu = true; }, "train on the CPU; default: as $MUSTER_CPU says");
  app->add_flag_callback(
      "--debug", [worker] { worker->debug = true; },
      "check every collective across processes; default: as $MUSTER_DEBUG says");
  app->add_option("--max_restarts", options->agent.max_restarts,
                  "how often to restart all processes after a failure")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  app->add_option(
      "--failure_policy", flags->failure_policy,
      "restarts after each class of end, max_restarts=3,oom=1 for example: failed, oom, "
      "hang; max_restarts for all of them together");
  app->add_option("--user_error_code", options->agent.user_error_codes,
                  "exit code of the program after which a restart cannot help, besides 2, 126 and "
                  "127; may be repeated");
}

void AddOutputFlags(CLI::App* app, Flags* flags) {
  NodeJobOptions* const options = &flags->options;
  app->add_option("--log_dir", options->agent.log_dir,
                  "write output to FOLDER/attempt_A/rank_R.log; logs of an earlier job are moved "
                  "to FOLDER/before_N");
  app->add_option("--log_max_mib", flags->log_max_mib,
                  "size in MiB at which such a file is rotated to rank_R.log.1; 0: no limit")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  app->add_option("--log_files", options->log_limits.files,
                  "how many such files to keep for each process")
      ->check(CLI::Range(1, 1'000'000))
      ->capture_default_str();
  app->add_flag("--tee", flags->tee, "with --log_dir: write to the terminal as well");
  app->add_flag("--no_prefix", flags->no_prefix, "do not prefix lines with [rank]:");
}

void AddTlsFlags(CLI::App* app, rpc::TlsFiles* tls) {
  app->add_option("--tls_ca", tls->ca, "CA certificates that must have signed the coordinator's")
      ->envname("MUSTER_TLS_CA");
  app->add_option("--tls_cert", tls->cert, "certificate of this machine")
      ->envname("MUSTER_TLS_CERT");
  app->add_option("--tls_key", tls->key, "its private key")->envname("MUSTER_TLS_KEY");
}

// Flags for how long it waits, and how it connects.
void AddConnectionFlags(CLI::App* app, Flags* flags) {
  NodeJobOptions* const options = &flags->options;
  WorkerEnvironment* const worker = &options->agent.worker;
  app->add_option("--stop_grace", flags->stop_grace, "time between SIGTERM and SIGKILL")
      ->capture_default_str();
  app->add_option("--join_timeout", flags->join_timeout, "how long to wait for the other machines")
      ->capture_default_str();
  app->add_option("--outage_tolerance", flags->outage_tolerance,
                  "how long the coordinator may be unreachable before the job fails")
      ->envname("MUSTER_OUTAGE_TOLERANCE")
      ->capture_default_str();
  app->add_option("--hang_timeout", flags->hang_timeout,
                  "after the first finished step: fails the job if no rank shows progress for this "
                  "long; at least 10s, or 0: never")
      ->capture_default_str();
  app->add_option("--hub_listen", options->hub_listen,
                  "IP:PORT or unix:PATH at which this agent offers to be a hub for other agents; "
                  "port 0 selects a free port");
  app->add_option("--lease", flags->lease,
                  "how long a machine or worker may be silent, while others are not, before it "
                  "counts as lost")
      ->envname("MUSTER_LEASE")
      ->capture_default_str();
  AddTlsFlags(app, &worker->tls);
  app->add_option("--token_file", options->channel.token_file,
                  "file with the coordinator's token; only its owner may read it")
      ->envname("MUSTER_TOKEN_FILE");
}

// "--state-dir" is "--state_dir".
void Normalize(std::vector<std::string>* words) {
  for (std::string& flag : *words) {
    if (flag.rfind("--", 0) == 0)
      std::replace(flag.begin() + 2, flag.begin() + std::min(flag.find('='), flag.size()), '-',
                   '_');
  }
}

// Returns nullopt to continue, else the exit code. `words`: those before the program.
std::optional<int> ReadFlags(std::vector<std::string> words, Flags* flags) {
  CLI::App app(kAbout, "muster-agent");
  app.footer(kFooter);
  AddLayoutFlags(&app, flags);
  AddTrainingFlags(&app, flags);
  AddOutputFlags(&app, flags);
  AddConnectionFlags(&app, flags);
  AddAttemptFlags(&app, flags);
  Normalize(&words);
  for (const std::string& word : words) {
    const absl::string_view flag = absl::string_view(word).substr(0, word.find('='));
    if (flag == "--config" || flag == "--print_config") {
      return Fail(
          kExitUsage,
          absl::StrCat(flag,
                       " works only with --serve, whose config file has a machine's settings; pass "
                       "the settings of one job as flags, or use muster launch --config_file"));
    }
  }
  std::reverse(words.begin(), words.end());  // the order in which CLI11 takes them
  try {
    app.parse(words);
  } catch (const CLI::CallForHelp&) {
    std::printf(
        "%s\n",
        absl::StrReplaceAll(app.help(), {{"Usage: muster-agent [OPTIONS]", kUsage}}).c_str());
    return 0;
  } catch (const CLI::ParseError& error) {
    return Fail(kExitUsage, absl::StrCat(error.what(), "; see muster-agent --help"));
  }
  return std::nullopt;
}

// Works out the layout of the job from the flags.
absl::Status SetLayout(Flags* flags) {
  NodeJobOptions& options = flags->options;
  WorkerEnvironment& worker = options.agent.worker;
  int processes = flags->processes;
  if (processes == 0) processes = options.num_nodes;
  if (processes % options.num_nodes != 0) {
    return absl::InvalidArgumentError(absl::StrCat("--num_processes ", processes,
                                                   " cannot be divided evenly among ",
                                                   options.num_nodes, " machines"));
  }
  if (options.node_rank >= options.num_nodes) {
    return absl::InvalidArgumentError(
        absl::StrCat("--machine_rank ", options.node_rank, " is not below --num_machines ",
                     options.num_nodes, ": machines are numbered from 0"));
  }
  if (worker.job.empty() && options.num_nodes > 1) {
    return absl::InvalidArgumentError(
        "--job_name is required with --num_machines above 1: the machines of a job find "
        "each other by this name");
  }
  if (!IsValidUtf8(worker.job)) {
    return absl::InvalidArgumentError(
        absl::StrCat("--job_name ", Printable(worker.job), " is not UTF-8"));
  }
  // Two jobs of one name would replace each other's workers.
  if (worker.job.empty()) worker.job = absl::StrCat("agent-", RandomHex().substr(0, 8));
  options.agent.slots = processes / options.num_nodes;
  return absl::OkStatus();
}

absl::Status SetFailurePolicy(Flags* flags) {
  if (flags->failure_policy.empty()) return absl::OkStatus();
  std::optional<FailurePolicy> policy = ParseFailurePolicy(flags->failure_policy);
  if (!policy.has_value() || policy->class_limits.contains("preempted")) {
    return absl::InvalidArgumentError(
        absl::StrCat("--failure_policy ", flags->failure_policy,
                     ": write restarts by class, such as max_restarts=3,oom=1: failed, oom, hang "
                     "and node_lost"));
  }
  AgentOptions& agent = flags->options.agent;
  if (agent.max_restarts > 0)
    policy->max_restarts = policy->max_restarts.value_or(agent.max_restarts);
  CompletePolicy(&*policy);
  agent.max_restarts = policy->max_restarts.value_or(0);
  agent.class_limits = ToClassCounts(policy->class_limits);
  return absl::OkStatus();
}

absl::Status SetDurations(Flags* flags) {
  NodeJobOptions& options = flags->options;
  if (!absl::ParseDuration(flags->stop_grace, &options.agent.stop_grace) ||
      !absl::ParseDuration(flags->join_timeout, &options.join_timeout) ||
      !absl::ParseDuration(flags->outage_tolerance, &options.outage_tolerance) ||
      !absl::ParseDuration(flags->lease, &options.lease) ||
      !absl::ParseDuration(flags->hang_timeout, &options.hang_timeout) ||
      std::min({options.agent.stop_grace, options.join_timeout, options.outage_tolerance}) <
          absl::ZeroDuration()) {
    return absl::InvalidArgumentError(
        "--stop_grace, --join_timeout, --outage_tolerance, --hang_timeout and --lease (or "
        "MUSTER_OUTAGE_TOLERANCE and MUSTER_LEASE) are durations with a unit, such as 30s or 10m");
  }
  if (options.hang_timeout != absl::ZeroDuration() && options.hang_timeout < kLeastHangTimeout) {
    return absl::InvalidArgumentError(absl::StrCat("--hang_timeout is ", flags->hang_timeout,
                                                   ": give 0 for none, or at least ",
                                                   absl::FormatDuration(kLeastHangTimeout)));
  }
  if (options.lease < kShortestLease) {
    return absl::InvalidArgumentError(
        absl::StrCat("--lease (or MUSTER_LEASE) is ", Printable(flags->lease), ": give at least ",
                     absl::FormatDuration(kShortestLease), ", agents beat every 2 s"));
  }
  return absl::OkStatus();
}

// Takes over the parts of this process's environment that the workers get.
void TakeSurroundings(NodeJobOptions* options) {
  cpu_set_t cores;
  if (sched_getaffinity(0, sizeof(cores), &cores) == 0)
    options->agent.worker.cores = CPU_COUNT(&cores);
  options->agent.inherited = ProcessVariables();
}

rlimit OpenFiles() {
  rlimit limit = {};
  getrlimit(RLIMIT_NOFILE, &limit);
  return limit;
}

// The limit is raised again for this process, but not for the program.
void LimitOpenFiles(rlim_t soft) {
  rlimit limit = OpenFiles();
  limit.rlim_cur = std::min(soft, limit.rlim_max);
  setrlimit(RLIMIT_NOFILE, &limit);
}

NodeJobResult Refused(absl::Status status) {
  NodeJobResult result;
  result.job.outcome = JobResult::Outcome::kRefused;
  result.job.status = std::move(status);
  return result;
}

NodeJobResult RunJob(NodeJobOptions options) {
  absl::Status enough = EnsureDescriptors(options.agent.slots);
  enough.Update(EnsureThreads(options.agent.slots));
  if (!enough.ok()) return Refused(enough);
  absl::StatusOr<std::unique_ptr<ProcessHost>> host = ProcessHost::Start();
  if (!host.ok()) return Refused(host.status());
  return RunNodeJob(std::move(options), **host);
}

// Runs the job and returns the exit code.
int RunAndReport(NodeJobOptions options, const Flags& flags) {
  std::map<std::string, std::string>& variables = options.agent.worker.extra;
  if (!flags.env_file.empty()) {
    absl::StatusOr<std::map<std::string, std::string>> taken = TakeVariables(flags.env_file);
    if (!taken.ok()) return Fail(kExitInternal, taken.status().message());
    variables = *std::move(taken);
  }
  const auto path = variables.find("PATH");
  // The program and the folder are given by the user; another node may lack them.
  absl::StatusOr<std::string> program =
      !flags.workdir.empty() && chdir(flags.workdir.c_str()) != 0
          ? absl::ErrnoToStatus(errno, absl::StrCat("cannot run in the folder ", flags.workdir))
          : FindProgram(options.agent.argv[0],
                        path != variables.end() ? path->second : options.agent.inherited["PATH"]);
  const WorkerGroups groups(flags.groups);
  absl::Status entered;
  if (!flags.groups.folder.empty()) {
    entered = groups.Enter();
    options.agent.groups = &groups;
  }
  AttemptRestarts restarts({.folder = flags.attempt_dir,
                            .left = flags.restarts_in_place,
                            .user_error_codes = options.agent.user_error_codes,
                            .num_nodes = options.num_nodes});
  if (!flags.attempt_dir.empty() && flags.restarts_in_place > 0) options.agent.gate = &restarts;
  std::optional<AttemptSync> on_disk;
  if (!flags.attempt_dir.empty()) {
    const absl::Status status =
        PutFile(JoinPath(flags.attempt_dir, "runner.pid"), absl::StrCat(getpid()));
    if (!status.ok()) return Fail(kExitInternal, status.message());
    // An attempt runs on a node only once: the next agent has to know about it even after a loss of
    // power. The disk works while this process gets ready.
    on_disk.emplace(flags.attempt_dir);
    options.agent.ready = [&on_disk] { return on_disk->Wait(); };
  }
  const NodeJobResult result = !program.ok()   ? Refused(program.status())
                               : !entered.ok() ? Refused(entered)
                                               : RunJob(std::move(options));
  if (!flags.groups.folder.empty()) groups.End();
  if (!flags.attempt_dir.empty()) {
    v1::AttemptEnd end =
        restarts.Describe(result.job, result.hang.has_value() ? &*result.hang : nullptr);
    if (!program.ok()) end.set_end_class(v1::END_CLASS_USER_ERROR);
    const absl::Status status = WriteEnd(JoinPath(flags.attempt_dir, "end.json"), end);
    // The exit code still tells the node how the job has ended.
    if (!status.ok()) std::fprintf(stderr, "muster-agent: %s\n", status.ToString().c_str());
  }
  // Only now, because the coordinator stops an attempt whose end another node has reported, and a
  // runner that ended without a report would be taken for a failed node.
  EndByJobSignals();
  if (!program.ok()) {
    return Fail(absl::IsNotFound(program.status()) ? kExitProgramMissing : kExitNotExecutable,
                program.status().message());
  }
  return Report(result);
}

// ---- --serve

constexpr char kServeVariables[] = "MUSTER_AGENT_";

struct ServeFlags {
  NodeServiceOptions options;
  int cpus = -1, gpus = -1, memory_mib = -1, gpu_memory_mib = -1, keep_logs_hours = 24 * 7;
  std::vector<std::string> labels;
  bool serve = false;
};

// With a GPU that hangs, a driver may never answer: the agent must start nevertheless.
absl::StatusOr<GpuFacts> AskDriver() {
  constexpr absl::Duration kPatience = absl::Seconds(10);
  struct Answer {
    absl::StatusOr<GpuFacts> facts = absl::UnknownError("not asked");
    Notification done;
  };
  const auto answer = std::make_shared<Answer>();
  std::thread([answer] {
    answer->facts = ReadGpuFacts();
    answer->done.Notify();
  }).detach();
  if (!answer->done.WaitForNotificationWithTimeout(kPatience)) {
    return absl::UnavailableError(
        absl::StrCat("the driver has not answered for ", absl::FormatDuration(kPatience),
                     ": check whether nvidia-smi works, or set --gpu_memory_mib"));
  }
  return answer->facts;
}

// `gpus` are those of `info`; `found`: how many the machine has.
void SetGpuFacts(const std::vector<JobGpu>& gpus, int found, int memory_mib, v1::NodeInfo* info) {
  GpuFacts facts;
  const bool all_said = memory_mib >= 0 && !info->nvlink_domain().empty();
  if (found > 0 && info->gpus_size() > 0 && !all_said) {
    absl::StatusOr<GpuFacts> read = AskDriver();
    if (read.ok()) {
      facts = *std::move(read);
    } else {
      MUSTER_LOG(Warning) << "the memory of the GPUs is not known: " << read.status().message();
    }
  }
  // Otherwise the driver's GPUs are not the same ones.
  if (static_cast<int>(facts.memory_bytes.size()) != found) facts.memory_bytes.clear();
  for (const int64_t bytes : MemoryOfJobGpus(gpus, facts.memory_bytes)) {
    info->add_gpu_memory_bytes(memory_mib >= 0 ? int64_t{memory_mib} << 20 : bytes);
  }
  if (info->nvlink_domain().empty() && info->gpus_size() > 0) {
    info->set_nvlink_domain(facts.nvlink_domain);
  }
}

// Sets the range from which the kernel chooses ports of programs that ask for any.
void SetFreePorts(v1::NodeInfo* info) {
  const absl::StatusOr<std::string> text = ReadFile("/proc/sys/net/ipv4/ip_local_port_range", 256);
  if (!text.ok()) return;
  const std::vector<absl::string_view> ends =
      absl::StrSplit(*text, absl::ByAnyChar(" \t\n"), absl::SkipEmpty());
  int first = 0, last = 0;
  if (ends.size() != 2 || !absl::SimpleAtoi(ends[0], &first) || !absl::SimpleAtoi(ends[1], &last)) {
    return;
  }
  info->set_first_free_port(first);
  info->set_last_free_port(last);
}

absl::Status SetInventory(const Machine& machine, ServeFlags* flags) {
  v1::NodeInfo* const info = &flags->options.info;
  info->set_host(machine.hostname);
  info->set_version(std::string(kVersion));
  info->set_cpus(flags->cpus >= 0 ? flags->cpus : machine.cores);
  info->set_memory_bytes(flags->memory_mib >= 0 ? int64_t{flags->memory_mib} << 20
                                                : machine.memory_bytes);
  const int found = static_cast<int>(machine.gpus.size());
  const std::map<std::string, std::string>& variables = flags->options.environment;
  const auto visible = variables.find("CUDA_VISIBLE_DEVICES");
  MUSTER_ASSIGN_OR_RETURN(
      const std::vector<JobGpu> gpus,
      ChooseJobGpus(visible != variables.end() ? std::optional(visible->second) : std::nullopt,
                    machine.gpus, flags->gpus));
  for (const JobGpu& gpu : gpus) {
    const bool known = gpu.index >= 0 && gpu.index < found;
    info->add_gpus(known ? machine.gpus[gpu.index].model : "");
    flags->options.gpus.push_back(gpu.device);
  }
  SetGpuFacts(gpus, found, flags->gpu_memory_mib, info);
  SetFreePorts(info);
  std::map<std::string, std::string> labels;
  for (const std::string& label : flags->labels) {
    const size_t equals = label.find('=');
    if (equals == std::string::npos || equals == 0) {
      return absl::InvalidArgumentError(
          absl::StrCat("--label ", label, " is not KEY=VALUE, for example --label gpu=h200"));
    }
    const std::string name = label.substr(0, equals);
    if (!labels.emplace(name, label.substr(equals + 1)).second) {
      return absl::InvalidArgumentError(
          absl::StrCat("--label ", name, " has two values: give one"));
    }
  }
  for (const auto& [name, value] : labels) AddNameValue(name, value, info->mutable_labels());
  if (flags->options.node.empty()) flags->options.node = machine.hostname;
  return absl::OkStatus();
}

std::string Absolute(const std::string& path) {
  std::error_code error;
  return path.empty() ? "" : std::filesystem::absolute(path, error).string();
}

// Takes the token from standard input. From then on other processes of this user cannot inspect
// this process.
absl::Status TakeToken(rpc::ChannelOptions* channel) {
  // Protects its memory and its descriptors, one of which may be a file that root has opened for
  // it.
  if (prctl(PR_SET_DUMPABLE, 0) != 0) return absl::ErrnoToStatus(errno, "prctl");
  std::string text(2048, '\0');
  text.resize(std::fread(text.data(), 1, text.size(), stdin));
  if (std::ferror(stdin) != 0) {
    return absl::ErrnoToStatus(errno, "--token_file -: cannot read standard input");
  }
  MUSTER_ASSIGN_OR_RETURN(channel->token, rpc::ParseToken(text, "--token_file -: standard input"));
  channel->token_file.clear();
  const int null = open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (null < 0 || dup2(null, STDIN_FILENO) < 0) return absl::ErrnoToStatus(errno, "/dev/null");
  close(null);
  return absl::OkStatus();
}

// The program of one attempt is this one, with the flags to reach the coordinator.
absl::Status SetRunner(NodeServiceOptions* options) {
  char self[PATH_MAX] = "";
  if (readlink("/proc/self/exe", self, sizeof(self) - 1) < 0) {
    return absl::ErrnoToStatus(errno, "cannot find this program");
  }
  options->runner = {self, absl::StrCat("--coordinator=", options->coordinator)};
  rpc::ChannelOptions& channel = options->channel;
  for (auto& [flag, file] : {std::pair<const char*, std::string*>{"tls_ca", &channel.tls.ca},
                             {"tls_cert", &channel.tls.cert},
                             {"tls_key", &channel.tls.key}}) {
    if (file->empty()) continue;
    *file = Absolute(*file);
    options->runner.push_back(absl::StrCat("--", flag, "=", *file));
  }
  channel.token_file = Absolute(channel.token_file);  // no flag: each attempt has its own token
  return absl::OkStatus();
}

int Serve(std::vector<std::string> words) {
  ServeFlags flags;
  NodeServiceOptions& options = flags.options;
  // Before the environment becomes that of the jobs.
  options.notify = ServiceNotifier::TakeFromEnvironment();
  CLI::App app("Waits for submitted jobs and runs them on this machine (docs/jobs.md).",
               "muster-agent --serve");
  app.footer(
      "\nSIGTERM ends it; running attempts continue, and the next one with this --state_dir adopts "
      "them.\nExit codes: 0 stopped; 2 wrong options; 4 another agent has this --state_dir or "
      "--node; 8 the coordinator\nrefuses its token.");
  app.add_flag("--serve", flags.serve, "wait for submitted jobs");
  app.add_option("--coordinator", options.coordinator, "IP:PORT or unix:PATH of the coordinator")
      ->required();
  app.add_option(
         "--state_dir", options.state_dir,
         "folder for records, logs and private folders of attempts; no other agent may use it")
      ->required();
  app.add_option("--node", options.node, "name of this node (default: the host's)");
  app.add_option("--host", options.host,
                 "address at which programs on other nodes reach programs here (default: the one "
                 "that leads to the coordinator)");
  app.add_option("--cpus", flags.cpus, "CPUs for jobs (default: all that this process may use)")
      ->check(CLI::Range(1, 1'000'000));
  app.add_option(
         "--gpus", flags.gpus,
         "GPUs for jobs, the first ones (default: all, or those that CUDA_VISIBLE_DEVICES names; "
         "none if it is empty)")
      ->check(CLI::Range(0, 1024));
  app.add_option("--gpu_memory_mib", flags.gpu_memory_mib,
                 "memory of each GPU, in MiB (default: what the driver reports)")
      ->check(CLI::Range(1, 2'000'000'000));
  app.add_option("--memory_mib", flags.memory_mib, "memory for jobs, in MiB (default: all)")
      ->check(CLI::Range(1, 2'000'000'000));
  app.add_option("--label", flags.labels, "KEY=VALUE that jobs can ask for; may be repeated");
  app.add_option("--rack", *options.info.mutable_rack(), "rack of this machine")
      ->envname("MUSTER_RACK");
  app.add_option(
         "--nvlink_domain", *options.info.mutable_nvlink_domain(),
         "NVLink domain of this machine, within its rack (default: the fabric that the driver "
         "names, if there is one)")
      ->envname("MUSTER_NVLINK_DOMAIN");
  app.add_option("--control_groups", options.control_groups,
                 "auto: jobs get control groups below this agent's, with memory limits unless it "
                 "is a systemd service; off; or the folder of a group for jobs, with memory limits")
      ->capture_default_str();
  app.add_flag("--limit_cpus", options.limit_cpus,
               "limit each process to the CPUs that its job requests, even if others are idle");
  app.add_option("--keep_logs_hours", flags.keep_logs_hours,
                 "how long to keep the logs of attempts that have ended")
      ->check(CLI::Range(0, 1'000'000))
      ->capture_default_str();
  AddTlsFlags(&app, &options.channel.tls);
  app.add_option("--token_file", options.channel.token_file,
                 "file with this node's token; only its owner may read it. -: standard input, so "
                 "that jobs, which run as this user, cannot read it")
      ->envname("MUSTER_TOKEN_FILE");
  Normalize(&words);
  ServiceSettings settings(&app, {.program = "muster-agent --serve",
                                  .prefix = kServeVariables,
                                  .actions = {"serve"},
                                  .shared = {{"tls_ca", "MUSTER_TLS_CA"},
                                             {"tls_cert", "MUSTER_TLS_CERT"},
                                             {"tls_key", "MUSTER_TLS_KEY"}},
                                  .variables = ProcessVariables()});
  const absl::StatusOr<std::optional<std::string>> text = settings.Parse(std::move(words));
  if (!text.ok()) return Fail(kExitUsage, text.status().message());
  if (text->has_value()) {
    std::printf("%s\n", (*text)->c_str());
    return 0;
  }
  options.state_dir = Absolute(options.state_dir);
  options.keep_logs = absl::Hours(flags.keep_logs_hours);
  NodeJobOptions surroundings;
  TakeSurroundings(&surroundings);
  options.environment = surroundings.agent.inherited;
  // These are settings of this service.
  std::erase_if(options.environment,
                [](const auto& entry) { return absl::StartsWith(entry.first, kServeVariables); });
  absl::Status status = SetInventory(ReadMachine(options.environment), &flags);
  if (status.ok() && options.channel.token_file == "-") status = TakeToken(&options.channel);
  if (status.ok()) status = SetRunner(&options);
  if (!status.ok()) return Fail(kExitUsage, status.message());
  // The original limit, for the jobs' programs: runners inherit the raised one.
  options.runner.push_back(absl::StrCat("--open_files=", OpenFiles().rlim_cur));
  RaiseDescriptorLimit();
  status = RunNodeService(options);
  return status.ok() ? 0 : Fail(CodeOf(status), status.message());
}

int Run(int argc, char** argv) {
  if (const absl::Status armed = ArmFailpointsFromEnvironment(); !armed.ok()) {
    return Fail(kExitUsage, armed.message());
  }
  const std::vector<std::string> args(argv + 1, argv + argc);
  const auto dashes = std::find(args.begin(), args.end(), "--");
  if (const absl::Status log = CheckLogVariables(ProcessVariables()); !log.ok()) {
    return Fail(kExitUsage, log.message());
  }
  if (std::find(args.begin(), dashes, "--serve") != dashes) return Serve({args.begin(), dashes});
  Flags flags;
  if (const std::optional<int> code = ReadFlags({args.begin(), dashes}, &flags)) return *code;
  NodeJobOptions& options = flags.options;
  WorkerEnvironment& worker = options.agent.worker;
  if (worker.coordinator.empty()) {
    return Fail(kExitUsage, "--coordinator is required; see muster-agent --help");
  }
  if (dashes == args.end() || dashes + 1 == args.end()) {
    return Fail(kExitUsage, "no program: write muster-agent [OPTIONS] -- PROGRAM [ARGS...]");
  }
  options.agent.argv.assign(dashes + 1, args.end());
  if (flags.attempt_lock >= 0) KeepOpen(flags.attempt_lock);
  if (flags.open_files > 0) LimitOpenFiles(flags.open_files);
  absl::Status status = SetLayout(&flags);
  if (status.ok()) status = SetDurations(&flags);
  if (status.ok()) status = SetFailurePolicy(&flags);
  if (!status.ok()) return Fail(kExitUsage, status.message());
  const absl::StatusOr<rpc::Address> address = rpc::ParseAddress(worker.coordinator);
  if (!address.ok()) return Fail(kExitUsage, address.status().message());
  options.channel.tls = worker.tls;
  // The address at which programs meet if this is machine 0: usually only there is it the
  // coordinator's own address.
  if (!address->is_unix()) options.host = address->host;
  if (!flags.host.empty()) options.host = flags.host;
  options.show_output = options.agent.log_dir.empty() || flags.tee;
  options.prefix = !flags.no_prefix;
  options.log_limits.max_bytes = int64_t{flags.log_max_mib} << 20;
  TakeSurroundings(&options);
  return RunAndReport(std::move(options), flags);
}

}  // namespace
}  // namespace muster::agent

int main(int argc, char** argv) {
  muster::agent::BlockJobSignals();
  return muster::agent::Run(argc, argv);
}
