#ifndef MUSTER_COORDINATOR_JOBS_PLACEMENT_H_
#define MUSTER_COORDINATOR_JOBS_PLACEMENT_H_

#include <cstdint>
#include <limits>
#include <string>
#include <vector>

#include "absl/container/btree_map.h"
#include "absl/container/btree_set.h"
#include "absl/strings/string_view.h"
#include "proto/muster/v1/job.pb.h"
#include "proto/muster/v1/node.pb.h"

namespace muster::coordinator {

// The resources that are free on one node, or all that it has.
struct NodeSpace {
  int cpus = 0;
  int64_t memory = 0;
  absl::btree_set<int> gpus;           // indices
  const v1::NodeInfo* info = nullptr;  // its GPUs' properties; borrowed; null: unknown

  // Returns the GPUs in `gpus`, in order, that have the memory that `process` requests.
  std::vector<int> GpusFor(const v1::ProcessResources& process) const;
  // Returns how many processes of this size fit.
  int Fits(const v1::ProcessResources& process) const;
  // Take subtracts the resources of `placement`, and Give adds them back. A node may have returned
  // with less than it had: then space may become negative, and a GPU that `info` does not have is
  // not added back.
  void Take(const v1::Placement& placement, const v1::ProcessResources& process);
  void Give(const v1::Placement& placement, const v1::ProcessResources& process);
  // Reduces the space to what is also free in `later`.
  void AtMost(const NodeSpace& later);
};

// A node that may get a placement. Its name is the key in the map that holds it.
struct CandidateNode {
  const v1::NodeInfo* info = nullptr;  // borrowed
  uint64_t uid = 0;
  NodeSpace space;
};
using CandidateNodes = absl::btree_map<std::string, CandidateNode>;

struct PlacementDecision {
  std::vector<v1::Placement> placements;  // by node_rank; empty: it does not fit
  int processes = 0;                      // of the attempt, on all nodes together
  // Room for the next attempt, on nodes of their own, as far as there is any.
  std::vector<v1::Placement> spares;
  // The reason if the attempt does not fit: text that follows "waits for" or "cannot run:".
  std::string why;
};

// Chooses the nodes on which all processes of one attempt start together. Places max_processes, or
// `at_most` if that is fewer; if they do not fit, as many as fit, at least min_processes. Each node
// gets the same number of processes, and as few nodes as possible are used; among equal choices,
// nodes of one rack are preferred, and fuller nodes over emptier ones. Nodes of one rack and NVLink
// domain get neighbouring ranks. Spares come from what is left. `spec` is one that CompleteJobSpec
// has accepted and completed.
PlacementDecision Place(const v1::JobSpec& spec,
                        const google::protobuf::RepeatedPtrField<std::string>& avoided,
                        const CandidateNodes& nodes, int at_most = std::numeric_limits<int>::max());

// Returns whether Place finds a place; faster.
bool HasRoom(const v1::JobSpec& spec,
             const google::protobuf::RepeatedPtrField<std::string>& avoided,
             const CandidateNodes& nodes, int at_most = std::numeric_limits<int>::max());

// Returns at most `count` spares, each with room for `each` processes of `spec`, on nodes that have
// no placement in `taken`; prefers the racks of `taken`.
std::vector<v1::Placement> PlaceSpares(
    const v1::JobSpec& spec, int each, int count,
    const google::protobuf::RepeatedPtrField<std::string>& avoided,
    const std::vector<const v1::Placement*>& taken, const CandidateNodes& nodes);

// Returns the number of processes on all nodes together.
int CountProcesses(const v1::JobAttempt& attempt);

// "4 processes", "1 to 4 processes"
std::string DescribeSize(const v1::JobSpec& spec);
// "4 processes with 2 GPUs, 8 CPUs and 16 GiB each"
std::string DescribeDemand(const v1::JobSpec& spec);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_PLACEMENT_H_
