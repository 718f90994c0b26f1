#ifndef MUSTER_WORKER_CHECKPOINT_FOLDER_H_
#define MUSTER_WORKER_CHECKPOINT_FOLDER_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"
#include "worker/checkpoint/manifest.h"

namespace muster {

class Disposal;

// Folders of checkpoints on disk: how they appear whole, which is the newest good one, which may be
// removed. Functions block on the disk and are for one process per folder at a time (rank 0),
// except the reading ones.
//
// While a checkpoint DIR is written, its files are in DIR.tmp-<16 hex digits>. Its writer keeps
// that folder locked (flock), which distinguishes the files of a live writer from those that a
// killed one has left.

// The names of a checkpoint's files. The first of several has no number.
std::string ModelFileName(int index);        // model.safetensors, model_1.safetensors
std::string OptimizerFileName(int index);    // optimizer.safetensors, optimizer_1.safetensors
std::string SchedulerFileName(int index);    // scheduler.json, scheduler_1.json
std::string SamplerFileName(int index);      // sampler.safetensors, sampler_1.safetensors
std::string ScalerFileName(int index);       // scaler.json, scaler_1.json
std::string RandomStatesFileName(int rank);  // random_states_0.safetensors
std::string CustomFileName(int index);       // custom_checkpoint_0.safetensors

// The registry's record of a checkpoint, beside its manifest: see seal.h.
inline constexpr char kSealName[] = "seal.json";

// Whether `name` is that of a numbered checkpoint: checkpoint_0, checkpoint_1, ...
bool IsNumberedName(absl::string_view name);

// Whether reading a checkpoint, or a file of it, would fail again with this error: a load passes
// over it. After other errors (EIO, ESTALE, EACCES, ...) it may be whole, and no older one is taken
// by itself.
bool StaysUnreadable(const absl::Status& error);

enum class VerifyLevel {
  kSizes,     // the manifest is whole, every file is there with its size
  kContents,  // and every file has its digest: reads everything
};

// The manifest of the checkpoint in `dir`. If a crash in mid-replacement left only the old one
// aside, that is put back first. Errors: NOT_FOUND if there is no folder or no manifest (what is
// there is not a complete checkpoint); DATA_LOSS naming the file that is missing or damaged;
// UNIMPLEMENTED for a newer format; others are the file system's, and may pass.
absl::StatusOr<Manifest> VerifyCheckpoint(const std::string& dir, VerifyLevel level);

// The manifest alone. Errors: NOT_FOUND without one; DATA_LOSS if it is damaged or not that of a
// checkpoint; UNIMPLEMENTED for a newer format; others are the file system's, and may pass.
absl::StatusOr<Manifest> ReadManifest(const std::string& dir);

// UNAVAILABLE if `dir` is a symbolic link to nothing: the disk that it leads to may be away.
absl::Status CheckLink(const std::string& dir);

// What to load in place of `dir`, which does not exist: what is sealed and lacks only that name, as
// the end of a message. Empty: there is none.
std::string HintAtUnnamed(const std::string& dir);

// Whether the checkpoint in `dir` was saved after that in `than`, by their manifests; also if
// `than` has none that can ever be read. Errors: those that may pass.
absl::StatusOr<bool> IsNewerCheckpoint(const std::string& dir, const std::string& than);

// One file of a checkpoint. Errors: DATA_LOSS naming the file that is missing or damaged.
absl::Status VerifyCheckpointFile(const std::string& dir, const ManifestFile& file,
                                  VerifyLevel level);

// Folders with a manifest that a publication of `dir` has left, `dir` itself first: the one that
// was to be published and the one that it replaced (DIR.tmp-..., DIR.old-...). Errors: there may be
// more of them that cannot be seen at the moment.
absl::StatusOr<std::vector<std::string>> CopiesOf(const std::string& dir);

// Puts the folder `copy` in the place of `dir`; what was there gets the name of `copy`, or is moved
// to DIR.old-... where the file system cannot exchange two folders. Durable on return.
absl::Status PutInPlace(const std::string& copy, const std::string& dir);

// A small file of a checkpoint, such as its manifest. Does not wait for a pipe of that name.
// Errors: NOT_FOUND; DATA_LOSS if it is not a file, or larger; others may pass.
absl::StatusOr<std::string> ReadRecordFile(const std::string& path,
                                           int64_t max_bytes = int64_t{1} << 30);

// Makes the staging folder of `wanted` and locks it. Removes what dead writers of this folder left,
// except what is sealed and lacks only its name: a numbered one gets it, if it is another than
// `wanted` and free. On a file system that other machines may write to,
// whose locks are not known here, what has not changed for kQuietTime. A symbolic link to a folder
// means that folder. Errors: FAILED_PRECONDITION if `wanted` exists and is neither empty nor a
// checkpoint: it is not ours to replace; or if it is a link to nothing.
class Staging {
 public:
  // `replaces`: a checkpoint that is there when this one is published; otherwise Commit() fails
  // with ALREADY_EXISTS then.
  static absl::StatusOr<Staging> Create(const std::string& wanted, bool replaces = true);
  // Takes over the staging folder `path` of `wanted`, which a dead writer, or this process with
  // Leave(), has left complete. Nothing: another process loads from there, or the file system has
  // no locks. Errors: NOT_FOUND; those of VerifyCheckpoint and LockFolderPatiently.
  static absl::StatusOr<std::optional<Staging>> TakeOver(const std::string& wanted,
                                                         const std::string& path);
  Staging(Staging&& other) noexcept;
  Staging& operator=(Staging&&) = delete;
  // Removes the folder unless published or taken over.
  ~Staging();

  const std::string& path() const { return path_; }

  // Leaves the folder as it is, because it is not known whether it has become a checkpoint. It
  // stays locked until this process takes it over or ends, so that no save removes it before a
  // resume has asked.
  void Leave();

  // Others may lock it to load from there.
  void LetOthersRead();

  // Checks that all files are there, writes the manifest and makes all durable: only the name of a
  // checkpoint is missing then.
  absl::Status Complete(const Manifest& manifest);
  // Puts the folder in the place of `dir` in one step: a checkpoint that was there is removed
  // afterwards, by `disposal` unless that is null; files in it that did not belong to that
  // checkpoint move to the new one.
  absl::Status Rename(Disposal* disposal = nullptr);
  // Complete() and Rename().
  absl::Status Publish(const Manifest& manifest);

  // Parts of Complete() and Rename(), for publications on several disks that have to agree in
  // between. Checks the files for which `here` is true, writes the manifest, and makes all durable.
  absl::Status Prepare(const Manifest& manifest, absl::FunctionRef<bool(const ManifestFile&)> here);
  // Moves the folder into its place. From now on nothing is removed by the destructor: after an
  // error, and until Finish(), both checkpoints exist (see CopiesOf).
  absl::Status Commit();
  // Removes what was replaced, or leaves that to `disposal`.
  absl::Status Finish(Disposal* disposal = nullptr);

 private:
  Staging(std::string dir, std::string path, int lock);

  std::string dir_;
  std::string path_;      // empty once it is moved
  std::string replaced_;  // where the former checkpoint is between Commit() and Finish()
  int replaced_lock_ = -1;
  bool prepared_ = false;  // Commit() has begun
  bool replaces_ = true;
  int lock_ = -1;
  bool taken_over_ = false;
  bool left_ = false;  // this process had left it
};

// Gives the complete checkpoint in the staging folder `path` the name `wanted`, after `prepare`.
// Returns where it is then: still in `path`, with a warning in the log, if this process may not
// write there, if another one loads from there, or if `wanted` holds files and no checkpoint.
// Errors: those of Staging::TakeOver, of `prepare`, and of the file system.
absl::StatusOr<std::string> NameStaging(const std::string& wanted, const std::string& path,
                                        absl::FunctionRef<absl::Status()> prepare);

// Removes the staging folder of what was to be called `named` and was never published. What is
// sealed and lacks only that name stays. Errors: another process has it locked; those that may
// pass.
absl::Status RemoveUnpublished(const std::string& path, const std::string& named);

// Removes a checkpoint: renames it first, so that a crash leaves no part of it under its name; the
// rest is left to `disposal` unless that is null. A missing checkpoint is not an error. Of a
// symbolic link, the link goes and its folder stays.
absl::Status RemoveCheckpoint(const std::string& dir, Disposal* disposal = nullptr);

// Whether retention leaves the checkpoint because its step is a multiple of `keep_every` (0: none),
// or may be.
bool StaysForItsStep(const std::string& dir, int64_t keep_every);

// A live writer of another machine is taken for dead after that long without a change: its files
// go.
inline constexpr absl::Duration kQuietTime = absl::Hours(2);

// Numbered checkpoints: ROOT/checkpoint_0, checkpoint_1, ... Other names in ROOT are ignored.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::string root) : root_(std::move(root)) {}

  const std::string& root() const { return root_; }
  std::string PathOf(int64_t iteration) const;

  // The numbers of all folders, complete or not, ascending, and of what cannot be examined at the
  // moment. Empty if there is no root.
  absl::StatusOr<std::vector<int64_t>> Numbers() const;

  // One above the highest number: what the next save is called.
  absl::StatusOr<int64_t> NextNumber() const;

  // The path of the highest number that verifies. Skips those that are incomplete, damaged, or of a
  // newer format, with a warning in the log. NOT_FOUND if there is none, with the reason of the
  // newest folder without a manifest; if all that are there are damaged, or of a newer format, that
  // error. Other errors, which may pass, are returned at once: no older one is taken. Those whose
  // path is in `left_out` are not looked at. `unnamed`: of PublishSealed(), they count as well.
  // ABORTED if one of these is not there any more: it may have a name now, or there is a newer one
  // for which it had to go, so search again.
  absl::StatusOr<std::string> Newest(VerifyLevel level = VerifyLevel::kContents,
                                     const std::vector<std::string>& left_out = {},
                                     const std::vector<std::string>& unnamed = {}) const;

  // The numbers of the folders that have a manifest, ascending, without those of which that cannot
  // be seen now: for what deletes, since they stay.
  absl::StatusOr<std::vector<int64_t>> SeenPublished() const;

  // The step of the newest whose manifest is not damaged; -1: there is none.
  absl::StatusOr<int64_t> NewestStep() const;

  // Removes the oldest complete checkpoints until `keep` (>= 1) are left. Incomplete ones do not
  // count and stay, as do those whose step is a multiple of `keep_every` (0: none) or whose path is
  // in `spared`. `disposal`: as of RemoveCheckpoint.
  absl::Status Rotate(int keep, int64_t keep_every = 0, const std::vector<std::string>& spared = {},
                      Disposal* disposal = nullptr) const;
  // Among `numbers`, ascending, which are complete.
  absl::Status RotateAmong(const std::vector<int64_t>& numbers, int keep, int64_t keep_every,
                           const std::vector<std::string>& spared,
                           Disposal* disposal = nullptr) const;

  // Renames the sealed and complete checkpoints that dead writers have left in staging folders.
  // Returns the folders of those that have to stay there (see NameStaging(); also where a
  // checkpoint has the name that was saved before): what is in them can be loaded. Errors: one of
  // them cannot be read or renamed at the moment.
  absl::StatusOr<std::vector<std::string>> PublishSealed() const;

 private:
  // Of the entries `names` of root().
  std::vector<int64_t> NumbersAmong(const std::vector<std::string>& names) const;

  std::string root_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FOLDER_H_
