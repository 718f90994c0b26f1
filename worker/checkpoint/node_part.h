#ifndef MUSTER_WORKER_CHECKPOINT_NODE_PART_H_
#define MUSTER_WORKER_CHECKPOINT_NODE_PART_H_

#include <string>
#include <vector>

#include "worker/checkpoint/manifest.h"

namespace muster {

// The files of a checkpoint that nodes keep in parts (Manifest::nodes) which one folder lacks
// because they are on the disks of other nodes. That is not damage.
struct KeptElsewhere {
  std::vector<std::string> files;  // sorted
  std::string nodes;               // "node gpu-2 (ranks 2, 3) and node gpu-3 (ranks 4, 5)"

  bool Has(const std::string& file) const;
  bool HasAny(const std::vector<std::string>& of) const;
};

// Returns the name of a node for messages: "node gpu-2 (ranks 2, 3)".
std::string NodeName(const ManifestNode& node);

// Finds the nodes of which `dir` has no file at all, if it has files of others. A node's files come
// together, so a node with only some of its files there has lost the rest.
KeptElsewhere FindKeptElsewhere(const std::string& dir, const Manifest& manifest);

// Describes such a `dir` for messages.
std::string DescribePart(const std::string& dir, const KeptElsewhere& elsewhere);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_NODE_PART_H_
