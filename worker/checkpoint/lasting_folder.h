#ifndef MUSTER_WORKER_CHECKPOINT_LASTING_FOLDER_H_
#define MUSTER_WORKER_CHECKPOINT_LASTING_FOLDER_H_

#include <string>

#include "absl/status/status.h"

namespace muster {

// Makes the folder, and those around it, so that a loss of power takes none of what is synced in it
// with the folders around. Another process may have made these, for its logs: the first call of
// this process for a folder, and for one that was made anew, syncs them all, up to where the file
// system begins, but for those that it may not read. Blocks on the disk. Thread-safe. Errors:
// FAILED_PRECONDITION if `folder` is a file; those of the disk.
absl::Status MakeLastingFolder(const std::string& folder);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_LASTING_FOLDER_H_
