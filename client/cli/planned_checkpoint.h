#ifndef MUSTER_CLIENT_CLI_PLANNED_CHECKPOINT_H_
#define MUSTER_CLIENT_CLI_PLANNED_CHECKPOINT_H_

#include <string>

#include "client/jobs/job_types.h"

namespace muster::client {

// Fills in the checkpoint of `folder` from which a program continues whose coordinator knows none,
// and who makes that choice; or that the folder cannot be read. Blocks on the disk.
void FindCheckpoint(const std::string& folder, PlannedCheckpoint* checkpoint);

// Returns what dry runs print: the path, "none" or "unknown".
std::string ResumesFrom(const PlannedCheckpoint& checkpoint);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_PLANNED_CHECKPOINT_H_
