#ifndef MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_
#define MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_

#include <cstdint>
#include <optional>
#include <string>

#include "absl/status/statusor.h"

namespace muster::client {

struct FoundCheckpoint {
  std::string path;
  int64_t step = 0;
};

// Returns the numbered checkpoint in `folder` that load_state() takes if no coordinator knows any
// and the checkpoint's files are whole: the newest whose manifest can be read and that was not held
// back. nullopt: none. Skips a save that is sealed and lacks only its name (checkpoint_12.tmp-...),
// although a load would rename and take it. Changes nothing and reads no tensors; blocks on the
// disk. Errors: those of a folder that cannot be listed, such as PERMISSION_DENIED, and of a
// manifest or seal.json that may be readable later (StaysUnreadable()).
absl::StatusOr<std::optional<FoundCheckpoint>> NewestCheckpoint(const std::string& folder);

// Says who makes that choice, for people, if the program's coordinator knows no checkpoint.
inline constexpr char kWhoResumes[] =
    "rank 0 takes the newest one in the folder whose files are whole, also one that is sealed and "
    "not yet published (.tmp-...), which is not looked at here; its program may name another "
    "folder";

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_
