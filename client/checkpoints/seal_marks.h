#ifndef MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
#define MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_

#include <string>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::client {

// Writes into the seal.json of the checkpoint in `dir` whether its coordinator has it promoted and
// pinned, for those who read the folder without a coordinator. `sha256`: of its record, in
// hexadecimal digits. False if the folder is not there (this machine may not see it) or is another
// checkpoint, which is left as it is. Blocks on the disk.
absl::StatusOr<bool> NoteMarks(const std::string& dir, const std::string& sha256, bool promoted,
                               bool pinned);

// A pin that a person gives to the folder of a checkpoint, without a coordinator: an empty file in
// it. Every retention leaves the checkpoint alone (see PinnedIn() and ReadSeal() in
// worker/checkpoint/seal.h).
inline constexpr char kPinName[] = "pinned";

// Makes or removes the pin of the checkpoint in `dir`; the end also changes a seal.json that says
// that it is pinned. Durable. Errors: NOT_FOUND if there is no checkpoint; those of the disk.
absl::Status PinFolder(const std::string& dir, bool pinned);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
