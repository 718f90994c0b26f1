#include "client/checkpoints/seal_marks.h"

#include "base/file.h"
#include "base/status_macros.h"
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

}  // namespace muster::client
