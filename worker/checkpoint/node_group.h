#ifndef MUSTER_WORKER_CHECKPOINT_NODE_GROUP_H_
#define MUSTER_WORKER_CHECKPOINT_NODE_GROUP_H_

#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "worker/collective/comm.h"

namespace muster {

// Which ranks share a disk. Each group of ranks has a leader, its lowest rank, which creates,
// publishes and removes the group's checkpoint folders. The same on every rank, except for `rank`.
struct NodeGroups {
  // How the leader of a group is called in messages.
  struct Node {
    int leader = 0;
    std::string host;
  };

  int rank = 0;
  // By rank: the leader of its group.
  std::vector<int> leader_of;
  // By leader, ascending.
  std::vector<Node> nodes;

  // All ranks see one file system: rank 0 leads.
  static NodeGroups Shared(int rank, int size);

  bool leads() const { return leader_of[rank] == rank; }
  int leader() const { return leader_of[rank]; }
  // "node gpu-3 (ranks 2, 3)", of the group of `leader`.
  std::string Describe(int leader) const;
};

// Collective. Finds the groups by experiment: the lowest rank of each node puts a folder into
// `parent` (created if it is missing) and looks for those of the others; it removes what ranks left
// there that died. Nodes that mount the same
// folder are one group, so that no two leaders write into one folder. `node` is equal on the ranks
// of one node; ranks with another `parent` or other mounts count as another node. A node that may
// not write there is a group of its own. Other errors, the same on every rank: those of creating
// the folder or the file, with the rank.
absl::StatusOr<NodeGroups> FindNodeGroups(Comm& comm, const std::string& parent, int node);

// Collective. The groups for a checkpoint at `dir`: all ranks are one if `node` is absent.
absl::StatusOr<NodeGroups> GroupsOf(Comm& comm, const std::string& dir, std::optional<int> node);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_NODE_GROUP_H_
