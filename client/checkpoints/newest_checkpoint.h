#ifndef MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_
#define MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_

#include <string>

namespace muster::client {

// What load_state() takes of the numbered checkpoints in `folder` if no coordinator knows any and
// the files of this one are whole: the newest that has a manifest and was not held back. Empty:
// none. Changes nothing and reads no tensors; blocks on the disk.
std::string NewestCheckpoint(const std::string& folder);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_
