#include "worker/checkpoint/folder.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <filesystem>
#include <limits>
#include <optional>
#include <system_error>
#include <tuple>
#include <utility>

#include "absl/container/flat_hash_map.h"
#include "absl/container/flat_hash_set.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/strip.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/log.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/disposal.h"
#include "worker/checkpoint/lasting_folder.h"
#include "worker/checkpoint/node_part.h"
#include "worker/checkpoint/read_error.h"
#include "worker/checkpoint/removal.h"
#include "worker/checkpoint/seal_order.h"
#include "worker/checkpoint/sealing.h"
#include "worker/checkpoint/shard_plan.h"
#include "worker/checkpoint/staging_folder.h"

namespace muster {
namespace {

// How long to wait before a folder is removed: a load from it may take hours, and the next save
// tries again.
constexpr absl::Duration kReadersAreWaitedFor = absl::Milliseconds(100);

constexpr absl::string_view kNumbered = "checkpoint_";

std::string Numbered(absl::string_view stem, int index, absl::string_view extension) {
  return index == 0 ? absl::StrCat(stem, extension) : absl::StrCat(stem, "_", index, extension);
}

bool ParseNumber(absl::string_view name, int64_t* number) {
  return absl::ConsumePrefix(&name, kNumbered) && IsDigits(name) &&
         (name.size() == 1 || name[0] != '0') && absl::SimpleAtoi(name, number) &&
         // There must be a number for the next checkpoint, too.
         *number < std::numeric_limits<int64_t>::max();
}

// Whether `name` is that of a staging folder of a numbered checkpoint.
bool ParseStagingNumber(absl::string_view name, int64_t* number) {
  const absl::string_view stem = StemOf(name, kStagingMark);
  return HasMark(name, stem, kStagingMark) && ParseNumber(stem, number);
}

// Returns false only if there is nothing; a path that cannot be examined at the moment is an error.
absl::StatusOr<bool> Exists(const std::string& path) {
  struct stat info;
  if (lstat(path.c_str(), &info) == 0) return true;
  if (errno == ENOENT || errno == ENOTDIR) return false;
  return ReadError(errno, absl::StrCat("cannot examine ", path));
}

// Whether the path is, or may be, a folder: also true if it cannot be examined at the moment, and
// for a dangling link, because the disk that it leads to may not be mounted.
bool MayBeFolder(const std::string& path) {
  struct stat info;
  if (stat(path.c_str(), &info) == 0) return S_ISDIR(info.st_mode);
  return (errno != ENOENT && errno != ENOTDIR) || PathExists(path);
}

absl::Status RenamePath(const std::string& from, const std::string& to) {
  if (rename(from.c_str(), to.c_str()) == 0) return absl::OkStatus();
  return absl::ErrnoToStatus(errno, absl::StrCat("cannot rename ", from, " to ", to));
}

// Puts `from` in the place of the folder `to`; returns the new path of that folder. `lock`: null,
// or -1, and gets the lock of that folder.
absl::StatusOr<std::string> Exchange(const std::string& from, const std::string& to, int* lock) {
  if (renameat2(AT_FDCWD, from.c_str(), AT_FDCWD, to.c_str(), RENAME_EXCHANGE) == 0) {
    if (lock != nullptr) *lock = LockFolder(from);
    return from;
  }
  // Lock it, so that no process that looks between the two renames puts it back.
  const OwnedFd replaced(LockFolder(to));
  std::string aside = absl::StrCat(to, kReplacedMark, RandomHex());
  MUSTER_RETURN_IF_ERROR(RenamePath(to, aside));
  if (const absl::Status renamed = RenamePath(from, to); !renamed.ok()) {
    MUSTER_RETURN_IF_ERROR(RenamePath(aside, to));
    return renamed;
  }
  // The duplicated descriptor holds the lock, too.
  if (lock != nullptr && replaced.open()) *lock = fcntl(replaced.get(), F_DUPFD_CLOEXEC, 0);
  return aside;
}

// Undoes an interrupted replacement: if a file system cannot exchange two folders, a crash can
// happen after the old folder was moved away and before the new one was put in its place.
absl::Status PutBackReplaced(const std::string& dir) {
  MUSTER_ASSIGN_OR_RETURN(const bool exists, Exists(dir));
  if (exists) return absl::OkStatus();
  const std::string parent = ParentPath(dir);
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  if (absl::IsNotFound(names.status())) return absl::OkStatus();
  MUSTER_RETURN_IF_ERROR(names.status());
  std::string newest;
  for (const std::string& name : *names) {
    if (!HasMark(name, BaseName(dir), kReplacedMark)) continue;
    const std::string path = JoinPath(parent, name);
    bool newer = newest.empty();
    if (!newer) {
      MUSTER_ASSIGN_OR_RETURN(newer, IsNewerCheckpoint(path, newest));
    }
    if (newer) newest = path;
  }
  if (newest.empty()) return absl::OkStatus();
  // Lock it: a save may be between its two renames, and another reader may try this at the same
  // time.
  const absl::StatusOr<int> lock = LockFolderPatiently(newest);
  const OwnedFd held(lock.value_or(-1));
  MUSTER_ASSIGN_OR_RETURN(const bool done, Exists(dir));
  if (done) return absl::OkStatus();
  MUSTER_RETURN_IF_ERROR(lock.status());
  MUSTER_LOG(Warning) << "putting " << newest << " back to " << dir
                      << ": a save that was to replace it did not finish";
  const absl::Status renamed = RenamePath(newest, dir);
  return PathExists(dir) ? absl::OkStatus() : renamed;
}

// Whether a checkpoint's own file may have the name: "model.safetensors", "scheduler_1.json",
// "optimizer-00001-of-00002.safetensors", "model_1.safetensors.index.json"; not "model.json".
bool IsNameOfLayout(absl::string_view name) {
  struct Kind {
    absl::string_view stem, extension;
    bool always_numbered = false;
  };
  constexpr Kind kKinds[] = {
      {"model", ".safetensors"},
      {"optimizer", ".safetensors"},
      {"scheduler", ".json"},
      {"sampler", ".safetensors"},
      {"scaler", ".json"},
      {"random_states", ".safetensors", true},
      {"custom_checkpoint", ".safetensors", true},
  };
  const absl::string_view object = name.substr(0, name.find_first_of("-."));
  for (const Kind& kind : kKinds) {
    absl::string_view number = object;
    if (!absl::ConsumePrefix(&number, kind.stem)) continue;
    const bool numbered = absl::ConsumePrefix(&number, "_") && IsDigits(number);
    if (!numbered && (kind.always_numbered || !number.empty())) return false;
    return kind.extension == ".json" ? name == absl::StrCat(object, ".json")
                                     : IsShardFileName(name, object, kind.extension);
  }
  return false;
}

// Moves the files of a replaced checkpoint that were not its own, and so belong to the user, to the
// new one.
void KeepForeignFiles(const std::string& old_dir, const std::string& new_dir) {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(old_dir);
  if (!names.ok()) return;
  absl::flat_hash_set<std::string> own = {kManifestName, kSealName, kSealingName};
  const absl::StatusOr<Manifest> manifest = ReadManifest(old_dir);
  if (manifest.ok()) {
    for (const ManifestFile& file : manifest->files) own.insert(file.name);
  } else {
    // Warn, because a reader that goes by the names in the folder would take old weights for the
    // new checkpoint's.
    MUSTER_LOG(Warning) << manifest.status().message() << ": of the checkpoint that " << new_dir
                        << " replaces only files that no checkpoint has by their names are kept";
  }
  for (const std::string& name : *names) {
    const std::string target = JoinPath(new_dir, name);
    if (!manifest.ok() && IsNameOfLayout(name)) continue;
    if (own.contains(name) || absl::StrContains(name, kStagingMark) || PathExists(target)) continue;
    if (const absl::Status moved = RenamePath(JoinPath(old_dir, name), target); !moved.ok()) {
      MUSTER_LOG(Warning) << moved.message();
    }
  }
}

// Whether the folder `path`, which has no writer, is the last copy of a checkpoint that was sealed
// and is to be called `named`, rather than one that the checkpoint there has replaced. `or_asked`:
// also true for one of which only the registry knows whether it was sealed.
absl::StatusOr<bool> AwaitsItsName(const std::string& path, const std::string& named,
                                   bool or_asked = false) {
  // A doomed folder may still have its record: it was being removed when its process ended.
  if (IsDoomed(BaseName(path))) return false;
  MUSTER_ASSIGN_OR_RETURN(const bool sealed, Exists(JoinPath(path, kSealName)));
  if (!sealed) {
    MUSTER_ASSIGN_OR_RETURN(const Sealing sealing, ReadSealing(path));
    if (sealing.state == Sealing::State::kNone) return false;
    // It never had the name, so no checkpoint has replaced it, and no clock is needed to compare
    // them.
    if (sealing.state == Sealing::State::kAsked) return or_asked;
  }
  MUSTER_ASSIGN_OR_RETURN(const bool taken, Exists(JoinPath(named, kManifestName)));
  if (!taken) return true;
  return IsNewerCheckpoint(path, named);
}

// Removes files that the writer left when it ended in the middle of WriteFileAtomically. Files that
// the manifest lists are the checkpoint's own, whatever a hook has called them.
void RemoveUnnamedFiles(const std::string& dir, const Manifest& manifest) {
  for (const std::string& name : ListDirectory(dir).value_or(std::vector<std::string>())) {
    const std::string left = JoinPath(dir, name);
    if (!HasMark(name, StemOf(name, kStagingMark), kStagingMark) ||
        manifest.Find(name) != nullptr) {
      continue;
    }
    if (unlink(left.c_str()) != 0) {
      MUSTER_LOG(Warning) << "cannot remove " << left
                          << ", which the writer of the checkpoint left";
    }
  }
}

// Renames a sealed checkpoint whose writer is gone, because a run that never loads would never
// rename it. Does not wait and replaces nothing: the folder stays as it is if it is locked, also by
// processes that load from it, if there are no locks, or if the name is taken.
void GiveItsName(const std::string& path, const std::string& named) {
  const OwnedFd lock(LockFolder(path, absl::ZeroDuration()));
  if (!lock.open()) return;
  const absl::Status status = [&]() -> absl::Status {
    MUSTER_ASSIGN_OR_RETURN(const bool taken, Exists(JoinPath(named, kManifestName)));
    if (taken) return absl::OkStatus();
    MUSTER_ASSIGN_OR_RETURN(const bool awaits, AwaitsItsName(path, named));
    if (!awaits) return absl::OkStatus();
    MUSTER_ASSIGN_OR_RETURN(const Manifest manifest, VerifyCheckpoint(path, VerifyLevel::kSizes));
    MUSTER_RETURN_IF_ERROR(NameSealing(path));
    RemoveUnnamedFiles(path, manifest);
    // There is nothing at that path, or an empty folder.
    MUSTER_RETURN_IF_ERROR(RenamePath(path, named));
    MUSTER_LOG(Info) << named << " was sealed when its writer ended: it has its name now";
    return SyncDirectory(ParentPath(named));
  }();
  if (!status.ok()) {
    MUSTER_LOG(Info) << path << " stays: it is sealed and lacks only the name " << named
                     << ", which it does not get: " << status.message();
  }
}

// Removes what killed writers left next to `dir`: their staging folders, and checkpoints that were
// partly removed or replaced.
void RemoveAbandoned(const std::string& dir) {
  const std::string parent = ParentPath(dir);
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  if (!names.ok()) return;
  const std::string own = BaseName(dir);
  for (const std::string& name : *names) {
    const bool replaced = HasMark(name, StemOf(name, kReplacedMark), kReplacedMark);
    const absl::string_view stem = StemOf(name, replaced ? kReplacedMark : kStagingMark);
    int64_t number = 0;
    if (!replaced && !HasMark(name, stem, kStagingMark)) continue;
    // A doomed folder is removed whatever it was called.
    if (stem != own && !ParseNumber(stem, &number) && !IsDoomed(name)) continue;
    const std::string path = JoinPath(parent, name);
    const std::string named = JoinPath(parent, stem);
    // It is the only copy: it is put back when it is looked for.
    if (replaced && !PathExists(JoinPath(named, kManifestName))) continue;
    // Must be asked before this process locks the folder.
    if (MayHaveDistantWriter(path)) continue;
    if (!replaced && AwaitsItsName(path, named).value_or(true)) {
      // Do not rename to the name of this save, nor to a name whose checkpoint was moved aside.
      const bool is_aside = std::any_of(names->begin(), names->end(), [&](const auto& other) {
        return HasMark(other, stem, kReplacedMark);
      });
      if (stem != own && !is_aside) GiveItsName(path, named);
      continue;
    }
    const int lock = LockFolder(path, kReadersAreWaitedFor);
    if (lock < 0) continue;
    const absl::StatusOr<bool> awaits =
        replaced ? false : AwaitsItsName(path, named, /*or_asked=*/true);
    if (!awaits.ok() || *awaits) {
      MUSTER_LOG(Info) << path << " stays: "
                       << (awaits.ok() ? "its writer ended when it asked the coordinator to seal "
                                         "it, which alone knows whether it is sealed"
                                       : awaits.status().message());
      close(lock);
      continue;
    }
    // Its process was killed between the exchange of two checkpoints and the end of the
    // replacement: this is the former one, whose foreign files belong to the user.
    if (!IsDoomed(name) && PathExists(JoinPath(path, kManifestName)) &&
        PathExists(JoinPath(named, kManifestName))) {
      KeepForeignFiles(path, named);
    }
    const absl::Status removed = RemoveCheckpointTree(path);
    close(lock);
    if (removed.ok()) {
      MUSTER_LOG(Info) << "removed " << path << ", left by a save that did not finish";
    } else {
      MUSTER_LOG(Warning) << removed.message();
    }
  }
}

// Removes the checkpoint `dir`, after it is renamed to `doomed`. If it cannot be removed, it stays
// complete.
absl::Status Discard(const std::string& dir, const std::string& doomed, Disposal* disposal) {
  // The user may have protected it, or a folder inside of it, which does not prevent the rename.
  if (const absl::Status removable = CheckRemovable(dir); !removable.ok()) {
    return absl::Status(removable.code(),
                        absl::StrCat("cannot remove ", dir, ": ", removable.message()));
  }
  MUSTER_RETURN_IF_ERROR(RenamePath(dir, doomed));
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_doomed");
  if (disposal == nullptr) return RemoveCheckpointTree(doomed);
  // Locked, so that no other save takes it for the remains of a dead writer.
  disposal->Remove(doomed, OwnedFd(LockFolder(doomed, absl::ZeroDuration())));
  return absl::OkStatus();
}

// The locks of folders that this process has left with Staging::Leave(), by folder.
class LeftLocks {
 public:
  static LeftLocks& Get() {
    static LeftLocks* const locks = new LeftLocks;
    return *locks;
  }
  void Put(const std::string& path, int lock) {
    const MutexLock guard(&mu_);
    locks_[path] = lock;
  }
  // Returns -1 if there is none.
  int Take(const std::string& path) {
    const MutexLock guard(&mu_);
    const auto found = locks_.find(path);
    if (found == locks_.end()) return -1;
    const int lock = found->second;
    locks_.erase(found);
    return lock;
  }

 private:
  Mutex mu_;
  absl::flat_hash_map<std::string, int> locks_ ABSL_GUARDED_BY(mu_);
};

std::string CanonicalPath(const std::string& path) {
  std::error_code error;
  const std::filesystem::path canonical = std::filesystem::canonical(path, error);
  return error ? path : canonical.string();
}

// A checkpoint may be a symbolic link to a folder on another disk: a save replaces that folder, and
// the link stays.
absl::StatusOr<std::string> FollowLink(const std::string& dir) {
  struct stat info;
  if (lstat(dir.c_str(), &info) != 0 || !S_ISLNK(info.st_mode)) return dir;
  std::error_code error;
  const std::filesystem::path target = std::filesystem::canonical(dir, error);
  if (!error) return target.string();
  return absl::FailedPreconditionError(
      absl::StrCat("cannot save a checkpoint as ", dir, ": it is a symbolic link to nothing (",
                   error.message(), "); remove the link, or name another folder"));
}

}  // namespace

std::string ModelFileName(int index) { return Numbered("model", index, ".safetensors"); }
std::string OptimizerFileName(int index) { return Numbered("optimizer", index, ".safetensors"); }
std::string SchedulerFileName(int index) { return Numbered("scheduler", index, ".json"); }
std::string SamplerFileName(int index) { return Numbered("sampler", index, ".safetensors"); }
std::string ScalerFileName(int index) { return Numbered("scaler", index, ".json"); }
std::string RandomStatesFileName(int rank) {
  return absl::StrCat("random_states_", rank, ".safetensors");
}
std::string CustomFileName(int index) {
  return absl::StrCat("custom_checkpoint_", index, ".safetensors");
}

bool StaysUnreadable(const absl::Status& error) {
  return absl::IsDataLoss(error) || absl::IsUnimplemented(error);
}

absl::Status CheckLink(const std::string& dir) {
  struct stat info;
  if (lstat(dir.c_str(), &info) != 0 || !S_ISLNK(info.st_mode)) return absl::OkStatus();
  if (stat(dir.c_str(), &info) == 0 || (errno != ENOENT && errno != ENOTDIR)) {
    return absl::OkStatus();
  }
  return absl::UnavailableError(
      absl::StrCat(dir,
                   " is a symbolic link to nothing: the disk that it points to may be missing; "
                   "attach it, or remove the link"));
}

std::string HintAtUnnamed(const std::string& dir) {
  const std::string parent = ParentPath(dir);
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    const std::string path = JoinPath(parent, name);
    if (!HasMark(name, BaseName(dir), kStagingMark) || IsDoomed(path) ||
        WriterOf(path) == FolderWriter::kAlive || !AwaitsItsName(path, dir).value_or(false) ||
        !VerifyCheckpoint(path, VerifyLevel::kSizes).ok()) {
      continue;
    }
    return absl::StrCat(", but ", path, " is complete and lacks only that name: load that folder");
  }
  return "";
}

absl::StatusOr<std::string> ReadRecordFile(const std::string& path, int64_t max_bytes) {
  absl::StatusOr<std::string> text = ReadRegularFile(path, max_bytes);
  if (text.ok() || absl::IsNotFound(text.status())) return text;
  // The errors below have codes of transient errors, so find out what it is.
  struct stat info;
  if (stat(path.c_str(), &info) != 0) return text;
  if (!S_ISREG(info.st_mode)) return absl::DataLossError(absl::StrCat(path, ": is not a file"));
  if (info.st_size > max_bytes) {
    return absl::DataLossError(absl::StrCat(path, ": has ", info.st_size, " bytes, more than the ",
                                            max_bytes, " that such a file may have"));
  }
  return text;
}

absl::StatusOr<Manifest> ReadManifest(const std::string& dir) {
  const std::string path = JoinPath(dir, kManifestName);
  const absl::StatusOr<std::string> text = ReadRecordFile(path);
  if (absl::IsNotFound(text.status())) {
    struct stat info;
    if (stat(dir.c_str(), &info) == 0) {
      return absl::NotFoundError(
          absl::StrCat(dir, " is not a complete checkpoint: it has no manifest.json"));
    }
    MUSTER_RETURN_IF_ERROR(CheckLink(dir));
    return absl::NotFoundError(absl::StrCat(dir, " does not exist"));
  }
  MUSTER_RETURN_IF_ERROR(text.status());
  absl::StatusOr<Manifest> manifest = ParseManifest(*text, path);
  if (absl::IsInvalidArgument(manifest.status())) {
    return absl::DataLossError(manifest.status().message());
  }
  return manifest;
}

absl::StatusOr<bool> IsNewerCheckpoint(const std::string& dir, const std::string& than) {
  const absl::StatusOr<Manifest> mine = ReadManifest(dir), other = ReadManifest(than);
  for (const absl::Status& status : {mine.status(), other.status()}) {
    if (!status.ok() && !absl::IsNotFound(status) && !StaysUnreadable(status)) return status;
  }
  if (!mine.ok() || !other.ok()) return mine.ok();
  // Prefer the records, because clocks are set back, and differ between hosts.
  if (const std::optional<bool> after = IsSealedAfter(dir, than); after.has_value()) return *after;
  return std::tie(mine->created, mine->info.step) > std::tie(other->created, other->info.step);
}

bool IsNumberedName(absl::string_view name) {
  int64_t number = 0;
  return ParseNumber(name, &number);
}

absl::Status VerifyCheckpointFile(const std::string& dir, const ManifestFile& file,
                                  VerifyLevel level) {
  const std::string path = JoinPath(dir, file.name);
  struct stat info;
  if (stat(path.c_str(), &info) != 0) {
    // Any other error may be transient: a stale mount, a folder that may not be read.
    if (errno != ENOENT && errno != ENOTDIR) {
      return ReadError(errno, absl::StrCat("cannot examine ", path));
    }
    return absl::DataLossError(absl::StrCat(path, ": is missing though the manifest lists it"));
  }
  if (!S_ISREG(info.st_mode)) return absl::DataLossError(absl::StrCat(path, ": is not a file"));
  if (static_cast<uint64_t>(info.st_size) != file.digest.bytes) {
    return absl::DataLossError(absl::StrCat(path, ": has ", info.st_size,
                                            " bytes, but the manifest says ", file.digest.bytes));
  }
  if (level == VerifyLevel::kSizes) return absl::OkStatus();
  if (!file.blocks.empty()) {
    return ReadDirectFile(path, file.digest.bytes, file.blocks, std::nullopt,
                          [](uint64_t, absl::string_view) { return absl::OkStatus(); });
  }
  MUSTER_ASSIGN_OR_RETURN(const FileDigest found, DigestFile(path));
  if (found == file.digest) return absl::OkStatus();
  return absl::DataLossError(absl::StrCat(path, ": is damaged: its contents have the digest ",
                                          found.xxh3, ", but the manifest says ",
                                          file.digest.xxh3));
}

absl::StatusOr<Manifest> VerifyCheckpoint(const std::string& dir, VerifyLevel level) {
  MUSTER_RETURN_IF_ERROR(PutBackReplaced(dir));
  MUSTER_ASSIGN_OR_RETURN(Manifest manifest, ReadManifest(dir));
  if (const KeptElsewhere elsewhere = FindKeptElsewhere(dir, manifest); !elsewhere.files.empty()) {
    return absl::DataLossError(absl::StrCat(
        DescribePart(dir, elsewhere), "; start the job with that node, or copy those files here"));
  }
  for (const ManifestFile& file : manifest.files) {
    MUSTER_RETURN_IF_ERROR(VerifyCheckpointFile(dir, file, level));
  }
  return manifest;
}

absl::StatusOr<Staging> Staging::Create(const std::string& wanted, bool replaces) {
  MUSTER_ASSIGN_OR_RETURN(const std::string dir, FollowLink(wanted));
  MUSTER_RETURN_IF_ERROR(MakeLastingFolder(ParentPath(dir)));
  // A folder that cannot be listed may still be writable.
  if (const absl::Status back = PutBackReplaced(dir);
      !back.ok() && !absl::IsPermissionDenied(back)) {
    return back;
  }
  if (PathExists(dir)) {
    const absl::StatusOr<std::vector<std::string>> names = ListDirectory(dir);
    if (!names.ok()) {
      return absl::FailedPreconditionError(absl::StrCat(
          "cannot save a checkpoint as ", dir, ": it exists and is not a folder that can be read"));
    }
    if (!names->empty() && !PathExists(JoinPath(dir, kManifestName))) {
      return absl::FailedPreconditionError(
          absl::StrCat("cannot save a checkpoint as ", dir,
                       ": the folder holds other files and no checkpoint; name another folder"));
    }
  }
  RemoveAbandoned(dir);
  MUSTER_ASSIGN_OR_RETURN(WriterFolder made,
                          MakeWriterFolder([&dir] { return NewStagingPath(dir); }));
  Staging staging(dir, std::move(made.path), made.lock);
  staging.replaces_ = replaces;
  return staging;
}

Staging::Staging(std::string dir, std::string path, int lock)
    : dir_(std::move(dir)), path_(std::move(path)), lock_(lock) {}

Staging::Staging(Staging&& other) noexcept
    : dir_(std::move(other.dir_)),
      path_(std::exchange(other.path_, "")),
      replaced_(std::exchange(other.replaced_, "")),
      replaced_lock_(std::exchange(other.replaced_lock_, -1)),
      prepared_(other.prepared_),
      replaces_(other.replaces_),
      lock_(std::exchange(other.lock_, -1)),
      taken_over_(other.taken_over_),
      left_(other.left_) {}

void Staging::Leave() {
  if (path_.empty()) return;  // it has its name
  if (lock_ >= 0) LeftLocks::Get().Put(CanonicalPath(path_), std::exchange(lock_, -1));
  path_.clear();
}

void Staging::LetOthersRead() {
  if (lock_ >= 0) ShareLock(lock_);
}

Staging::~Staging() {
  // After a commit that failed, other nodes may have published, so the folder stays for
  // SettleNodes().
  if (!path_.empty() && !prepared_ && !taken_over_) {
    // Remove the records first: if this process ends now, the rest must not look like a sealed
    // checkpoint that lacks its name, nor like one that the registry was asked to seal.
    for (const char* const name : {kSealName, kSealingName}) {
      const std::string record = JoinPath(path_, name);
      if (unlink(record.c_str()) != 0 && errno != ENOENT) {
        MUSTER_LOG(Warning) << "cannot remove " << record;
      }
    }
    if (const absl::Status removed = RemoveCheckpointTree(path_); !removed.ok()) {
      MUSTER_LOG(Warning) << removed.message();
    }
  }
  // It is still unknown whether the save has become a checkpoint.
  if (left_ && lock_ >= 0) Leave();
  if (lock_ >= 0) close(lock_);
  if (replaced_lock_ >= 0) close(replaced_lock_);
}

absl::StatusOr<std::optional<Staging>> Staging::TakeOver(const std::string& wanted,
                                                         const std::string& path) {
  MUSTER_ASSIGN_OR_RETURN(const std::string dir, FollowLink(wanted));
  MUSTER_ASSIGN_OR_RETURN(const bool exists, Exists(path));
  if (!exists) return absl::NotFoundError(absl::StrCat(path, " does not exist"));
  int lock = LeftLocks::Get().Take(CanonicalPath(path));
  const bool left = lock >= 0;
  if (left && !UnshareLock(lock)) {
    LeftLocks::Get().Put(CanonicalPath(path), lock);
    return std::nullopt;
  }
  if (!left) {
    MUSTER_ASSIGN_OR_RETURN(lock, LockFolderPatiently(path));
  }
  if (lock < 0) return std::nullopt;
  // From here on taken_over_ keeps the folder, even if it is damaged.
  Staging staging(dir, path, lock);
  staging.taken_over_ = true;
  staging.left_ = left;
  // If the number is taken, it belongs to another program.
  int64_t number = 0;
  staging.replaces_ = !ParseNumber(BaseName(dir), &number);
  MUSTER_ASSIGN_OR_RETURN(const Manifest manifest, VerifyCheckpoint(path, VerifyLevel::kSizes));
  if (const absl::Status sealed = NameSealing(path);
      !sealed.ok() && !absl::IsPermissionDenied(sealed)) {
    return sealed;
  }
  RemoveUnnamedFiles(path, manifest);
  return staging;
}

absl::Status Staging::Publish(const Manifest& manifest) {
  MUSTER_RETURN_IF_ERROR(Complete(manifest));
  return Rename();
}

absl::Status Staging::Complete(const Manifest& manifest) {
  return Prepare(manifest, [](const ManifestFile&) { return true; });
}

absl::Status Staging::Rename(Disposal* disposal) {
  const absl::Status committed = Commit();
  // On one disk no other node needs a folder that could not be moved.
  prepared_ = false;
  MUSTER_RETURN_IF_ERROR(committed);
  return Finish(disposal);
}

absl::Status Staging::Prepare(const Manifest& manifest,
                              absl::FunctionRef<bool(const ManifestFile&)> here) {
  for (const ManifestFile& file : manifest.files) {
    if (!here(file)) continue;
    struct stat info;
    const std::string path = JoinPath(path_, file.name);
    const bool exists = stat(path.c_str(), &info) == 0;
    if (!exists && errno != ENOENT && errno != ENOTDIR) {
      return ReadError(errno, absl::StrCat("cannot examine ", path));
    }
    if (!exists || static_cast<uint64_t>(info.st_size) != file.digest.bytes) {
      return absl::DataLossError(absl::StrCat(path, ": what rank ", file.rank,
                                              " wrote is not there; checkpoints need a file system "
                                              "that all ranks share, or save_on_each_node"));
    }
  }
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_staged");
  MUSTER_ASSIGN_OR_RETURN(const std::string text, EncodeManifest(manifest));
  MUSTER_RETURN_IF_ERROR(WriteFileAtomically(JoinPath(path_, kManifestName), text));
  return SyncDirectory(path_);
}

absl::Status Staging::Commit() {
  prepared_ = true;
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_publish");
  const std::string parent = ParentPath(dir_);
  // There is nothing at that path, or an empty folder.
  if (rename(path_.c_str(), dir_.c_str()) == 0) {
    path_.clear();
    MUSTER_FAILPOINT_STATUS("worker.checkpoint_renamed");
    return SyncDirectory(parent);
  }
  if (errno != ENOTEMPTY && errno != EEXIST) {
    return absl::ErrnoToStatus(errno, absl::StrCat("cannot rename ", path_, " to ", dir_));
  }
  if (!replaces_) {
    return absl::AlreadyExistsError(
        absl::StrCat("another program has saved a checkpoint as ", dir_,
                     " since this save began, which stays: give each run its own project folder"));
  }
  // Lock the replaced one, so that it does not look abandoned: other nodes may need it if they
  // cannot commit.
  MUSTER_ASSIGN_OR_RETURN(replaced_, Exchange(path_, dir_, &replaced_lock_));
  path_.clear();
  MUSTER_FAILPOINT_STATUS("worker.checkpoint_replaced");
  return SyncDirectory(parent);
}

absl::Status Staging::Finish(Disposal* disposal) {
  if (replaced_.empty()) return absl::OkStatus();
  KeepForeignFiles(replaced_, dir_);
  // Renamed first to a name from which it is never put back, because a part of it may be gone.
  if (const absl::Status removed = Discard(replaced_, NewDoomedPath(dir_), disposal);
      !removed.ok()) {
    MUSTER_LOG(Warning) << removed.message();
  }
  replaced_.clear();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<std::string>> CopiesOf(const std::string& dir) {
  std::vector<std::string> folders = {dir};
  const std::string parent = ParentPath(dir);
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(parent);
  if (!names.ok() && !absl::IsNotFound(names.status())) return names.status();
  for (const std::string& name : names.value_or(std::vector<std::string>())) {
    // A part of a folder that is being removed may be gone.
    if (IsDoomed(name)) continue;
    if (HasMark(name, BaseName(dir), kStagingMark) || HasMark(name, BaseName(dir), kReplacedMark)) {
      folders.push_back(JoinPath(parent, name));
    }
  }
  std::vector<std::string> copies;
  for (const std::string& folder : folders) {
    MUSTER_ASSIGN_OR_RETURN(const bool exists, Exists(JoinPath(folder, kManifestName)));
    if (exists) copies.push_back(folder);
  }
  return copies;
}

absl::Status PutInPlace(const std::string& copy, const std::string& dir) {
  if (rename(copy.c_str(), dir.c_str()) != 0) {
    if (errno != ENOTEMPTY && errno != EEXIST) {
      return absl::ErrnoToStatus(errno, absl::StrCat("cannot rename ", copy, " to ", dir));
    }
    MUSTER_RETURN_IF_ERROR(Exchange(copy, dir, nullptr).status());
  }
  return SyncDirectory(ParentPath(dir));
}

absl::StatusOr<std::string> NameStaging(const std::string& wanted, const std::string& path,
                                        absl::FunctionRef<absl::Status()> prepare) {
  MUSTER_ASSIGN_OR_RETURN(std::optional<Staging> staging, Staging::TakeOver(wanted, path));
  const auto stays = [&](absl::string_view why) {
    if (staging.has_value()) staging->LetOthersRead();
    MUSTER_LOG(Warning) << path << " is sealed and lacks only the name " << wanted
                        << ", which it does not get: " << why << "; it is loaded from where it is";
    return path;
  };
  if (!staging.has_value()) return stays("another process loads from there");
  absl::Status named = prepare();
  if (absl::IsPermissionDenied(named)) return stays(named.message());
  MUSTER_RETURN_IF_ERROR(named);
  MUSTER_ASSIGN_OR_RETURN(const bool taken, Exists(wanted));
  MUSTER_ASSIGN_OR_RETURN(const bool is_checkpoint, Exists(JoinPath(wanted, kManifestName)));
  if (taken && !is_checkpoint) {
    const absl::StatusOr<std::vector<std::string>> names = ListDirectory(wanted);
    if (!names.ok() || !names->empty()) {
      return stays(absl::StrCat(wanted, " is no checkpoint, and not empty"));
    }
  }
  named = staging->Rename();
  if (absl::IsPermissionDenied(named) || absl::IsAlreadyExists(named)) {
    return stays(named.message());
  }
  MUSTER_RETURN_IF_ERROR(named);
  MUSTER_LOG(Info) << wanted << " was sealed when its writer ended: it has its name now";
  return wanted;
}

absl::Status RemoveUnpublished(const std::string& path, const std::string& named,
                               absl::FunctionRef<absl::Status()> seal) {
  MUSTER_ASSIGN_OR_RETURN(const bool exists, Exists(path));
  if (!exists) return absl::OkStatus();
  const auto stays = [&]() -> absl::StatusOr<bool> {
    MUSTER_ASSIGN_OR_RETURN(const bool awaits, AwaitsItsName(path, named));
    if (awaits) {
      MUSTER_LOG(Info) << path << " stays: it is sealed and lacks only the name " << named;
    }
    return awaits;
  };
  MUSTER_ASSIGN_OR_RETURN(const bool sealed, stays());
  if (sealed) return absl::OkStatus();
  // If this process has left the folder, release its lock: it now knows what has become of it.
  if (const int left = LeftLocks::Get().Take(CanonicalPath(path)); left >= 0) close(left);
  const OwnedFd lock(LockFolder(path, kReadersAreWaitedFor));
  if (!lock.open() && WriterOf(path) != FolderWriter::kUnknown) {
    return absl::UnavailableError(
        absl::StrCat("cannot remove ", path, ": ", LockHolderOf(path), " has it locked"));
  }
  if (HasAskedForSeal(path)) MUSTER_RETURN_IF_ERROR(seal());
  // The previous holder of the lock may have received the record.
  MUSTER_ASSIGN_OR_RETURN(const bool sealed_since, stays());
  return sealed_since ? absl::OkStatus() : RemoveCheckpointTree(path);
}

std::string CheckpointFolder::PathOf(int64_t iteration) const {
  return JoinPath(root_, absl::StrCat(kNumbered, iteration));
}

std::vector<int64_t> CheckpointFolder::NumbersAmong(const std::vector<std::string>& names) const {
  std::vector<int64_t> numbers;
  for (const std::string& name : names) {
    int64_t number = 0;
    const absl::string_view stem = StemOf(name, kReplacedMark);
    const bool replaced = stem != name && HasMark(name, stem, kReplacedMark);
    if (ParseNumber(replaced ? stem : absl::string_view(name), &number) &&
        MayBeFolder(JoinPath(root_, name))) {
      numbers.push_back(number);
    }
  }
  std::sort(numbers.begin(), numbers.end());
  numbers.erase(std::unique(numbers.begin(), numbers.end()), numbers.end());
  return numbers;
}

absl::StatusOr<std::vector<int64_t>> CheckpointFolder::Numbers() const {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(root_);
  if (absl::IsNotFound(names.status())) return std::vector<int64_t>();
  MUSTER_RETURN_IF_ERROR(names.status());
  return NumbersAmong(*names);
}

absl::StatusOr<int64_t> CheckpointFolder::NextNumber() const {
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(root_);
  if (absl::IsNotFound(names.status())) return 0;
  MUSTER_RETURN_IF_ERROR(names.status());
  const std::vector<int64_t> numbers = NumbersAmong(*names);
  int64_t next = numbers.empty() ? 0 : numbers.back() + 1;
  // A load of another program may rename a sealed checkpoint at any moment. One that was renamed
  // since the folder was listed is no longer where it was, but still keeps its number.
  for (const std::string& name : *names) {
    const std::string path = JoinPath(root_, name);
    int64_t number = 0;
    if (ParseStagingNumber(name, &number) && !IsDoomed(path) &&
        (PathExists(JoinPath(path, kSealName)) || PathExists(JoinPath(path, kSealingName)) ||
         PathExists(PathOf(number)))) {
      next = std::max(next, number + 1);
    }
  }
  return next;
}

absl::StatusOr<std::string> CheckpointFolder::Newest(
    VerifyLevel level, const std::vector<std::string>& left_out,
    const std::vector<std::string>& unnamed) const {
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, Numbers());
  // A checkpoint that waits for a name is newer than the one that has it.
  std::vector<std::tuple<int64_t, bool, std::string, std::string>> candidates;
  for (const int64_t number : numbers) candidates.emplace_back(number, false, "", PathOf(number));
  for (const std::string& path : unnamed) {
    int64_t number = 0;
    if (ParseStagingNumber(BaseName(path), &number)) {
      const absl::StatusOr<Manifest> manifest = ReadManifest(path);
      candidates.emplace_back(number, true, manifest.ok() ? manifest->created : "", path);
    }
  }
  std::sort(candidates.rbegin(), candidates.rend());
  std::string why;
  absl::StatusCode code = absl::StatusCode::kNotFound;
  for (const auto& [number, is_unnamed, created, path] : candidates) {
    if (std::find(left_out.begin(), left_out.end(), path) != left_out.end()) continue;
    const absl::StatusOr<Manifest> manifest = VerifyCheckpoint(path, level);
    if (manifest.ok()) return path;
    MUSTER_ASSIGN_OR_RETURN(const bool exists, Exists(path));
    if (!exists) {
      return absl::AbortedError(absl::StrCat(
          path, " is not there any more: another process has ",
          is_unnamed ? "given it its name, or removed it" : "removed it, or moved it away"));
    }
    if (!absl::IsNotFound(manifest.status()) && !StaysUnreadable(manifest.status())) {
      return manifest.status();
    }
    MUSTER_LOG(Warning) << "passing over " << path << ": " << manifest.status().message();
    if (why.empty()) why = absl::StrCat(": ", manifest.status().message());
    if (code == absl::StatusCode::kNotFound) code = manifest.status().code();
  }
  return absl::Status(code, absl::StrCat("no complete checkpoint in ", root_, why));
}

absl::StatusOr<std::vector<int64_t>> CheckpointFolder::SeenPublished() const {
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, Numbers());
  std::vector<int64_t> published;
  for (const int64_t number : numbers) {
    if (Exists(JoinPath(PathOf(number), kManifestName)).value_or(false)) {
      published.push_back(number);
    }
  }
  return published;
}

absl::StatusOr<int64_t> CheckpointFolder::NewestStep() const {
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, Numbers());
  for (auto number = numbers.rbegin(); number != numbers.rend(); ++number) {
    const absl::StatusOr<Manifest> manifest = ReadManifest(PathOf(*number));
    if (manifest.ok()) return manifest->info.step;
    if (!absl::IsNotFound(manifest.status()) && !StaysUnreadable(manifest.status())) {
      return manifest.status();
    }
  }
  return -1;
}

absl::Status RemoveCheckpoint(const std::string& dir, Disposal* disposal) {
  struct stat info;
  if (lstat(dir.c_str(), &info) != 0) return absl::OkStatus();
  // Remove only the link: the folder belongs to the user who has put it elsewhere.
  if (S_ISLNK(info.st_mode)) return RemoveCheckpointTree(dir);
  return Discard(dir, NewDoomedPath(dir), disposal);
}

bool StaysForItsStep(const std::string& dir, int64_t keep_every) {
  if (keep_every <= 0) return false;
  const absl::StatusOr<Manifest> manifest = ReadManifest(dir);
  // A program without a prepared optimizer stays at step 0, which is no reason to keep all that it
  // saves.
  return manifest.ok() ? manifest->info.step > 0 && manifest->info.step % keep_every == 0
                       : !StaysUnreadable(manifest.status());
}

absl::Status CheckpointFolder::Rotate(int keep, int64_t keep_every,
                                      const std::vector<std::string>& spared,
                                      Disposal* disposal) const {
  MUSTER_ASSIGN_OR_RETURN(const std::vector<int64_t> numbers, SeenPublished());
  return RotateAmong(numbers, keep, keep_every, spared, disposal);
}

absl::Status CheckpointFolder::RotateAmong(const std::vector<int64_t>& numbers, int keep,
                                           int64_t keep_every,
                                           const std::vector<std::string>& spared,
                                           Disposal* disposal) const {
  if (keep < 1) {
    return absl::InvalidArgumentError(
        absl::StrCat("total_limit is ", keep, "; it must be at least 1"));
  }
  // If one cannot be removed, perhaps because a person protects it, the others still go.
  absl::Status removed;
  for (size_t i = 0; i + keep < numbers.size(); ++i) {
    const std::string dir = PathOf(numbers[i]);
    if (std::find(spared.begin(), spared.end(), dir) != spared.end()) continue;
    if (StaysForItsStep(dir, keep_every)) continue;
    removed.Update(RemoveCheckpoint(dir, disposal));
  }
  removed.Update(SyncDirectory(root_));
  return removed;
}

std::vector<std::string> CheckpointFolder::AskedToSeal() const {
  std::vector<std::string> asked;
  for (const std::string& name : ListDirectory(root_).value_or(std::vector<std::string>())) {
    int64_t number = 0;
    const std::string path = JoinPath(root_, name);
    if (ParseStagingNumber(name, &number) && !IsDoomed(name) && HasAskedForSeal(path)) {
      asked.push_back(path);
    }
  }
  return asked;
}

absl::Status CheckpointFolder::RemoveAsked(const std::vector<int64_t>& numbers, int keep) const {
  if (keep < 1 || static_cast<int>(numbers.size()) < keep) return absl::OkStatus();
  const int64_t oldest_kept = numbers[numbers.size() - keep];
  absl::Status all;
  for (const std::string& path : AskedToSeal()) {
    int64_t number = 0;
    if (!ParseStagingNumber(BaseName(path), &number) || number >= oldest_kept ||
        MayHaveDistantWriter(path)) {
      continue;
    }
    const OwnedFd lock(LockFolder(path, kReadersAreWaitedFor));
    if (!lock.open()) continue;
    // The previous holder of the lock may have received the record: then the checkpoint is for
    // retention to remove, once it has its name.
    const absl::StatusOr<Sealing> sealing = ReadSealing(path);
    if (!sealing.ok() || sealing->state != Sealing::State::kAsked || !HasAskedForSeal(path))
      continue;
    if (const absl::Status removed = RemoveCheckpointTree(path); !removed.ok()) {
      all.Update(removed);
      continue;
    }
    MUSTER_LOG(Info) << "removed " << path << ", which has " << keep << " newer checkpoints";
  }
  return all;
}

absl::StatusOr<std::vector<std::string>> CheckpointFolder::PublishSealed() const {
  std::vector<std::string> unnamed;
  const absl::StatusOr<std::vector<std::string>> names = ListDirectory(root_);
  if (absl::IsNotFound(names.status())) return unnamed;
  MUSTER_RETURN_IF_ERROR(names.status());
  for (const std::string& name : *names) {
    int64_t number = 0;
    const std::string path = JoinPath(root_, name);
    if (!ParseStagingNumber(name, &number)) continue;
    MUSTER_ASSIGN_OR_RETURN(const bool awaits, AwaitsItsName(path, PathOf(number)));
    if (!awaits) continue;
    // The checkpoint that has the name may be pinned, or belong to another job, so nothing is
    // replaced without a record.
    MUSTER_ASSIGN_OR_RETURN(const bool taken, Exists(JoinPath(PathOf(number), kManifestName)));
    if (taken) {
      MUSTER_LOG(Warning) << path << " is sealed, was saved after " << PathOf(number)
                          << ", and lacks only that name; it is loaded from where it is";
      unnamed.push_back(path);
      continue;
    }
    const absl::StatusOr<std::string> named =
        NameStaging(PathOf(number), path, [] { return absl::OkStatus(); });
    if (named.ok()) {
      if (*named == path) unnamed.push_back(path);
    } else if (absl::IsNotFound(named.status()) || StaysUnreadable(named.status())) {
      // It is gone, or damaged.
      MUSTER_LOG(Warning) << named.status().message();
    } else {
      return absl::Status(named.status().code(),
                          absl::StrCat(path, " is sealed and lacks only the name ", PathOf(number),
                                       ", which it does not get: ", named.status().message()));
    }
  }
  return unnamed;
}

}  // namespace muster
