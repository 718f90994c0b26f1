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

// What load_state() takes of the numbered checkpoints in `folder` if no coordinator knows any and
// the files of this one are whole: the newest whose manifest can be read and that was not held
// back. nullopt: none. Passes over a save that is sealed and lacks only its name
// (checkpoint_12.tmp-...), which a load gives it and takes. Changes nothing and reads no tensors;
// blocks on the disk. Errors: those of a folder that cannot be listed, such as PERMISSION_DENIED,
// and of a manifest or seal.json that may be readable later (StaysUnreadable()).
absl::StatusOr<std::optional<FoundCheckpoint>> NewestCheckpoint(const std::string& folder);

// Who decides that, for people: of a program whose coordinator knows no checkpoint.
inline constexpr char kWhoResumes[] =
    "rank 0 takes the newest one in the folder whose files are whole, also one that is sealed and "
    "not yet published (.tmp-...), which is not looked at here; its program may name another "
    "folder";

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_NEWEST_CHECKPOINT_H_
