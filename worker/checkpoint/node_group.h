#ifndef MUSTER_WORKER_CHECKPOINT_NODE_GROUP_H_
#define MUSTER_WORKER_CHECKPOINT_NODE_GROUP_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/collective/comm.h"

namespace muster {

// The groups of ranks that share a disk. Each group has a leader, its lowest rank, which creates,
// publishes and removes the group's checkpoint folders. The same on every rank, except for `rank`.
struct NodeGroups {
  // How messages name the leader of a group.
  struct Node {
    int leader = 0;
    std::string host;
  };

  int rank = 0;
  // By rank: the leader of its group.
  std::vector<int> leader_of;
  // By leader, ascending.
  std::vector<Node> nodes;

  // Returns the groups for one shared file system: rank 0 leads all ranks.
  static NodeGroups Shared(int rank, int size);

  bool leads() const { return leader_of[rank] == rank; }
  int leader() const { return leader_of[rank]; }
  // Returns the description of the group of `leader`: "node gpu-3 (ranks 2, 3)".
  std::string Describe(int leader) const;
};

// Collective. Finds the groups by experiment: the lowest rank of each node puts a folder into
// `parent` (created if it is missing) and looks for those of the others; it also removes what dead
// ranks have left there. Nodes that mount the same folder are one group, so that no two leaders
// write into one folder. `node` is equal on the ranks of one node; ranks with another `parent` or
// other mounts count as another node. A node that may not write there is a group of its own. Other
// errors, the same on every rank: those of creating the folder or the file, with the rank.
absl::StatusOr<NodeGroups> FindNodeGroups(Comm& comm, const std::string& parent, int node);

// Collective. Returns the groups for a checkpoint at `dir`: one group of all ranks if `node` is
// absent.
absl::StatusOr<NodeGroups> GroupsOf(Comm& comm, const std::string& dir, std::optional<int> node);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_NODE_GROUP_H_
