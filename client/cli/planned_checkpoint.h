#ifndef MUSTER_CLIENT_CLI_PLANNED_CHECKPOINT_H_
#define MUSTER_CLIENT_CLI_PLANNED_CHECKPOINT_H_

#include <string>

#include "client/jobs/job_types.h"

namespace muster::client {

// Fills in from which checkpoint of `folder` a program continues whose coordinator knows none, and
// who decides that; or that the folder cannot be read. Blocks on the disk.
void FindCheckpoint(const std::string& folder, PlannedCheckpoint* checkpoint);

// As dry runs say it: the path, "none" or "unknown".
std::string ResumesFrom(const PlannedCheckpoint& checkpoint);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CLI_PLANNED_CHECKPOINT_H_
