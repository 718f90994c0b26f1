#ifndef MUSTER_AGENT_NODE_GROUPS_H_
#define MUSTER_AGENT_NODE_GROUPS_H_

#include <set>
#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "agent/control_group.h"

namespace muster::agent {

// The place of a process in the tree of cgroup v2.
struct OwnGroup {
  std::string mount;  // the folder of the tree
  std::string path;   // below it: "/" or "/system.slice/muster-agent.service"
  std::string folder() const;
};

// Reads the texts of /proc/self/cgroup and /proc/self/mountinfo. Errors: NOT_FOUND with a message
// if this machine, or this container, has no cgroup v2. Pure.
absl::StatusOr<OwnGroup> FindOwnGroup(absl::string_view cgroup, absl::string_view mountinfo);

struct NodeGroupsOptions {
  // "auto": below the agent's own group, as far as that is possible. "off". Or the folder of a
  // group that the agent may fill, and that must be usable.
  std::string where = "auto";
  std::string node_uid = {};  // names this agent's part of that group, which other agents may share
  bool limit_cpus = false;
  // Paths that tests replace.
  std::string proc = "/proc/self";
  std::string systemd = "/run/systemd/system";  // exists where systemd runs
  bool root = geteuid() == 0;
  ControlGroupCalls calls = {};
};

// The control groups of the attempts on a node, on the side of its agent:
//   ROOT/agent                  the agent, if that is necessary for limits
//   ROOT/muster-UID/ATTEMPT     made here; what is below it is the runner's (WorkerGroups)
//
// Below the agent's own group of a systemd service there are no limits: the kernel lets no process
// into a group that gives controllers to groups below, so systemd could not start the next agent
// there while jobs run (docs/decisions/0041-control-groups.md).
//
// Not thread-safe.
class NodeGroups {
 public:
  // Fails only for a folder that was named: FAILED_PRECONDITION and NOT_FOUND say what it lacks.
  // Otherwise attempts get as much as is possible.
  static absl::StatusOr<NodeGroups> Open(NodeGroupsOptions options);

  bool used() const { return used_; }
  bool limits_memory() const { return limits_memory_; }
  bool limits_cpus() const { return limits_cpus_; }
  // What is missing and why, in one line; empty: nothing is.
  const std::string& why() const { return why_; }
  // Returns "memory limits in FOLDER", "no control groups: ...": for the log.
  std::string ToString() const;

  // Makes a group for this attempt and returns its folder; empty if groups are not used. `cpus`: of
  // all its processes, for its share while CPUs are scarce.
  absl::StatusOr<std::string> MakeAttempt(const std::string& name, int cpus);
  // Returns the group in that folder, even one that an earlier agent has made.
  ControlGroup At(const std::string& folder) const { return ControlGroup(folder, options_.calls); }

  // Ends and removes the groups of this node that are not among `running`: those that a killed
  // agent has left.
  void Sweep(const std::set<std::string>& running) const;

 private:
  explicit NodeGroups(NodeGroupsOptions options);
  absl::Status FindRoot();
  // Gives the controllers to the groups of attempts; may be repeated.
  absl::Status EnableLimits();
  // Sets up the group of an attempt.
  absl::Status Fill(const ControlGroup& attempt, int cpus) const;
  void Without(absl::string_view why);
  ControlGroup Base() const;

  NodeGroupsOptions options_;
  ControlGroup root_;
  bool used_ = false;
  bool may_limit_ = false;  // the root is not a group in which systemd starts processes
  bool moves_ = false;      // the agent is in the root, which must not have processes of its own
  bool limits_memory_ = false;
  bool limits_cpus_ = false;
  std::string why_;
};

}  // namespace muster::agent

#endif  // MUSTER_AGENT_NODE_GROUPS_H_
