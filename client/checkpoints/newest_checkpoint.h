#ifndef MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_
#define MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_

#include <cstdint>
#include <optional>
#include <string>

namespace muster::client {

struct FoundCheckpoint {
  std::string path;
  int64_t step = 0;
};

// What load_state() takes of the numbered checkpoints in `folder` if no coordinator knows any and
// the files of this one are whole: the newest whose manifest can be read and that was not held
// back. nullopt: none. Changes nothing and reads no tensors; blocks on the disk.
std::optional<FoundCheckpoint> NewestCheckpoint(const std::string& folder);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_
