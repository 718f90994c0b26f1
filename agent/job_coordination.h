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
  std::string killed_because = "";  // why the coordinator had it killed; empty: it had not
  bool may_restart = false;         // if its attempt fails, all are started again
  // Whether its control group counts what the kernel kills for memory, and if it has killed a
  // process of this worker: why (see DescribeMemoryKill).
  bool counts_memory_kills = false;
  std::string memory_kill = "";
  // The class of a worker that was killed for a reason with its own class, such as a hang.
  v1::EndClass killed_as = v1::END_CLASS_UNSPECIFIED;

  // "rank 1 (pid 1234 on node7) was killed by signal 9 (SIGKILL)", and for memory, if that is why
  std::string ToString() const;
};

// Why an attempt ended before all workers were done.
struct AttemptEnd {
  // Only jobs whose number of machines varies have other causes than kFailed, and only that one
  // counts as a restart.
  enum class Cause {
    kFailed,
    kMachineLost,
    kMachineLeft,  // its launch was stopped, or gave up
    kMachineCame,  // one more waits for a place
  };
  std::string why;  // one line
  std::vector<std::string> last_lines;
  Cause cause = Cause::kFailed;
  // With a RestartGate, on all nodes: workers that can go on in their processes do, and the others
  // are started again.
  bool restarts = false;
  // With kFailed; UNSPECIFIED: not known, which counts as PROCESS_FAILED.
  v1::EndClass end_class = v1::END_CLASS_UNSPECIFIED;
};

// The class that the failure policy knows it by; UNSPECIFIED: an end that it does not limit.
v1::EndClass ClassOf(const AttemptEnd& end);

// What the failure policy of a job has counted so far: the restarts, and whether one more helps.
struct RestartCounts {
  int total = 0;           // those that count against max_restarts
  ClassCounts by_class{};  // of the classes that have a limit
  // An end after which no restart helps, on a machine whose attempt had another cause, which was
  // seen first. Without `why`: none.
  AttemptEnd last{};
  void TakeLarger(const RestartCounts& other);
};

// The agents' agreement before each attempt of a job.
struct Meeting {
  int node_rank = 0;
  int num_nodes = 1;
  // Where programs without a coordinator may meet. Rank 0's node chooses.
  std::string master_addr = "127.0.0.1";
  int master_port = 0;
  // All agents' number of this attempt, and what they have counted before it: that of this agent,
  // unless it has come later than others, or they know more. With `counted.last`, nothing starts.
  int attempt = 0;
  RestartCounts counted = {};
  // Names the launch: the same for all its machines and attempts, and for no other launch. Empty:
  // not known, where machine 0 has an older version.
  std::string launch = {};
  // All nodes have finished the job already, and only this agent did not learn it before it died:
  // there is nothing left to run.
  bool finished = false;
};

// An agent's interface to the rest of its job: the coordinator and, through it, the agents of the
// other nodes. An attempt is one start of all workers; attempts are numbered 0, 1, ... as restarts.
class JobCoordination {
 public:
  virtual ~JobCoordination() = default;

  // Meets the agents of all nodes; if their number varies, of as many as come. `counted`: the
  // restarts so far. Blocks until all are there. Errors: DEADLINE_EXCEEDED naming the
  // nodes that did not come; INVALID_ARGUMENT the nodes were started with different settings;
  // UNAVAILABLE no coordinator; CANCELLED after Cancel().
  virtual absl::StatusOr<Meeting> Meet(int attempt, const RestartCounts& counted) = 0;

  // From now on `on_ended` is called (once at most, on any thread) if the current attempt ends on
  // another node's account or because the coordinator is gone.
  virtual void Watch(std::function<void(AttemptEnd)> on_ended) = 0;

  // A local worker has ended, well or not. Does not block.
  virtual void ReportEnd(const WorkerEnd& end) = 0;

  // Ends the attempt on all nodes. Blocks shortly; if the number of nodes varies, until it is known
  // whether a failure follows from the loss of another node, which takes up to a lease. Returns
  // what ended it: another node may have been first.
  virtual AttemptEnd Fail(const AttemptEnd& end) = 0;

  // All local workers are done. Blocks until those of all other nodes are too. Errors: ABORTED the
  // attempt has ended (`on_ended` says why); CANCELLED after Cancel().
  virtual absl::Status Finish() = 0;

  // Makes Meet and Finish return. Final.
  virtual void Cancel() = 0;
};

// A port on this machine that was free a moment ago. Errors: RESOURCE_EXHAUSTED, INTERNAL.
absl::StatusOr<int> FindFreePort();

}  // namespace muster::agent

#endif  // MUSTER_AGENT_JOB_COORDINATION_H_
