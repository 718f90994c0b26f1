#ifndef MUSTER_AGENT_AGENT_H_
#define MUSTER_AGENT_AGENT_H_

#include <cstdint>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "agent/job_coordination.h"
#include "agent/output.h"
#include "agent/process.h"
#include "agent/worker_environment.h"
#include "agent/worker_groups.h"
#include "agent/worker_processes.h"
#include "base/held_memory.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "proto/failure_policy.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {

class RestartGate;

struct AgentOptions {
  // The program and its arguments, the same for every worker.
  std::vector<std::string> argv;
  // Workers on this node.
  int slots = 1;
  // Settings of all workers. The agent fills in the place, the identity, the restarts and where to
  // meet.
  WorkerEnvironment worker;
  // The environment that workers inherit.
  std::map<std::string, std::string> inherited;
  // How often all workers are started again after a failure.
  int max_restarts = 0;
  // Limits by class of end, on these restarts and on those that do not count against max_restarts.
  // The same on all machines.
  ClassCounts class_limits = {};
  // Exit codes after which no restart can help, besides 2, 126 and 127.
  std::vector<int> user_error_codes = {};
  // Decides about that instead, and only when some workers can go on in their processes. They and
  // those that are started again keep their log files. Borrowed.
  RestartGate* gate = nullptr;
  // The number of machines may change from attempt to attempt: then all workers start again, none
  // keeps its process, and one that is stopped here leaves the job to the other machines.
  bool elastic = false;
  // How long workers have between SIGTERM and SIGKILL, when the user stops the job and when a
  // worker has failed.
  absl::Duration stop_grace = absl::Seconds(10);
  absl::Duration failure_grace = absl::Seconds(3);
  // Workers that continue in their process after the loss of another one have this long, from the
  // next attempt's begin, to give up the generation that has ended. One that does not is started
  // again.
  absl::Duration reentry_timeout = absl::Seconds(30);
  // After a worker failed with an exit code, wait this long for another one that a signal killed:
  // the first error to be seen is often the echo of the second.
  absl::Duration settle = absl::Milliseconds(50);
  // Each worker's lines go to FOLDER/attempt_N/rank_R.log; those of earlier launches are moved away
  // (see BeginLogFolder). Empty: no.
  std::string log_dir;
  // The first worker's standard input; borrowed. -1: none.
  int stdin_fd = -1;
  // Workers write to pseudo-terminals (see ProcessOptions).
  bool stdout_terminal = false;
  bool stderr_terminal = false;
  int kept_lines = 20;
  // Learns of the workers' processes; borrowed. Null: no such request.
  WorkerProcesses* processes = nullptr;
  // Each worker starts in a control group of its own; borrowed. Null: in this process's.
  const WorkerGroups* groups = nullptr;
  // Blocks until workers may start, for each attempt; an error refuses the job. Null: at once.
  std::function<absl::Status()> ready = nullptr;
};

struct JobResult {
  enum class Outcome {
    kSucceeded,
    kFailed,   // `failure` says why
    kStopped,  // by Stop()
    kRefused,  // nothing was run: `status` says why
  };
  Outcome outcome = Outcome::kSucceeded;
  AttemptEnd failure;  // also of an attempt that had failed when it was stopped
  // The first worker of this node that failed in the last attempt; it need not be the cause.
  std::optional<WorkerEnd> failed_here;
  absl::Status status;
  int restarts = 0;
};

// Decides whether lost workers are started again while the others keep running.
class RestartGate {
 public:
  virtual ~RestartGate() = default;
  // Whether the `restart`-th one (from 1) may be asked for, after this end of a worker. Does not
  // block.
  virtual bool MayAsk(int restart, const WorkerEnd& cause) const = 0;
  // Asks for the restart and blocks until it may begin, on this node. `result`: how the job would
  // end without it. Errors: CANCELLED after Cancel(), and also if the restart is refused, because
  // the coordinator then stops the job; ABORTED likewise after it had been allowed, so that
  // `result` is known and counted.
  virtual absl::Status Await(int restart, const JobResult& result) = 0;
  // Makes Await return. Final. Does not block; any thread.
  virtual void Cancel() = 0;
};

// Runs the workers of one job on this node: starts them, watches them, and when one fails starts
// all again as often as allowed. Workers that can re-enter (see Reenters) keep their processes
// then; the others are stopped. Thread-safe.
class Agent {
 public:
  // All are borrowed.
  Agent(AgentOptions options, ProcessHost& host, OutputMux& output, JobCoordination& link);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // Blocks until the job has ended and no worker of this node is left. Call once.
  JobResult Run();

  // Ends the job: workers get SIGTERM, and SIGKILL after the grace. Again: SIGKILL now. Does not
  // block.
  void Stop();

  // The coordinator wants this start of this worker to end: SIGTERM, and SIGKILL after the grace.
  // Its end counts as a failure, of the class `as` if that is given. Nothing if it is not running
  // here. Does not block.
  void Kill(const std::string& worker_id, uint64_t incarnation, const std::string& why,
            v1::EndClass as = v1::END_CLASS_UNSPECIFIED);

  // The running process of this worker reports whether it can re-enter. Does not block.
  void Reenters(const std::string& worker_id, Reentry reentry);

 private:
  struct Worker {
    int rank = 0;
    std::string worker_id;
    uint64_t incarnation = 0;
    std::shared_ptr<Process> process;
    bool ended = false;
    std::string killed_because;  // empty: it was not killed
    v1::EndClass killed_as = v1::END_CLASS_UNSPECIFIED;
    Reentry reentry = Reentry::kNone;
    bool kept = false;     // it outlives the attempt in which it was started
    bool awaited = false;  // kept, and has not yet left that generation
    bool renewed = false;  // stopped because it cannot re-enter; is started again
    // It had already ended when another node ended the attempt, so it was not asked to end.
    bool by_itself = false;
  };
  struct Ended {
    int local_rank;
    ProcessExit exit;
  };
  struct EndedElsewhere {
    AttemptEnd end;
  };
  struct StopWanted {};
  struct KillWanted {
    std::string worker_id;
    uint64_t incarnation;
    std::string why;
    v1::EndClass as;
  };
  struct ReentryTold {
    std::string worker_id;
    Reentry reentry;
  };
  using Event = std::variant<Ended, EndedElsewhere, StopWanted, KillWanted, ReentryTold>;

  void Post(Event event);
  Event Next();
  std::optional<Event> NextWithin(absl::Duration timeout);

  // The job was stopped while no worker was watched: takes one request for that, for which the
  // grace begins now. Any other one cuts it short.
  void TakeStop();

  JobResult RunAttempts();
  // Those that are not kept.
  absl::Status StartWorkers(const Meeting& meeting, int attempt);
  absl::Status StartWorker(const Meeting& meeting, int attempt, int local_rank);
  absl::Status BeginLogs(const Meeting& meeting);
  absl::Status LogWorker(int rank, int attempt);
  WorkerEnd OnEnded(const Ended& event);
  void StopWorkers(absl::Duration grace);
  // At the end of an attempt that may be followed by another: keeps the workers that can re-enter
  // and stops the others.
  void StopOrKeepWorkers(const AttemptEnd& end);
  // An end for which no worker is to blame: where the number of machines varies, the others go on
  // without this one.
  AttemptEnd EndOfThisMachine(std::string why) const;
  v1::EndClass ClassOfWorker(const WorkerEnd& end) const;
  // Why no attempt may follow an end of this class, in words that follow "; " (possibly empty).
  // nullopt: one may follow. Without a gate only.
  std::optional<std::string> WhyLast(v1::EndClass end_class) const;
  // Whether another attempt may follow one that has failed by this worker, as far as this node
  // knows.
  bool MayRestart(const WorkerEnd& cause) const;
  // Whether, with a gate, the attempt can go on: others keep running while what it has lost is
  // started again.
  bool IsWorthKeeping(const WorkerEnd& cause) const;
  void KillWorker(const KillWanted& wanted);
  void OnReentry(const ReentryTold& told);
  void StopAwaited();
  // Between the generation that has ended and its seat in the next: its end is not counted.
  static bool IsReentering(const Worker& worker);
  // Starts the worker again within the attempt.
  absl::Status Renew(const Meeting& meeting, int attempt, const Ended& ended);
  int kept() const;
  // Takes events until only kept workers are left. A request to stop shortens it, keeps none, and
  // is recorded in stopped_.
  void WaitForWorkers();
  // One start of all workers. Returns why it failed, or nothing if it succeeded or was stopped
  // (stopped_).
  std::optional<AttemptEnd> RunAttempt(const Meeting& meeting, int attempt, absl::Status* refused);
  AttemptEnd Culprit(const Ended& first);
  AttemptEnd EndBy(const WorkerEnd& culprit) const;
  // Another node has ended the attempt.
  void MarkEnded();
  // No restart helps after `local`, but the nodes have agreed on another end by now. This one says
  // so when they meet again.
  void NoteLast(const AttemptEnd& local, const AttemptEnd& agreed);

  const AgentOptions options_;
  ProcessHost& host_;
  OutputMux& output_;
  JobCoordination& link_;
  const std::string hostname_;

  // The thread of Run only.
  std::vector<Worker> workers_;
  int running_ = 0;
  bool logs_begun_ = false;
  OwnedFd log_lock_;    // says that this launch writes to log_dir
  int node_rank_ = -1;  // of the last meeting
  int num_nodes_ = 0;
  int attempt_ = 0;           // 0 is the first
  RestartCounts counted_;     // restarts
  int64_t memory_kills_ = 0;  // of the machine, before the attempt
  bool stopped_ = false;
  std::vector<std::string> stuck_;  // workers that could not be killed
  std::optional<WorkerEnd> culprit_;
  std::optional<AttemptEnd> user_error_;  // of a worker that had ended by itself: see MarkEnded
  std::string restarted_after_;           // why the attempt before has ended

  Mutex mu_;
  CondVar changed_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mu_);
  bool stop_wanted_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_AGENT_H_
