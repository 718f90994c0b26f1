#include "client/checkpoints/seal_marks.h"

#include <errno.h>
#include <unistd.h>

#include <algorithm>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/status_macros.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/seal.h"

namespace muster::client {

absl::StatusOr<bool> NoteMarks(const std::string& dir, const std::string& sha256, bool promoted,
                               bool pinned) {
  absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(dir);
  if (absl::IsNotFound(seal.status())) return false;
  MUSTER_RETURN_IF_ERROR(seal.status());
  if (seal->sha256 != sha256) return false;
  if (seal->promoted == promoted && seal->pinned == pinned) return true;
  seal->promoted = promoted;
  seal->pinned = pinned;
  MUSTER_RETURN_IF_ERROR(WriteSeal(dir, *seal));
  MUSTER_RETURN_IF_ERROR(SyncDirectory(dir));
  return true;
}

absl::Status PinFolder(const std::string& dir, bool pinned) {
  // A damaged one may be worth keeping, too.
  const absl::StatusOr<Manifest> manifest = ReadManifest(dir);
  if (absl::IsNotFound(manifest.status())) return manifest.status();
  const std::string path = JoinPath(dir, kPinName);
  const auto is_pin = [](const ManifestFile& file) { return file.name == kPinName; };
  if (manifest.ok() && std::any_of(manifest->files.begin(), manifest->files.end(), is_pin)) {
    return absl::FailedPreconditionError(
        absl::StrCat(path,
                     " was written by the program, so this folder cannot be pinned without a "
                     "coordinator: copy the folder to keep it"));
  }
  if (pinned) {
    if (!PathExists(path)) MUSTER_RETURN_IF_ERROR(WriteFileAtomically(path, ""));
    return SyncDirectory(dir);
  }
  if (unlink(path.c_str()) != 0 && errno != ENOENT) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot remove ", path));
  }
  MUSTER_RETURN_IF_ERROR(SyncDirectory(dir));
  absl::StatusOr<RegisteredCheckpoint> seal = ReadSeal(dir);
  if (absl::IsNotFound(seal.status())) return absl::OkStatus();
  MUSTER_RETURN_IF_ERROR(seal.status());
  if (!seal->pinned) return absl::OkStatus();
  seal->pinned = false;
  MUSTER_RETURN_IF_ERROR(WriteSeal(dir, *seal));
  return SyncDirectory(dir);
}

}  // namespace muster::client
