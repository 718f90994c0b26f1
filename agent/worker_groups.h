#ifndef MUSTER_AGENT_WORKER_GROUPS_H_
#define MUSTER_AGENT_WORKER_GROUPS_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "agent/control_group.h"
#include "base/owned_fd.h"

namespace muster::agent {

// The control groups of one attempt on one node, on the side of its runner:
//   FOLDER/runner   this process and its helpers
//   FOLDER/rank_R   a worker and all that it starts, with its limits
// Not thread-safe, except that copies of a descriptor may be used anywhere.
class WorkerGroups {
 public:
  struct Options {
    std::string folder = {};   // made by the agent (NodeGroups)
    int64_t memory_bytes = 0;  // limit of each worker; 0: none
    int cpus = 0;              // limit of each worker; 0: none
    ControlGroupCalls calls = {};
  };
  explicit WorkerGroups(Options options);

  // Moves this process to FOLDER/runner, if it is not there yet. Call before it starts others.
  absl::Status Enter() const;
  // Called by the agent while the runner still loads: moves the runner there. If that fails, the
  // runner moves itself and reports why it cannot. Blocks for some ten milliseconds.
  static void TakeRunner(const ControlGroup& attempt, int64_t pid);

  // Makes a new group for a start of the worker, for ProcessOptions::group_fd. Processes that an
  // earlier start has left in it are ended.
  absl::StatusOr<OwnedFd> Make(int rank) const;

  // For a worker that has ended: returns why the kernel has killed a process of it for memory (see
  // DescribeMemoryKill), or "". nullopt: its group does not count such kills.
  std::optional<std::string> MemoryKill(int rank) const;

  // Ends what is left in the groups of the workers and removes them. Blocks for a few seconds if
  // the kernel does not end a process; then the log names it, and the agent takes care of it later.
  void End() const;

 private:
  ControlGroup OfRank(int rank) const;

  const Options options_;
  const ControlGroup attempt_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_WORKER_GROUPS_H_
