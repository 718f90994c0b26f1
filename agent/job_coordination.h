#ifndef MUSTER_AGENT_JOB_COORDINATION_H_
#define MUSTER_AGENT_JOB_COORDINATION_H_

#include <cstdint>
#include <functional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "agent/process.h"
#include "proto/failure_policy.h"
#include "proto/muster/v1/job.pb.h"

namespace muster::agent {

// One start of one worker and how it ended.
struct WorkerEnd {
  int rank = 0;
  std::string worker_id;
  uint64_t incarnation = 0;
  int64_t pid = 0;
  std::string host;
  ProcessExit exit;
  std::vector<std::string> last_lines;
  std::string killed_because = "";  // why the coordinator had it killed; empty: it did not
  bool may_restart = false;         // after this end, all workers may be started again
  // Whether its control group counts the processes that the kernel kills for memory, and why the
  // kernel has killed one of this worker's, if it has (see DescribeMemoryKill).
  bool counts_memory_kills = false;
  std::string memory_kill = "";
  // The class of the end of a worker that was killed for a reason with its own class, such as a
  // hang.
  v1::EndClass killed_as = v1::END_CLASS_UNSPECIFIED;

  // Returns "rank 1 (pid 1234 on node7) was killed by signal 9 (SIGKILL)", with the memory limit if
  // that is why.
  std::string ToString() const;
};

// Why an attempt ended before all workers were done.
struct AttemptEnd {
  // Causes other than kFailed occur only in jobs whose number of machines varies; only kFailed
  // counts as a restart.
  enum class Cause {
    kFailed,
    kMachineLost,
    kMachineLeft,  // its launch was stopped, or gave up
    kMachineCame,  // another machine waits for a place
  };
  std::string why;  // one line
  std::vector<std::string> last_lines;
  Cause cause = Cause::kFailed;
  // With a RestartGate, on all nodes: workers that can continue in their processes do so, and the
  // others are started again.
  bool restarts = false;
  // With kFailed; UNSPECIFIED: not known, which counts as PROCESS_FAILED.
  v1::EndClass end_class = v1::END_CLASS_UNSPECIFIED;
};

// Returns the class by which the failure policy counts it; UNSPECIFIED: an end that it does not
// limit.
v1::EndClass ClassOf(const AttemptEnd& end);

// What the failure policy of a job has counted so far: the restarts, and whether one more helps.
struct RestartCounts {
  int total = 0;           // restarts that count against max_restarts
  ClassCounts by_class{};  // restarts by class, for classes that have a limit
  // An end after which no restart helps, on a machine whose attempt ended for another cause that
  // was seen first. Empty `why`: none.
  AttemptEnd last{};
  void TakeLarger(const RestartCounts& other);
};

// The result of the agents' agreement before each attempt of a job.
struct Meeting {
  int node_rank = 0;
  int num_nodes = 1;
  // The address at which programs without a coordinator may meet. Rank 0's node chooses it.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  // The number that all agents give this attempt, and the restarts that they have counted before
  // it. They equal those of this agent, unless it has joined later than others, or the others know
  // of more restarts. If `counted.last` is set, nothing is started.
  int attempt = 0;
  RestartCounts counted = {};
  // Identifies the launch: the same for all its machines and attempts, and for no other launch.
  // Empty: not known, because machine 0 has an older version.
  std::string launch = {};
  // All nodes have finished the job already, and only this agent did not learn that before it died:
  // nothing is left to run.
  bool finished = false;
};

// An agent's interface to the rest of its job: the coordinator and, through it, the agents of the
// other nodes. An attempt is one start of all workers; attempts are numbered 0, 1, ... as restarts.
class JobCoordination {
 public:
  virtual ~JobCoordination() = default;

  // Meets the agents of all nodes; if their number varies, as many as come. `counted`: the restarts
  // so far. Blocks until all have come. Errors: DEADLINE_EXCEEDED naming the nodes that did not
  // come; INVALID_ARGUMENT the nodes were started with different settings; UNAVAILABLE no
  // coordinator; CANCELLED after Cancel().
  virtual absl::StatusOr<Meeting> Meet(int attempt, const RestartCounts& counted) = 0;

  // From now on, `on_ended` is called (at most once, on any thread) if the current attempt ends
  // because of another node or because the coordinator is gone.
  virtual void Watch(std::function<void(AttemptEnd)> on_ended) = 0;

  // Reports that a local worker has ended, successfully or not. Does not block.
  virtual void ReportEnd(const WorkerEnd& end) = 0;

  // Ends the attempt on all nodes. Blocks briefly; if the number of nodes varies, until it is known
  // whether the failure follows from the loss of another node, which takes up to a lease. Returns
  // what ended the attempt: another node may have been first.
  virtual AttemptEnd Fail(const AttemptEnd& end) = 0;

  // Reports that all local workers are done. Blocks until those of all other nodes are done, too.
  // Errors: ABORTED the attempt has ended (`on_ended` has the reason); CANCELLED after Cancel().
  virtual absl::Status Finish() = 0;

  // Makes Meet and Finish return. Final.
  virtual void Cancel() = 0;
};

// Returns a port of this machine that was free a moment ago. Errors: RESOURCE_EXHAUSTED, INTERNAL.
absl::StatusOr<int> FindFreePort();

}  // namespace muster::agent

#endif  // MUSTER_AGENT_JOB_COORDINATION_H_
