#ifndef MUSTER_WORKER_CHECKPOINT_LASTING_FOLDER_H_
#define MUSTER_WORKER_CHECKPOINT_LASTING_FOLDER_H_

#include <string>

#include "absl/status/status.h"

namespace muster {

// Creates the folder and its parents durably, so that a power failure does not lose a parent
// together with what is synced in the folder. Another process may have created the parents without
// syncing them, so the first call of this process for a folder, also for one that was created
// again, syncs all of them up to the mount point, except those that it may not read. Blocks on the
// disk. Thread-safe. Errors: FAILED_PRECONDITION if `folder` is a file; those of the disk.
absl::Status MakeLastingFolder(const std::string& folder);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_LASTING_FOLDER_H_
