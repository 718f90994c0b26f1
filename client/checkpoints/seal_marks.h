#ifndef MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
#define MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_

#include <string>

#include "absl/functional/function_ref.h"
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

// The marks that a coordinator has for a checkpoint, whichever command set them last.
struct Marks {
  bool promoted = false;
  bool pinned = false;
  friend bool operator==(const Marks& a, const Marks& b) = default;
};

// Call it after NoteMarks(): of two concurrent commands, the one that reached the coordinator first
// may write to the folder last. Calls `recorded` and then `note`, until `recorded` returns the
// marks that were noted last (at first `noted`), so that the folder ends with the coordinator's
// marks. Errors: those of both; ABORTED if the marks keep changing.
absl::Status FollowMarks(Marks noted, absl::FunctionRef<absl::StatusOr<Marks>()> recorded,
                         absl::FunctionRef<absl::Status(const Marks&)> note);

// The folder of a checkpoint, as its record names it.
struct RecordedFolder {
  std::string path;
  std::string staging = "";  // before it got that name; empty: it has it
  std::string sha256;        // see NoteMarks()
};

// After the coordinator has marked a checkpoint as `asked`: notes that in its folder, follows what
// others have it marked as meanwhile (FollowMarks), and for `unpins` removes the pin of a person.
// Nothing is done, and there is no error, if this machine does not see the folder. The message of
// an error says what the folder says by then.
absl::Status MarkRecordedFolder(const RecordedFolder& folder, const Marks& asked, bool unpins,
                                absl::FunctionRef<absl::StatusOr<Marks>()> recorded);

// Makes or removes the pin that a person gives to the checkpoint in `dir`, without a coordinator:
// the file kPinName (worker/checkpoint/seal.h), with which every retention leaves it alone.
// Removing it also changes a seal.json that says that the checkpoint is pinned. Durable. Errors:
// NOT_FOUND if there is no checkpoint; FAILED_PRECONDITION if it has a file of the program's own by
// that name; those of the disk.
absl::Status PinFolder(const std::string& dir, bool pinned);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
