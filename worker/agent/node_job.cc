#include "worker/agent/node_job.h"

#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <sys/eventfd.h>
#include <sys/signalfd.h>
#include <unistd.h>

#include <atomic>
#include <functional>
#include <memory>
#include <thread>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/log.h"
#include "worker/agent/node_session.h"
#include "worker/agent/rpc_job_link.h"
#include "worker/agent/stack_capture.h"

namespace muster::agent {
namespace {

sigset_t JobSignals() {
  sigset_t signals;
  sigemptyset(&signals);
  for (const int signal : {SIGINT, SIGTERM, SIGHUP}) sigaddset(&signals, signal);
  return signals;
}

// Calls back for each signal of the job until destroyed.
class SignalWatcher {
 public:
  explicit SignalWatcher(std::function<void(int)> on_signal)
      : stop_fd_(eventfd(0, EFD_CLOEXEC)),
        thread_([this, on_signal = std::move(on_signal)] { Loop(on_signal); }) {}
  ~SignalWatcher() {
    const uint64_t one = 1;
    ssize_t ignored = write(stop_fd_, &one, sizeof(one));
    static_cast<void>(ignored);
    thread_.join();
    close(stop_fd_);
  }

 private:
  void Loop(const std::function<void(int)>& on_signal) {
    const sigset_t signals = JobSignals();
    const int fd = signalfd(-1, &signals, SFD_CLOEXEC);
    for (;;) {
      pollfd fds[2] = {{fd, POLLIN, 0}, {stop_fd_, POLLIN, 0}};
      poll(fds, 2, -1);
      if (fds[1].revents != 0) break;
      signalfd_siginfo info;
      if (fds[0].revents != 0 && read(fd, &info, sizeof(info)) == sizeof(info)) {
        on_signal(static_cast<int>(info.ssi_signo));
      }
    }
    close(fd);
  }

  const int stop_fd_;
  std::thread thread_;
};

// What must be equal on all nodes.
std::string Settings(const NodeJobOptions& options) {
  const WorkerEnvironment& worker = options.agent.worker;
  return absl::StrCat("num_processes ", options.num_nodes * options.agent.slots, ", num_machines ",
                      options.num_nodes, ", mixed_precision ", worker.mixed_precision,
                      ", gradient_accumulation_steps ", worker.gradient_accumulation_steps,
                      ", max_restarts ", options.agent.max_restarts);
}

}  // namespace

void BlockJobSignals() {
  const sigset_t signals = JobSignals();
  pthread_sigmask(SIG_BLOCK, &signals, nullptr);
  signal(SIGPIPE, SIG_IGN);
}

NodeJobResult RunNodeJob(NodeJobOptions options, ProcessHost& host) {
  NodeJobResult result;
  const int here = options.agent.slots;
  const int world = here * options.num_nodes;
  OutputMux output({
      .stdout_fd = options.show_output ? STDOUT_FILENO : -1,
      .stderr_fd = options.show_output ? STDERR_FILENO : -1,
      .prefix = options.prefix && world > 1,
      .progress_rank = options.node_rank > 0 ? options.node_rank * here : 0,
      .on_backpressure = [&host](bool pressed) { host.PauseOutput(pressed); },
  });
  StackCapture stacks;
  const auto tell_late = [job = options.agent.worker.job,
                          tell = options.tell_late](const v1::BarrierLate& late) {
    // The agents of a job have barriers of their own, in which waiting is usual.
    if (tell && late.job_id() == job) MUSTER_LOG(Warning) << late.report().message();
  };
  absl::StatusOr<std::unique_ptr<NodeSession>> session = NodeSession::Start({
      .coordinator = options.agent.worker.coordinator,
      .channel = options.channel,
      .outage_tolerance = options.outage_tolerance,
      .stacks = &stacks,
      .on_barrier_late = tell_late,
  });
  if (!session.ok()) {
    result.job.outcome = JobResult::Outcome::kRefused;
    result.job.status = session.status();
    return result;
  }
  std::unique_ptr<JobLink> link = MakeRpcJobLink(
      {
          .coordinator = options.agent.worker.coordinator,
          .job = options.agent.worker.job,
          .num_nodes = options.num_nodes,
          .node_rank = options.node_rank,
          .settings = Settings(options),
          .host = options.host,
          .rack = options.agent.worker.rack,
          .nvlink_domain = options.agent.worker.nvlink_domain,
          .join_timeout = options.join_timeout,
          .outage_tolerance = options.outage_tolerance,
      },
      session->get());
  // Workers reach the coordinator through this agent; certificates are its business.
  WorkerEnvironment& worker = options.agent.worker;
  worker.coordinator = (*session)->relay_address();
  worker.outage_tolerance = options.outage_tolerance;
  worker.tls_ca.clear();
  worker.tls_cert.clear();
  worker.tls_key.clear();
  const bool show = options.show_output;
  options.agent.stdout_terminal = show && isatty(STDOUT_FILENO) != 0;
  options.agent.stderr_terminal = show && isatty(STDERR_FILENO) != 0;
  options.agent.stdin_fd = STDIN_FILENO;
  Agent agent(std::move(options.agent), host, output, *link);
  (*session)->SetOnKillWorker([&agent](const v1::KillWorker& kill) {
    agent.Kill(kill.worker_id(), kill.incarnation(), kill.why());
  });
  std::atomic<int> first_signal{0};
  {
    SignalWatcher signals([&](int signal) {
      int none = 0;
      if (first_signal.compare_exchange_strong(none, signal)) {
        output.Note(
            absl::StrCat("muster: stopping (", SignalName(signal), "); once more to kill at once"));
      }
      agent.Stop();
    });
    result.job = agent.Run();
  }
  (*session)->SetOnKillWorker(nullptr);
  link.reset();
  (*session)->Finish(absl::Seconds(1));
  session->reset();
  result.signal = first_signal.load();
  // A reader of our output that stands still must not keep a stopped job from ending.
  output.Flush(result.signal == 0 ? absl::InfiniteDuration() : absl::Seconds(1));
  return result;
}

}  // namespace muster::agent
