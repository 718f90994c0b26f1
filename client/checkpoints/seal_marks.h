#ifndef MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
#define MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_

#include <string>

#include "absl/status/statusor.h"

namespace muster::client {

// Writes into the seal.json of the checkpoint in `dir` whether its coordinator has it promoted and
// pinned, for those who read the folder without a coordinator. `sha256`: of its record, in
// hexadecimal digits. False if the folder is not there (this machine may not see it) or is another
// checkpoint, which is left as it is. Blocks on the disk.
absl::StatusOr<bool> NoteMarks(const std::string& dir, const std::string& sha256, bool promoted,
                               bool pinned);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
