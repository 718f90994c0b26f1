#ifndef MUSTER_WORKER_CHECKPOINT_NODE_PART_H_
#define MUSTER_WORKER_CHECKPOINT_NODE_PART_H_

#include <string>
#include <vector>

#include "worker/checkpoint/manifest.h"

namespace muster {

// Of a checkpoint that nodes keep in parts (Manifest::nodes): what one folder lacks because it is
// on the disks of other nodes. That is no damage.
struct KeptElsewhere {
  std::vector<std::string> files;  // sorted
  std::string nodes;               // "node gpu-2 (ranks 2, 3) and node gpu-3 (ranks 4, 5)"

  bool Has(const std::string& file) const;
  bool HasAny(const std::vector<std::string>& of) const;
};

// How messages call a node: "node gpu-2 (ranks 2, 3)".
std::string NodeName(const ManifestNode& node);

// Nodes of which `dir` has no file at all, if it has files of others. A node's files come together,
// so that one of which only some are there has lost the rest.
KeptElsewhere FindKeptElsewhere(const std::string& dir, const Manifest& manifest);

// For messages about such a `dir`.
std::string DescribePart(const std::string& dir, const KeptElsewhere& elsewhere);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_NODE_PART_H_
