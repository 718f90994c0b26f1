#ifndef MUSTER_WORKER_CHECKPOINT_REMOVAL_H_
#define MUSTER_WORKER_CHECKPOINT_REMOVAL_H_

#include <string>

#include "absl/status/status.h"

namespace muster {

// Checkpoint folders belong to the user, who may have mounted something in them: all code that
// removes such a folder, including a staging folder or one that was replaced, uses these functions.
// They block on the disk. Thread-safe.

// Checks whether this process may remove everything in the folder `dir`. Errors:
// FAILED_PRECONDITION if there is a mount point in it; those of the folder that prevents it, which
// they name.
absl::Status CheckRemovable(const std::string& dir);

// Removes `path` and everything below it, or nothing if it is or contains a mount point. A missing
// path is not an error. Errors: FAILED_PRECONDITION naming the mount point; those of the disk,
// after which a part may be gone.
absl::Status RemoveCheckpointTree(const std::string& path);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_REMOVAL_H_
