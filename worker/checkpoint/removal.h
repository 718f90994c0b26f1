#ifndef MUSTER_WORKER_CHECKPOINT_REMOVAL_H_
#define MUSTER_WORKER_CHECKPOINT_REMOVAL_H_

#include <string>

#include "absl/status/status.h"

namespace muster {

// Folders of checkpoints are the user's, who may have mounted something in them: whatever removes
// such a folder, a staging folder or one that was replaced included, goes through these functions.
// They block on the disk. Thread-safe.

// Whether this process may remove all that is in the folder `dir`. Errors: FAILED_PRECONDITION if
// there is a mount point in it; those of the folder that hinders it, which they name.
absl::Status CheckRemovable(const std::string& dir);

// Removes `path` and all below it; nothing if there is a mount point in it, or if it is one. What
// is not there is not an error. Errors: FAILED_PRECONDITION for a mount point, which it names;
// those of the disk, after which a part may be gone.
absl::Status RemoveCheckpointTree(const std::string& path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_REMOVAL_H_
