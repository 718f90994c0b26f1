#ifndef MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
#define MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::client {

// Writes into the seal.json of the checkpoint in `dir` whether its coordinator has it promoted and
// pinned, for those who read the folder without a coordinator. `sha256`: of its record, in
// hexadecimal digits. False if the folder is not there (this machine may not see it) or is another
// checkpoint, which is left as it is. Blocks on the disk, and for some seconds on a writer that has
// the folder locked: ABORTED if that does not finish.
absl::StatusOr<bool> NoteMarks(const std::string& dir, const std::string& sha256, bool promoted,
                               bool pinned);

// Makes or removes the pin that a person gives to the checkpoint in `dir`, without a coordinator:
// the file kPinName (worker/checkpoint/seal.h), with which every retention leaves it alone.
// Removing it also changes a seal.json that says that the checkpoint is pinned. Durable. Errors:
// NOT_FOUND if there is no checkpoint; FAILED_PRECONDITION if it has a file of the program's own by
// that name; those of the disk.
absl::Status PinFolder(const std::string& dir, bool pinned);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
