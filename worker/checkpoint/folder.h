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

// Checkpoint folders on disk: publishing them atomically, finding the newest good one, and removing
// old ones. Functions block on the disk. Only one process at a time (rank 0) may use them on a
// folder, except for the reading ones.
//
// While a checkpoint DIR is written, its files are in DIR.tmp-<16 hex digits>. Its writer keeps
// that folder locked (flock), which distinguishes the files of a live writer from those left by a
// killed one.

// The names of a checkpoint's files, besides those of manifest.h. For model, optimizer, scheduler,
// sampler and scaler files, the first has no number.
std::string ModelFileName(int index);        // model.safetensors, model_1.safetensors
std::string OptimizerFileName(int index);    // optimizer.safetensors, optimizer_1.safetensors
std::string SchedulerFileName(int index);    // scheduler.json, scheduler_1.json
std::string SamplerFileName(int index);      // sampler.safetensors, sampler_1.safetensors
std::string ScalerFileName(int index);       // scaler.json, scaler_1.json
std::string RandomStatesFileName(int rank);  // random_states_0.safetensors
std::string CustomFileName(int index);       // custom_checkpoint_0.safetensors

// Whether `name` is the name of a numbered checkpoint: checkpoint_0, checkpoint_1, ...
bool IsNumberedName(absl::string_view name);

// Whether reading a checkpoint, or a file of it, would fail again with this error, so that a load
// skips it. After other errors (EIO, ESTALE, EACCES, ...) it may be complete, and no older one is
// chosen automatically.
bool StaysUnreadable(const absl::Status& error);

enum class VerifyLevel {
  kSizes,     // the manifest is valid, every file exists with its size
  kContents,  // also every file has its digest: reads everything
};

// Verifies the checkpoint in `dir` and returns its manifest. If a crash during replacement left
// only the old checkpoint, moved aside, puts that back first. Errors: NOT_FOUND if there is no
// folder or no manifest (the folder is not a complete checkpoint); DATA_LOSS naming the missing or
// damaged file; UNIMPLEMENTED for a newer format; others come from the file system and may be
// transient.
absl::StatusOr<Manifest> VerifyCheckpoint(const std::string& dir, VerifyLevel level);

// Reads only the manifest. Errors: NOT_FOUND if there is none; DATA_LOSS if it is damaged or not a
// checkpoint's; UNIMPLEMENTED for a newer format; others come from the file system and may be
// transient.
absl::StatusOr<Manifest> ReadManifest(const std::string& dir);

// Returns UNAVAILABLE if `dir` is a dangling symbolic link: the disk that it points to may not be
// mounted.
absl::Status CheckLink(const std::string& dir);

// For a `dir` that does not exist, returns the end of a message that names what to load instead: a
// sealed checkpoint that lacks only that name. Empty: there is none.
std::string HintAtUnnamed(const std::string& dir);

// Whether the checkpoint in `dir` was saved after that in `than`, according to their seals
// (seal_order.h) or, if these do not say, their manifests; true also if `than` has no manifest that
// can ever be read. Errors: transient ones.
absl::StatusOr<bool> IsNewerCheckpoint(const std::string& dir, const std::string& than);

// Verifies one file of a checkpoint. Errors: DATA_LOSS naming the missing or damaged file.
absl::Status VerifyCheckpointFile(const std::string& dir, const ManifestFile& file,
                                  VerifyLevel level);

// Returns the folders with a manifest that a publication of `dir` has left, `dir` itself first: the
// one to be published and the one that it replaces (DIR.tmp-..., DIR.old-...). Errors: there may be
// more that cannot be seen at the moment.
absl::StatusOr<std::vector<std::string>> CopiesOf(const std::string& dir);

// Puts the folder `copy` in the place of `dir`. The previous folder gets the name of `copy`, or
// moves to DIR.old-... if the file system cannot exchange two folders. Durable on return.
absl::Status PutInPlace(const std::string& copy, const std::string& dir);

// Reads a small file of a checkpoint, such as its manifest. Does not block on a pipe of that name.
// Errors: NOT_FOUND; DATA_LOSS if it is not a regular file or is larger than max_bytes; others may
// be transient.
absl::StatusOr<std::string> ReadRecordFile(const std::string& path,
                                           int64_t max_bytes = int64_t{1} << 30);

// Creates the staging folder of `wanted` and locks it. Removes what dead writers of this folder
// left, except sealed checkpoints that lack only their name, and those of which only the registry
// knows whether they are sealed (sealing.h): a sealed numbered one is renamed if its name
// is free and is not `wanted`. On a file system that other machines may write to, whose locks are
// not visible here, removes what has not changed for kQuietTime. A symbolic link to a folder stands
// for that folder. Errors: FAILED_PRECONDITION if `wanted` exists and is neither empty nor a
// checkpoint, and so must not be replaced, or if it is a dangling link.
class Staging {
 public:
  // `replaces`: whether to replace a checkpoint that exists when this one is published; if false,
  // Commit() fails with ALREADY_EXISTS.
  static absl::StatusOr<Staging> Create(const std::string& wanted, bool replaces = true);
  // Takes over the staging folder `path` of `wanted`, left complete by a dead writer or by this
  // process with Leave(). Returns nothing if another process loads from it or the file system has
  // no locks. Errors: NOT_FOUND; those of VerifyCheckpoint and LockFolderPatiently.
  static absl::StatusOr<std::optional<Staging>> TakeOver(const std::string& wanted,
                                                         const std::string& path);
  Staging(Staging&& other) noexcept;
  Staging& operator=(Staging&&) = delete;
  // Removes the folder unless published or taken over.
  ~Staging();

  const std::string& path() const { return path_; }

  // Leaves the folder as it is, because it is unknown whether it has become a checkpoint. It stays
  // locked until this process takes it over or ends, so that no save removes it before a resume has
  // checked it.
  void Leave();

  // Lets other processes lock the folder to load from it.
  void LetOthersRead();

  // Checks that all files exist, writes the manifest and makes everything durable: the folder then
  // lacks only the name of a checkpoint.
  absl::Status Complete(const Manifest& manifest);
  // Puts the folder in the place of `dir` in one step. A previous checkpoint is removed afterwards,
  // by `disposal` unless that is null; files in its folder that did not belong to it move to the
  // new one.
  absl::Status Rename(Disposal* disposal = nullptr);
  // Complete() and Rename().
  absl::Status Publish(const Manifest& manifest);

  // Parts of Complete() and Rename(), for publications on several disks that must agree in between.
  // Checks the files for which `here` is true, writes the manifest, and makes everything durable.
  absl::Status Prepare(const Manifest& manifest, absl::FunctionRef<bool(const ManifestFile&)> here);
  // Moves the folder into its place. From then on the destructor removes nothing: after an error,
  // and until Finish(), both checkpoints exist (see CopiesOf).
  absl::Status Commit();
  // Removes the replaced checkpoint, or leaves that to `disposal`.
  absl::Status Finish(Disposal* disposal = nullptr);

 private:
  Staging(std::string dir, std::string path, int lock);

  std::string dir_;
  std::string path_;      // empty once it is moved
  std::string replaced_;  // the previous checkpoint between Commit() and Finish()
  int replaced_lock_ = -1;
  bool prepared_ = false;  // Commit() has begun
  bool replaces_ = true;
  int lock_ = -1;
  bool taken_over_ = false;
  bool left_ = false;  // this process had called Leave()
};

// Renames the complete checkpoint in the staging folder `path` to `wanted`, after `prepare`.
// Returns its resulting path. It stays in `path`, with a warning in the log, if this process may
// not write there, if another process loads from it, or if `wanted` holds files but no checkpoint.
// Errors: those of Staging::TakeOver, of `prepare`, and of the file system.
absl::StatusOr<std::string> NameStaging(const std::string& wanted, const std::string& path,
                                        absl::FunctionRef<absl::Status()> prepare);

// Removes the staging folder of an unpublished checkpoint that the registry has sealed, and that
// was to be called `named`. One that lacks only that name stays. `seal`: called, while the folder
// is locked, if it does not know yet that it is sealed (sealing.h): it must write that down.
// Errors: another process has it locked; those of `seal`; transient ones.
absl::Status RemoveUnpublished(const std::string& path, const std::string& named,
                               absl::FunctionRef<absl::Status()> seal);

// Removes a checkpoint. Renames it first, so that a crash leaves no part of it under its name;
// `disposal`, unless null, does the rest. A missing checkpoint is not an error. For a symbolic
// link, removes the link and leaves its folder.
absl::Status RemoveCheckpoint(const std::string& dir, Disposal* disposal = nullptr);

// Whether retention keeps the checkpoint because its step is, or may be, a multiple of `keep_every`
// (0: none). Step 0 is no multiple.
bool StaysForItsStep(const std::string& dir, int64_t keep_every);

// Numbered checkpoints: ROOT/checkpoint_0, checkpoint_1, ... Other names in ROOT are ignored.
class CheckpointFolder {
 public:
  explicit CheckpointFolder(std::string root) : root_(std::move(root)) {}

  const std::string& root() const { return root_; }
  std::string PathOf(int64_t iteration) const;

  // The numbers of all folders, complete or not, ascending, including those that cannot be examined
  // at the moment. Empty if there is no root.
  absl::StatusOr<std::vector<int64_t>> Numbers() const;

  // The number of the next save: one above the highest.
  absl::StatusOr<int64_t> NextNumber() const;

  // Returns the path of the highest number that verifies. Skips checkpoints that are incomplete,
  // damaged, or of a newer format, with a warning in the log. NOT_FOUND if there is none, with the
  // reason of the newest folder without a manifest; if all existing ones are damaged or of a newer
  // format, that error. Returns other errors, which may be transient, at once rather than choose an
  // older checkpoint. Ignores paths in `left_out`. Also considers `unnamed`, from PublishSealed().
  // ABORTED if one of these no longer exists: it may have been renamed, or removed in favor of a
  // newer one, so search again.
  absl::StatusOr<std::string> Newest(VerifyLevel level = VerifyLevel::kContents,
                                     const std::vector<std::string>& left_out = {},
                                     const std::vector<std::string>& unnamed = {}) const;

  // The numbers of the folders with a manifest, ascending, without those where that cannot be
  // determined now. For deletion, which spares those.
  absl::StatusOr<std::vector<int64_t>> SeenPublished() const;

  // The step of the newest checkpoint whose manifest is not damaged; -1: there is none.
  absl::StatusOr<int64_t> NewestStep() const;

  // Removes the oldest complete checkpoints until `keep` (>= 1) are left. Incomplete ones do not
  // count and stay, as do those whose step is a multiple of `keep_every` (0: none) or whose path is
  // in `spared`. `disposal`: as for RemoveCheckpoint.
  absl::Status Rotate(int keep, int64_t keep_every = 0, const std::vector<std::string>& spared = {},
                      Disposal* disposal = nullptr) const;
  // The same among `numbers`, which are ascending and complete.
  absl::Status RotateAmong(const std::vector<int64_t>& numbers, int keep, int64_t keep_every,
                           const std::vector<std::string>& spared,
                           Disposal* disposal = nullptr) const;

  // The staging folders of numbered checkpoints of which only the registry knows whether they are
  // sealed (sealing.h), those with a live writer included. Omits folders that cannot be examined at
  // the moment.
  std::vector<std::string> AskedToSeal() const;

  // For a folder whose registry may have disappeared permanently: removes the folders of
  // AskedToSeal() that have no writer and that retention would remove if they were checkpoints,
  // because they are older than the newest `keep` of `numbers`, which are ascending.
  absl::Status RemoveAsked(const std::vector<int64_t>& numbers, int keep) const;

  // Renames the sealed and complete checkpoints that dead writers left in staging folders. Returns
  // the folders of those that must stay there (see NameStaging(); also if an earlier checkpoint has
  // the name); they can be loaded from there. Errors: one of them cannot be read or renamed at the
  // moment.
  absl::StatusOr<std::vector<std::string>> PublishSealed() const;

 private:
  // The same among the entries `names` of root().
  std::vector<int64_t> NumbersAmong(const std::vector<std::string>& names) const;

  std::string root_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_FOLDER_H_
