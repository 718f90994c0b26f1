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

// What is free on one node, or all it has.
struct NodeSpace {
  int cpus = 0;
  int64_t memory = 0;
  absl::btree_set<int> gpus;           // indices
  const v1::NodeInfo* info = nullptr;  // what its GPUs have; borrowed; null: not known

  // The GPUs in `gpus`, in order, that have the memory that `process` requests.
  std::vector<int> GpusFor(const v1::ProcessResources& process) const;
  // How many processes of this size fit.
  int Fits(const v1::ProcessResources& process) const;
  // Takes what `placement` has, or gives it back. A node may have returned with less than it had:
  // space may become negative, and a GPU that `info` does not have is not given back.
  void Take(const v1::Placement& placement, const v1::ProcessResources& process);
  void Give(const v1::Placement& placement, const v1::ProcessResources& process);
  // Keeps only room that is free now and also in `later`.
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
  int processes = 0;                      // of the attempt
  // Beside them, on nodes of their own: room for the next attempt, as far as there is some.
  std::vector<v1::Placement> spares;
  // Words that follow "waits for" or "cannot run:", if it does not fit.
  std::string why;
};

// Where all processes of one attempt start together: max_processes, or `at_most` if that is fewer,
// if they fit, else as many as fit, at least min_processes; the same number on each node; as few
// nodes as possible; of those that remain equal, nodes of one rack before others, and nodes that
// are fuller before emptier ones. Nodes of one rack and NVLink domain get neighbouring ranks.
// Spares come from what is left. `spec` is one that CompleteJobSpec has accepted and completed.
PlacementDecision Place(const v1::JobSpec& spec,
                        const google::protobuf::RepeatedPtrField<std::string>& avoided,
                        const CandidateNodes& nodes, int at_most = std::numeric_limits<int>::max());

// Whether Place finds a place; quicker.
bool HasRoom(const v1::JobSpec& spec,
             const google::protobuf::RepeatedPtrField<std::string>& avoided,
             const CandidateNodes& nodes, int at_most = std::numeric_limits<int>::max());

// At most `count` spares, each with room for `each` processes of `spec`, on nodes of which `taken`
// has none; in the racks of `taken` first.
std::vector<v1::Placement> PlaceSpares(
    const v1::JobSpec& spec, int each, int count,
    const google::protobuf::RepeatedPtrField<std::string>& avoided,
    const std::vector<const v1::Placement*>& taken, const CandidateNodes& nodes);

// Of all nodes together.
int CountProcesses(const v1::JobAttempt& attempt);

// "4 processes", "1 to 4 processes"
std::string DescribeSize(const v1::JobSpec& spec);
// "4 processes with 2 GPUs, 8 CPUs and 16 GiB each"
std::string DescribeDemand(const v1::JobSpec& spec);

}  // namespace muster::coordinator

#endif  // MUSTER_COORDINATOR_JOBS_PLACEMENT_H_
