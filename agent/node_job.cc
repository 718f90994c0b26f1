#include "agent/node_job.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <initializer_list>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "agent/descriptors.h"
#include "agent/grpc_job_coordination.h"
#include "agent/hang_watch.h"
#include "agent/job_signals.h"
#include "agent/memory_holder.h"
#include "agent/node_uplink.h"
#include "agent/relay_core.h"
#include "agent/stack_capture.h"
#include "agent/worker_processes.h"
#include "base/bool_word.h"
#include "base/clock.h"
#include "base/held_memory.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/text.h"

namespace muster::agent {
namespace {

// For the rest of the output when the job is stopped.
constexpr absl::Duration kHurriedFlush = absl::Seconds(1);

bool CanWrite(int fd) {
  pollfd event = {fd, POLLOUT, 0};
  return poll(&event, 1, 0) == 1 && (event.revents & POLLOUT) != 0;
}

bool IsElastic(const NodeJobOptions& options) {
  return options.min_nodes > 0 && options.min_nodes < options.num_nodes;
}

// The parts of the failure policy that are not defaults.
std::string Policy(const AgentOptions& options) {
  std::string text;
  for (const v1::ClassCount& limit : options.class_limits) {
    absl::StrAppend(&text, ", ", v1::EndClass_Name(limit.end_class()), " ", limit.count());
  }
  if (!options.user_error_codes.empty()) {
    absl::StrAppend(&text, ", user_error_codes ", absl::StrJoin(options.user_error_codes, ","));
  }
  return text;
}

// The value of the first of these variables that the processes get.
std::optional<std::string> VariableOfWorkers(const AgentOptions& options,
                                             std::initializer_list<const char*> names) {
  for (const char* const name : names) {
    for (const auto* const variables : {&options.worker.extra, &options.inherited}) {
      const auto found = variables->find(name);
      if (found != variables->end() && !found->second.empty()) return found->second;
    }
  }
  return std::nullopt;
}

// From the setting, or from its variables.
std::string Precision(const AgentOptions& options) {
  if (options.worker.mixed_precision.has_value()) return *options.worker.mixed_precision;
  return VariableOfWorkers(options, {"MUSTER_MIXED_PRECISION", "ACCELERATE_MIXED_PRECISION"})
      .value_or("no");
}
std::string Debug(const AgentOptions& options) {
  if (options.worker.debug.has_value()) return *options.worker.debug ? "true" : "false";
  const std::string text =
      VariableOfWorkers(options, {"MUSTER_DEBUG", "ACCELERATE_DEBUG_MODE"}).value_or("false");
  const std::optional<bool> word = ParseBoolWord(text);
  return word.has_value() ? *word ? "true" : "false" : text;
}

// The settings that must be equal on all nodes, in the words that agents of all versions use: a new
// setting is a separate field beside them.
std::string Settings(const NodeJobOptions& options) {
  const WorkerEnvironment& worker = options.agent.worker;
  const std::string least = IsElastic(options) ? absl::StrCat(options.min_nodes, ":") : "";
  return absl::StrCat("num_processes ", options.num_nodes * options.agent.slots, ", num_machines ",
                      least, options.num_nodes, ", mixed_precision ", Precision(options.agent),
                      ", gradient_accumulation_steps ",
                      worker.gradient_accumulation_steps > 0
                          ? absl::StrCat(worker.gradient_accumulation_steps)
                          : "of the program",
                      ", max_restarts ", options.agent.max_restarts, Policy(options.agent));
}

// The output goes to the standard output and standard error of this process.
OutputOptions OutputOptionsOf(const NodeJobOptions& options, ProcessHost& host) {
  const int here = options.agent.slots;
  return {
      .stdout_fd = options.show_output && IsStandardDescriptor(STDOUT_FILENO) ? STDOUT_FILENO : -1,
      .stderr_fd = options.show_output && IsStandardDescriptor(STDERR_FILENO) ? STDERR_FILENO : -1,
      .prefix = options.prefix && here * options.num_nodes > 1,
      .progress_rank = options.node_rank > 0 ? options.node_rank * here : 0,
      .log_limits = options.log_limits,
      .on_backpressure = [&host](bool pressed) { host.PauseOutput(pressed); },
  };
}

absl::StatusOr<std::unique_ptr<NodeUplink>> StartUplink(const NodeJobOptions& options,
                                                        StackCapture& stacks,
                                                        WorkerProcesses& processes) {
  return NodeUplink::Start({
      .coordinator = options.agent.worker.coordinator,
      .channel = options.channel,
      .outage_tolerance = options.outage_tolerance,
      .hub_listen = options.hub_listen,
      .stacks = &stacks,
      .process_of =
          [&processes](const std::string& job, const std::string& worker_id, uint64_t incarnation,
                       int64_t claimed) {
            return processes.Find(job, worker_id, incarnation, claimed);
          },
      .processes =
          [&processes] {
            std::vector<LocalProcess> all;
            for (WorkerProcesses::Running& one : processes.All()) {
              all.push_back({processes.job(), std::move(one.worker_id), one.incarnation, one.rank,
                             one.program});
            }
            return all;
          },
      .on_barrier_late =
          [job = options.agent.worker.job](const v1::BarrierLate& late) {
            // The agents of a job have their own barriers, in which waiting is usual.
            if (late.job_id() == job) MUSTER_LOG(Warning) << late.report().message();
          },
  });
}

// Takes over the memory that earlier attempts of the job have left with the node's agent.
void TakeOver(const std::string& node_memory_socket, MemoryHolder& memory) {
  if (node_memory_socket.empty()) return;
  absl::StatusOr<std::vector<HeldMemory>> held = TakeHeldMemory(node_memory_socket);
  if (!held.ok()) {
    MUSTER_LOG(Warning) << "cannot find the memory of earlier attempts: "
                        << held.status().message();
    return;
  }
  for (HeldMemory& piece : *held) memory.Add("", std::move(piece));
}

// Hands memory over for later attempts.
void HandOver(const HeldMemory& piece, const std::string& node_memory_socket) {
  if (node_memory_socket.empty()) return;
  const absl::Status held =
      HoldMemory(node_memory_socket, piece.slot, piece.fd.get(), piece.worker_id);
  if (!held.ok()) {
    MUSTER_LOG(Debug) << "no later attempt finds memory of " << piece.worker_id << ": "
                      << held.message();
  }
}

std::unique_ptr<JobCoordination> JoinJob(const NodeJobOptions& options, NodeUplink* uplink) {
  return MakeGrpcJobCoordination(
      {
          .coordinator = options.agent.worker.coordinator,
          .job = options.agent.worker.job,
          .num_nodes = options.num_nodes,
          .min_nodes = IsElastic(options) ? options.min_nodes : 0,
          .last_call = options.last_call,
          .grow_after = options.grow_after,
          .node_rank = options.node_rank,
          .another_is_first = options.another_is_first,
          .hosts_coordinator = options.hosts_coordinator,
          // With a gate, the coordinator's count decides.
          .counts_restarts = options.agent.gate == nullptr && options.agent.max_restarts > 0,
          .counts_itself = options.agent.gate == nullptr,
          .settings = Settings(options),
          .debug = Debug(options.agent),
          .host = options.host,
          .rack = options.agent.worker.rack,
          .nvlink_domain = options.agent.worker.nvlink_domain,
          .join_timeout = options.join_timeout,
          .lease = options.lease,
          .outage_tolerance = options.outage_tolerance,
      },
      uplink);
}

// Passes what workers report about their re-entry to the agent that runs them, once there is one.
// Thread-safe.
class ReentryListener {
 public:
  void Set(Agent* agent) {
    MutexLock lock(&mu_);
    agent_ = agent;
  }
  void Told(const std::string& worker_id, Reentry reentry) {
    MutexLock lock(&mu_);
    if (agent_ != nullptr) agent_->Reenters(worker_id, reentry);
  }

 private:
  Mutex mu_;
  Agent* agent_ ABSL_GUARDED_BY(mu_) = nullptr;
};

// Stops the agent at the first signal of the job and kills at a later one; when the agent has
// ended, hurries the output instead. Thread-safe.
class JobStopper {
 public:
  JobStopper(Agent& agent, OutputMux& output) : agent_(agent), output_(output) {}

  void OnSignal(int signal) {
    MutexLock lock(&mu_);
    switch (requests_.Take(Clock::Real().Now())) {
      case StopRequests::Request::kRepeated:
        return;
      case StopRequests::Request::kStop:
        first_signal_ = signal;
        if (running_) {
          output_.Note(
              absl::StrCat("muster: stopping (", SignalName(signal),
                           "); send the signal again after a second or more to kill at once"));
        }
        break;
      case StopRequests::Request::kKill:
        break;
    }
    if (running_) {
      agent_.Stop();
    } else {
      output_.HurryFlush(kHurriedFlush);
    }
  }

  void AgentEnded() {
    MutexLock lock(&mu_);
    running_ = false;
    // A stalled reader of our output must not keep a stopped job from ending.
    if (first_signal_ != 0) output_.HurryFlush(kHurriedFlush);
  }

  // 0: none came.
  int first_signal() {
    MutexLock lock(&mu_);
    return first_signal_;
  }

 private:
  Agent& agent_;
  OutputMux& output_;
  Mutex mu_;
  StopRequests requests_ ABSL_GUARDED_BY(mu_);
  bool running_ ABSL_GUARDED_BY(mu_) = true;  // whether the agent runs
  int first_signal_ ABSL_GUARDED_BY(mu_) = 0;
};

// Ends the workers of this node when the job hangs, if they are the first `slots` ranks. While the
// watch exists, only it may use `*told`.
std::unique_ptr<HangWatch> WatchForHangs(absl::Duration timeout, int slots, OpSender& sender,
                                         Agent& agent, WorkerProcesses& processes,
                                         OutputMux& output, JobStopper& stopper,
                                         std::optional<HangReport>* told) {
  HangWatch::Options options;
  options.job = processes.job();
  options.timeout = timeout;
  options.sender = &sender;
  options.judges = [&processes, &stopper, slots] {
    // A stopped job has its own time to end, which may be longer.
    if (stopper.first_signal() != 0) return false;
    const std::vector<WorkerProcesses::Running> here = processes.All();
    return std::any_of(here.begin(), here.end(),
                       [&](const WorkerProcesses::Running& one) { return one.rank < slots; });
  };
  options.on_hang = [&agent, &processes, &output, &stopper, told](HangReport report) {
    if (stopper.first_signal() != 0) return;
    // Hosts, phases and stacks are texts of workers, even on other machines.
    const auto note = [&output](absl::string_view before, absl::string_view text) {
      output.Note(absl::StrCat(before, Printable(text, /*max_bytes=*/1000)));
    };
    note("muster: the job hangs: ", report.hang.why);
    for (const v1::HungRanks& ranks : report.ranks) {
      note(absl::StrCat("muster: ", ranks.ranks_size() == 1 ? "rank " : "ranks ",
                        absl::StrJoin(ranks.ranks(), ","), ": "),
           ranks.doing());
      for (const absl::string_view line : absl::StrSplit(ranks.stack(), '\n', absl::SkipEmpty())) {
        note("  | ", line);
      }
    }
    const std::string why = report.hang.why;
    *told = std::move(report);
    for (const WorkerProcesses::Running& one : processes.All()) {
      agent.Kill(one.worker_id, one.incarnation, why, v1::END_CLASS_HANG);
    }
  };
  return HangWatch::Start(std::move(options));
}

}  // namespace

NodeJobResult RunNodeJob(NodeJobOptions options, ProcessHost& host) {
  NodeJobResult result;
  OutputMux output(OutputOptionsOf(options, host));
  StackCapture stacks;
  WorkerProcesses processes(options.agent.worker.job);
  options.agent.processes = &processes;
  options.agent.elastic = IsElastic(options);
  absl::StatusOr<std::unique_ptr<NodeUplink>> session = StartUplink(options, stacks, processes);
  if (!session.ok()) {
    result.job.outcome = JobResult::Outcome::kRefused;
    result.job.status = session.status();
    // A certificate or token is missing; here NOT_FOUND would mean the program.
    if (absl::IsNotFound(result.job.status)) {
      result.job.status = absl::InvalidArgumentError(result.job.status.message());
    }
    return result;
  }
  std::unique_ptr<JobCoordination> link = JoinJob(options, session->get());
  // Workers reach the coordinator through this agent, which handles the certificates.
  WorkerEnvironment& worker = options.agent.worker;
  worker.coordinator = (*session)->relay_address();
  worker.outage_tolerance = options.outage_tolerance;
  worker.lease = options.lease;
  worker.tls = {};
  // Until the last attempt has ended, the memory that a killed worker has left stays for the next
  // attempt.
  const std::string node_memory_socket = options.memory_socket;
  ReentryListener reentries;
  MemoryHolder::Options telling;
  telling.on_reentry = [&reentries](const std::string& worker_id, Reentry reentry) {
    reentries.Told(worker_id, reentry);
  };
  telling.on_held = [&node_memory_socket](const HeldMemory& piece) {
    HandOver(piece, node_memory_socket);
  };
  telling.on_dropped = [&node_memory_socket](const std::string& worker_id, int slot) {
    if (!node_memory_socket.empty()) (void)DropHeldMemory(node_memory_socket, worker_id, slot);
  };
  absl::StatusOr<std::unique_ptr<MemoryHolder>> memory = MemoryHolder::Start(
      [&processes](pid_t pid) { return processes.WorkerOf(pid); }, std::move(telling));
  if (memory.ok()) {
    TakeOver(node_memory_socket, **memory);
    worker.memory_socket = (*memory)->address();
  } else {
    worker.memory_socket.clear();
    MUSTER_LOG(Warning) << "workers can keep checkpoints only on the disk: "
                        << memory.status().message();
  }
  const bool show = options.show_output;
  // With log files per rank, the workers have to print it themselves.
  worker.agent_tells = show && options.agent.log_dir.empty();
  options.agent.stdout_terminal = show && isatty(STDOUT_FILENO) != 0;
  options.agent.stderr_terminal = show && isatty(STDERR_FILENO) != 0;
  options.agent.stdin_fd = IsStandardDescriptor(STDIN_FILENO) ? STDIN_FILENO : -1;
  const int slots = options.agent.slots;
  Agent agent(std::move(options.agent), host, output, *link);
  reentries.Set(&agent);
  (*session)->SetOnKillWorker([&agent](const v1::KillWorker& kill) {
    agent.Kill(kill.worker_id(), kill.incarnation(), kill.why());
  });
  JobStopper stopper(agent, output);
  std::unique_ptr<HangWatch> hangs;
  if (options.hang_timeout > absl::ZeroDuration()) {
    hangs = WatchForHangs(options.hang_timeout, slots, (*session)->sender(), agent, processes,
                          output, stopper, &result.hang);
  }
  SignalWatcher signals([&stopper](int signal) { stopper.OnSignal(signal); });
  result.job = agent.Run();
  hangs.reset();
  stopper.AgentEnded();
  // A second time, because the node's agent may have restarted since.
  if (memory.ok() && result.job.outcome != JobResult::Outcome::kSucceeded) {
    for (const HeldMemory& piece : (*memory)->Held("")) HandOver(piece, node_memory_socket);
  }
  reentries.Set(nullptr);
  (*session)->SetOnKillWorker(nullptr);
  link.reset();
  (*session)->Finish(absl::Seconds(1));
  session->reset();
  const bool flushed = output.Flush(absl::InfiniteDuration());
  result.signal = stopper.first_signal();
  // A signal during the wait for the reader makes it a stopped job. The failure is printed on
  // standard error, where it can be read.
  if (!flushed && result.signal != 0 &&
      (result.job.outcome == JobResult::Outcome::kSucceeded || !CanWrite(STDERR_FILENO))) {
    result.job.outcome = JobResult::Outcome::kStopped;
  }
  return result;
}

}  // namespace muster::agent
