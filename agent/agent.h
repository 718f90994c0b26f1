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
  // Settings of all workers. The agent fills in the place, the identity, the restarts and the
  // address to connect to.
  WorkerEnvironment worker;
  // The environment that workers inherit.
  std::map<std::string, std::string> inherited;
  // How often all workers may be started again after a failure.
  int max_restarts = 0;
  // Limits by class of end, both on these restarts and on those that do not count against
  // max_restarts. The same on all machines.
  ClassCounts class_limits = {};
  // Exit codes after which no restart can help, besides 2, 126 and 127.
  std::vector<int> user_error_codes = {};
  // If set, decides about restarts instead of max_restarts, and only if some workers can continue
  // in their processes. These workers and the restarted ones keep their log files. Borrowed.
  RestartGate* gate = nullptr;
  // The number of machines may change from attempt to attempt: then all workers start again and
  // none keeps its process, and if the launch is stopped here, the job continues on the other
  // machines.
  bool elastic = false;
  // How long workers have between SIGTERM and SIGKILL, when the user stops the job and when a
  // worker has failed.
  absl::Duration stop_grace = absl::Seconds(10);
  absl::Duration failure_grace = absl::Seconds(3);
  // How long workers that continue in their process after the loss of another one have, from the
  // beginning of the next attempt, to give up the generation that has ended. One that does not is
  // started again.
  absl::Duration reentry_timeout = absl::Seconds(30);
  // After a worker failed with an exit code, wait this long for another one that a signal killed:
  // the failure that is seen first is often a consequence of the second.
  absl::Duration settle = absl::Milliseconds(50);
  // Each worker's lines go to FOLDER/attempt_N/rank_R.log; the logs of earlier launches are moved
  // away (see BeginLogFolder). Empty: no log files.
  std::string log_dir;
  // The first worker's standard input; borrowed. -1: none.
  int stdin_fd = -1;
  // Workers write to pseudo-terminals (see ProcessOptions).
  bool stdout_terminal = false;
  bool stderr_terminal = false;
  int kept_lines = 20;
  // Is informed of the workers' processes; borrowed. Null: not needed.
  WorkerProcesses* processes = nullptr;
  // Each worker starts in its own control group of these; borrowed. Null: in this process's.
  const WorkerGroups* groups = nullptr;
  // Blocks until workers may start, before each attempt; an error refuses the job. Null: at once.
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
  AttemptEnd failure;  // also set if an attempt had failed before it was stopped
  // The first worker of this node that failed in the last attempt; it need not be the cause.
  std::optional<WorkerEnd> failed_here;
  absl::Status status;
  int restarts = 0;
};

// Decides whether lost workers are started again while the others keep running.
class RestartGate {
 public:
  virtual ~RestartGate() = default;
  // Returns whether restart number `restart` (from 1) may be requested after this end of a worker.
  // Does not block.
  virtual bool MayAsk(int restart, const WorkerEnd& cause) const = 0;
  // Requests the restart and blocks until it may begin on this node. `result`: how the job would
  // end without it. Errors: CANCELLED after Cancel(), and also if the restart is refused, because
  // the coordinator then stops the job; ABORTED in the same cases after the restart had been
  // allowed, so that `result` is known and counted.
  virtual absl::Status Await(int restart, const JobResult& result) = 0;
  // Makes Await return. Final. Does not block; may be called on any thread.
  virtual void Cancel() = 0;
};

// Runs the workers of one job on this node: starts them, watches them, and if one fails, starts all
// of them again as often as allowed. Workers that can re-enter (see Reenters) keep their processes
// then; the others are stopped. Thread-safe.
class Agent {
 public:
  // All references are borrowed.
  Agent(AgentOptions options, ProcessHost& host, OutputMux& output, JobCoordination& link);
  Agent(const Agent&) = delete;
  Agent& operator=(const Agent&) = delete;

  // Blocks until the job has ended and no worker of this node is left. Call once.
  JobResult Run();

  // Ends the job: workers get SIGTERM, and SIGKILL after the grace. A second call kills them at
  // once. Does not block.
  void Stop();

  // Called when the coordinator wants this start of the worker to end: it gets SIGTERM, and SIGKILL
  // after the grace. Its end counts as a failure, of the class `as` if that is given. Has no effect
  // if the worker does not run here. Does not block.
  void Kill(const std::string& worker_id, uint64_t incarnation, const std::string& why,
            v1::EndClass as = v1::END_CLASS_UNSPECIFIED);

  // Called when the running process of this worker reports whether it can re-enter. Does not block.
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

  // Called if the job was stopped while no worker was watched. Removes one stop request from the
  // events, so that the grace begins now; any further request cuts it short.
  void TakeStop();

  JobResult RunAttempts();
  // Starts the workers that were not kept.
  absl::Status StartWorkers(const Meeting& meeting, int attempt);
  absl::Status StartWorker(const Meeting& meeting, int attempt, int local_rank);
  absl::Status BeginLogs(const Meeting& meeting);
  absl::Status LogWorker(int rank, int attempt);
  WorkerEnd OnEnded(const Ended& event);
  void StopWorkers(absl::Duration grace);
  // At the end of an attempt that may be followed by another: keeps the workers that can re-enter
  // and stops the others.
  void StopOrKeepWorkers(const AttemptEnd& end);
  // Returns an end for which no worker is to blame: if the number of machines varies, the other
  // machines continue without this one.
  AttemptEnd EndOfThisMachine(std::string why) const;
  v1::EndClass ClassOfWorker(const WorkerEnd& end) const;
  // Returns why no attempt may follow an end of this class, as a text that follows "; " (possibly
  // empty); nullopt if one may follow. Only without a gate.
  std::optional<std::string> WhyLast(v1::EndClass end_class) const;
  // Whether another attempt may follow one that failed because of this worker, as far as this node
  // knows.
  bool MayRestart(const WorkerEnd& cause) const;
  // Whether, with a gate, the attempt can continue: the other workers keep running while the lost
  // ones are started again.
  bool IsWorthKeeping(const WorkerEnd& cause) const;
  void KillWorker(const KillWanted& wanted);
  void OnReentry(const ReentryTold& told);
  void StopAwaited();
  // Whether the worker is between the ended generation and its seat in the next one: then its end
  // is not counted.
  static bool IsReentering(const Worker& worker);
  // Starts the worker again within the attempt.
  absl::Status Renew(const Meeting& meeting, int attempt, const Ended& ended);
  int kept() const;
  // Handles events until only kept workers are left. A stop request makes it shorter, keeps no
  // workers, and is recorded in stopped_.
  void WaitForWorkers();
  // Starts all workers once and waits for the end of the attempt. Returns why it failed, or nothing
  // if it succeeded or was stopped (stopped_).
  std::optional<AttemptEnd> RunAttempt(const Meeting& meeting, int attempt, absl::Status* refused);
  AttemptEnd Culprit(const Ended& first);
  AttemptEnd EndBy(const WorkerEnd& culprit) const;
  // Called when another node has ended the attempt: marks the workers that had ended by themselves.
  void MarkEnded();
  // No restart helps after `local`, but the nodes have meanwhile agreed on another end. Remembers
  // `local`, so that this node reports it at the next meeting.
  void NoteLast(const AttemptEnd& local, const AttemptEnd& agreed);

  const AgentOptions options_;
  ProcessHost& host_;
  OutputMux& output_;
  JobCoordination& link_;
  const std::string hostname_;

  // Used only by the thread of Run.
  std::vector<Worker> workers_;
  int running_ = 0;
  bool logs_begun_ = false;
  OwnedFd log_lock_;    // held while this launch writes to log_dir
  int node_rank_ = -1;  // from the last meeting
  int num_nodes_ = 0;
  int attempt_ = 0;           // 0 is the first
  RestartCounts counted_;     // restarts
  int64_t memory_kills_ = 0;  // on this machine, before the attempt
  bool stopped_ = false;
  std::vector<std::string> stuck_;  // workers that could not be killed
  std::optional<WorkerEnd> culprit_;
  std::optional<AttemptEnd> user_error_;  // of a worker that ended by itself: see MarkEnded
  std::string restarted_after_;           // why the previous attempt ended

  Mutex mu_;
  CondVar changed_;
  std::deque<Event> events_ ABSL_GUARDED_BY(mu_);
  bool stop_wanted_ ABSL_GUARDED_BY(mu_) = false;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_AGENT_H_
