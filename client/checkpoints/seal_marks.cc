#include "client/checkpoints/seal_marks.h"

#include <errno.h>
#include <fcntl.h>
#include <unistd.h>

#include <algorithm>

#include "absl/functional/function_ref.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/file_identity.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/staging_folder.h"

namespace muster::client {
namespace {

// Calls `code` with a path of the folder that `dir` is now, even if a save gives the name to
// another checkpoint meanwhile. During the call, the folder is locked against writers and other
// changes of marks. `stays`, if not null: whether the name still belongs to that folder afterwards.
absl::Status InLockedFolder(const std::string& dir,
                            absl::FunctionRef<absl::Status(const std::string& path)> code,
                            bool* stays = nullptr) {
  const OwnedFd folder(open(dir.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (!folder.open()) {
    const int error = errno;
    MUSTER_RETURN_IF_ERROR(CheckLink(dir));
    return ReadError(error, absl::StrCat("cannot open ", dir));
  }
  const std::string path = absl::StrCat("/proc/self/fd/", folder.get());
  const absl::Status status = [&]() -> absl::Status {
    // -1: loads from the folder share the lock, and change nothing.
    MUSTER_ASSIGN_OR_RETURN(const int lock, LockFolderPatiently(path));
    const OwnedFd held(lock);
    return code(path);
  }();
  if (stays != nullptr) *stays = FileIdentityAt(path) == FileIdentityAt(dir);
  return Renamed(status, path, dir);
}

absl::StatusOr<bool> NoteMarksIn(const std::string& dir, const std::string& sha256, bool promoted,
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

absl::Status PinFolderIn(const std::string& dir, bool pinned) {
  // A damaged checkpoint may be worth keeping, too.
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

}  // namespace

absl::StatusOr<bool> NoteMarks(const std::string& dir, const std::string& sha256, bool promoted,
                               bool pinned) {
  bool noted = false;
  const absl::Status status = InLockedFolder(dir, [&](const std::string& path) -> absl::Status {
    MUSTER_ASSIGN_OR_RETURN(noted, NoteMarksIn(path, sha256, promoted, pinned));
    return absl::OkStatus();
  });
  if (absl::IsNotFound(status)) return false;
  MUSTER_RETURN_IF_ERROR(status);
  return noted;
}

absl::Status FollowMarks(Marks noted, absl::FunctionRef<absl::StatusOr<Marks>()> recorded,
                         absl::FunctionRef<absl::Status(const Marks&)> note) {
  constexpr int kMostChanges = 100;
  for (int i = 0; i < kMostChanges; ++i) {
    MUSTER_ASSIGN_OR_RETURN(const Marks now, recorded());
    if (now == noted) return absl::OkStatus();
    MUSTER_RETURN_IF_ERROR(note(now));
    noted = now;
  }
  return absl::AbortedError("other commands keep changing its marks; repeat the command");
}

absl::Status MarkRecordedFolder(const RecordedFolder& folder, const Marks& asked, bool unpins,
                                absl::FunctionRef<absl::StatusOr<Marks>()> recorded) {
  // Returns false if it is in none of its places. It may get its name between two looks.
  const auto anywhere = [&](absl::FunctionRef<absl::StatusOr<bool>(const std::string& dir)> does)
      -> absl::StatusOr<bool> {
    MUSTER_ASSIGN_OR_RETURN(bool done, does(folder.path));
    if (done || folder.staging.empty()) return done;
    MUSTER_ASSIGN_OR_RETURN(done, does(folder.staging));
    if (done) return true;
    return does(folder.path);
  };
  const auto note = [&](const Marks& marks) {
    return anywhere([&](const std::string& dir) {
      return NoteMarks(dir, folder.sha256, marks.promoted, marks.pinned);
    });
  };
  absl::StatusOr<bool> noted = note(asked);
  if (noted.ok() && !*noted) return absl::OkStatus();
  if (noted.ok() && unpins) {
    noted = anywhere([](const std::string& dir) -> absl::StatusOr<bool> {
      const absl::Status unpinned = PinFolder(dir, /*pinned=*/false);
      if (absl::IsNotFound(unpinned)) return false;
      MUSTER_RETURN_IF_ERROR(unpinned);
      return true;
    });
  }
  if (!noted.ok()) {
    return absl::Status(noted.status().code(),
                        absl::StrCat("the coordinator has it, but the folder does not say so: ",
                                     noted.status().message()));
  }
  const absl::Status followed =
      FollowMarks(asked, recorded, [&](const Marks& marks) -> absl::Status {
        MUSTER_ASSIGN_OR_RETURN(const bool found, note(marks));
        if (found) return absl::OkStatus();
        return absl::NotFoundError(
            absl::StrCat(folder.path, " is not there any more, or is another checkpoint"));
      });
  if (followed.ok()) return followed;
  return absl::Status(followed.code(),
                      absl::StrCat("the folder says so, too, but whether another command has "
                                   "changed it since is not known: ",
                                   followed.message()));
}

absl::Status PinFolder(const std::string& dir, bool pinned) {
  // The error of all commands for a folder that is not a checkpoint.
  if (const absl::Status manifest = ReadManifest(dir).status(); absl::IsNotFound(manifest)) {
    return manifest;
  }
  bool stays = true;
  const absl::Status status = InLockedFolder(
      dir, [&](const std::string& path) { return PinFolderIn(path, pinned); }, &stays);
  if (!stays) {
    return absl::AbortedError(absl::StrCat(
        dir, " is another checkpoint now: a save has replaced it; repeat the command"));
  }
  return status;
}

}  // namespace muster::client
