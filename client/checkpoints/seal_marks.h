#ifndef MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
#define MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_

#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"

namespace muster::client {

// Writes into the seal.json of the checkpoint in `dir` whether its coordinator has it promoted and
// pinned, for readers of the folder without a coordinator. `sha256`: of its record, in hexadecimal
// digits. Returns false if the folder does not exist (this machine may not see it) or holds another
// checkpoint, which stays unchanged. Blocks on the disk, and for some seconds on a writer that has
// locked the folder: ABORTED if that writer does not finish.
absl::StatusOr<bool> NoteMarks(const std::string& dir, const std::string& sha256, bool promoted,
                               bool pinned);

// The marks of a checkpoint at a coordinator, whichever command set them last.
struct Marks {
  bool promoted = false;
  bool pinned = false;
  friend bool operator==(const Marks& a, const Marks& b) = default;
};

// Call it after NoteMarks(): if two commands run concurrently, the one that reached the coordinator
// first may write to the folder last. Calls `recorded` and then `note`, until `recorded` returns
// the marks that were noted last (at first `noted`), so that the folder ends with the coordinator's
// marks. Errors: those of both; ABORTED if the marks keep changing.
absl::Status FollowMarks(Marks noted, absl::FunctionRef<absl::StatusOr<Marks>()> recorded,
                         absl::FunctionRef<absl::Status(const Marks&)> note);

// The folder of a checkpoint, as its record names it.
struct RecordedFolder {
  std::string path;
  std::string staging = "";  // before it got its final name; empty: it has it
  std::string sha256;        // see NoteMarks()
};

// After the coordinator has marked a checkpoint as `asked`: writes that into its folder, follows
// the marks that others set meanwhile (FollowMarks), and for `unpins` removes a person's pin. Does
// nothing, and returns no error, if this machine does not see the folder. An error's message says
// what the folder says by then.
absl::Status MarkRecordedFolder(const RecordedFolder& folder, const Marks& asked, bool unpins,
                                absl::FunctionRef<absl::StatusOr<Marks>()> recorded);

// Makes or removes a person's pin for the checkpoint in `dir`, without a coordinator: the file
// kPinName (worker/checkpoint/seal.h), which keeps every retention away from it. Removing it also
// changes a seal.json that says that the checkpoint is pinned. Durable. Errors: NOT_FOUND if there
// is no checkpoint; FAILED_PRECONDITION if the program has saved its own file by that name; those
// of the disk.
absl::Status PinFolder(const std::string& dir, bool pinned);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_SEAL_MARKS_H_
