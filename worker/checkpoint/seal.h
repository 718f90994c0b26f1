#ifndef MUSTER_WORKER_CHECKPOINT_SEAL_H_
#define MUSTER_WORKER_CHECKPOINT_SEAL_H_

#include <cstddef>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/signature.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/registrar.h"

namespace muster {

// seal.json: the coordinator's record of a checkpoint, beside its manifest
// (docs/checkpoint_format.md). It ties the folder to the record, and is checked where there is no
// coordinator.

// Writes seal.json, into the space reserved by BeginSealing() if there is such. Not durable until
// the folder is synced.
absl::Status WriteSeal(const std::string& dir, const RegisteredCheckpoint& record);

// The same in two parts: the text of seal.json, and writing it.
std::string EncodeSeal(const RegisteredCheckpoint& record);
absl::Status WriteSealText(const std::string& dir, absl::string_view text);

// Fills in the facts about its files in a record, from `files` and the manifest in `dir`, and then
// its hash.
absl::Status SealFiles(const std::string& dir, const std::vector<ManifestFile>& files,
                       RegisteredCheckpoint* record);

// Returns the most bytes that the record of such a checkpoint takes, for BeginSealing().
size_t RoomForSeal(const std::string& job, const std::string& path);

// Errors: NOT_FOUND if the folder has no record; DATA_LOSS if it is damaged, UNIMPLEMENTED if it is
// of a newer version: a load then skips the checkpoint, which may be held back. Others may be
// transient, see StaysUnreadable().
absl::StatusOr<RegisteredCheckpoint> ReadSeal(const std::string& dir);

// Checks that the record `seal` of the checkpoint in `dir` is unchanged since it was sealed and is
// about what is there: its hash matches its facts, and the manifest and its files are those that
// the ranks reported. With a `key`, also that this key signed it and, for a numbered folder, that
// it was signed under that name; `key_name` names the key in errors. Reads the manifest, not the
// files that it lists. Errors: DATA_LOSS naming the folder.
absl::Status CheckSeal(const std::string& dir, const Manifest& manifest,
                       const RegisteredCheckpoint& seal, const VerifyingKey* key = nullptr,
                       const std::string& key_name = "");

// An empty file by which a person pins a checkpoint, independently of its record, which need not
// exist (client/checkpoints/seal_marks.h). HasPin() also returns true if the folder cannot be
// examined.
inline constexpr char kPinName[] = "pinned";
bool HasPin(const std::string& dir);

// Returns the paths of the numbered checkpoints whose records say that they are pinned, and of
// those whose record cannot be read.
absl::StatusOr<std::vector<std::string>> PinnedIn(const CheckpointFolder& folder);

// Returns the text whose SHA-256 is `record.sha256`.
std::string SealText(const RegisteredCheckpoint& record);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_SEAL_H_
