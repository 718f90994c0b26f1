#ifndef MUSTER_WORKER_CHECKPOINT_STATE_H_
#define MUSTER_WORKER_CHECKPOINT_STATE_H_

#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/save_progress.h"
#include "worker/checkpoint/state_dict.h"
#include "worker/collective/comm.h"

namespace muster {

class CheckpointRegistrar;
class FilePlans;
class SharedFiles;
struct FileRange;
struct FilesOnNodes;
struct SafetensorsHeader;
class Snapshot;
struct DirectFileWritten;
struct NodeGroups;
struct PublishOptions;

// Writes one rank's files of a checkpoint into the staging folder and records their digests. The
// caller creates that folder and publishes it (SaveCheckpoint here). Not thread-safe.
class StateWriter {
 public:
  StateWriter(std::string staging, int rank) : staging_(std::move(staging)), rank_(rank) {}
  // Puts the files into memory, from which they are written later. Borrows `snapshot`. `lazy`:
  // CopyLater() takes effect.
  StateWriter(Snapshot* snapshot, int rank, bool lazy = false)
      : snapshot_(snapshot), rank_(rank), lazy_(lazy) {}

  int rank() const { return rank_; }

  // Counts the bytes to be written in `save`, which is borrowed.
  void ReportTo(SaveProgress::Save* save) { progress_ = save; }
  // Announces about how many bytes this rank will write.
  void Expect(uint64_t bytes) {
    if (progress_ != nullptr) progress_->Expect(bytes);
  }
  // Uses `plans`, the layouts of files that are written repeatedly. Borrows `plans`.
  void PlanWith(FilePlans* plans) { plans_ = plans; }

  // When writing into memory: the tensor may be copied later, see Snapshot::CopyLater.
  void CopyLater(const at::Tensor& tensor);

  // Writes one file (see folder.h for names), bypassing the page cache. No two ranks may use the
  // same name. Blocks on the disk or, when writing into memory, on the copy; after that the tensors
  // may change.
  // Errors: as WriteStateDict; INVALID_ARGUMENT for a name this writer used already.
  absl::Status Write(const std::string& name, const StateDict& state,
                     SharedTensors shared = SharedTensors::kWriteAll);

  // Writes a model file: only tensors, shared ones under their first name, metadata {"format":
  // "pt"}.
  absl::Status WriteModel(const std::string& name, const NamedTensors& tensors);

  // Writes a text file, such as the index of a model in several files.
  absl::Status WriteText(const std::string& name, const std::string& text);

  // Makes writing return `status` if it is an error, because this rank cannot write. For functions
  // that exchange data with other ranks before they write, and so must be called even then.
  void Refuse(const absl::Status& status) { refused_ = status; }
  const absl::Status& refused() const { return refused_; }

  // The files that this rank has written to the disk.
  const std::vector<ManifestFile>& files() const { return files_; }

 private:
  absl::Status CheckName(const std::string& name) const;
  absl::Status Put(const std::string& name, const PlannedStateFile& file);

  const std::string staging_;
  Snapshot* const snapshot_ = nullptr;
  const int rank_;
  const bool lazy_ = false;
  SaveProgress::Save* progress_ = nullptr;
  FilePlans* plans_ = nullptr;
  std::vector<ManifestFile> files_;
  absl::Status refused_;
};

// Returns the manifest's entry for a written file.
ManifestFile FileOf(const std::string& name, int rank, DirectFileWritten written);

// An existing checkpoint. Reads are checked against the manifest. Thread-safe.
class StateReader {
 public:
  // Reads the manifest and checks that every file exists with its size.
  // Errors: as VerifyCheckpoint.
  static absl::StatusOr<StateReader> Open(const std::string& dir);

  // Returns a reader of a checkpoint that is not on the disk: `files` are the already checked
  // contents of manifest.files by name, which `keep` keeps alive. `name` is for messages.
  static StateReader OfMemory(std::string name, Manifest manifest,
                              std::map<std::string, absl::string_view> files,
                              std::shared_ptr<const void> keep);
  // Returns the reader of rank `rank` for a checkpoint of which its node has, in the folder `dir`,
  // the files that `nodes` lists. The rank can Read() the other files once Fetch() or
  // ReadTogether() has got them from other nodes. Adds no files to folders.
  static StateReader InParts(int rank, std::string dir, Manifest manifest, FilesOnNodes nodes);
  bool in_parts() const { return nodes_ != nullptr; }
  // Whether this rank's node has the file; whether it has any file.
  bool IsHere(absl::string_view name) const;
  bool HasAnyHere() const;

  // For a checkpoint in parts (others need nothing more). Collective. Gets the headers of those of
  // these safetensors files that have block digests, for Header() and ReadTogether(), in place of
  // earlier ones. The same files on every rank. Errors, the same on every rank: those of
  // GatherHeaders and GatherFiles.
  absl::Status FetchHeaders(Comm& comm, const std::vector<std::string>& names);
  // Gets these files for this rank only. Each rank may name different files, including ones that do
  // not exist. For small files: several ranks of a host do not share the memory.
  absl::Status Fetch(Comm& comm, const std::vector<std::string>& names);
  // The header of a file of the last FetchHeaders(). Errors: those of ParseSafetensorsHeader.
  absl::StatusOr<SafetensorsHeader> Header(absl::string_view name) const;

  bool in_memory() const { return keep_ != nullptr; }
  // Returns the contents of a file of manifest(), if the checkpoint is in memory.
  absl::string_view InMemory(absl::string_view name) const { return files_.at(std::string(name)); }

  const std::string& dir() const { return dir_; }
  const Manifest& manifest() const { return manifest_; }
  const CheckpointInfo& info() const { return manifest_.info; }

  bool Has(absl::string_view name) const { return manifest_.Find(name) != nullptr; }

  // How many of name(0), name(1), ... exist, as in Count(OptimizerFileName).
  int Count(std::string (*name)(int)) const;

  // Reads the large files among `names` together with the other ranks that need them, each rank a
  // share (see SharedFiles); Read() then takes them from there. Collective; call it before several
  // threads use the reader. `ranges`: for files of which this rank needs only a part, as in
  // SharedFiles; the rest of what Read() returns is meaningless. Of a checkpoint in parts, small
  // files too, and all ranks name the same files. Errors: the same on every rank, as
  // SharedFiles::Read.
  absl::Status ReadTogether(Comm& comm, const std::vector<std::string>& names);
  absl::Status ReadTogether(Comm& comm, const std::vector<std::string>& names,
                            const std::map<std::string, std::vector<FileRange>>& ranges);
  // Makes ReadTogether() check the files and leave them where they are: Read() maps them, so that
  // they take no memory that the kernel could not take back (SharedFiles::Options::in_place). What
  // comes from other nodes goes into the folder `scratch`, without a name; "": beside dir().
  void UseInPlace(const std::string& scratch = "") {
    in_place_ = true;
    scratch_ = scratch;
  }
  // Returns the path of such a file in shared memory (SharedFiles::PathOf); empty: it was not read
  // together.
  std::string PathOfShared(absl::string_view name) const;
  // The bytes of the last call's files that this rank's host read, and those that it got from other
  // nodes.
  uint64_t bytes_read_together() const;
  uint64_t bytes_received_together() const;

  // Reads a file and checks its digest in the same pass. NOT_FOUND names the file and lists the
  // existing ones; DATA_LOSS if it is damaged.
  absl::StatusOr<StateDict> Read(absl::string_view name) const;

 private:
  StateReader(std::string dir, Manifest manifest)
      : dir_(std::move(dir)), manifest_(std::move(manifest)) {}

  std::string dir_;
  Manifest manifest_;
  std::map<std::string, absl::string_view> files_;  // in memory
  std::shared_ptr<const void> keep_;
  // For a checkpoint in parts.
  std::shared_ptr<const FilesOnNodes> nodes_;
  int rank_ = 0;
  std::map<std::string, std::string> headers_, fetched_;  // by name
  std::shared_ptr<const SharedFiles> shared_;
  bool in_place_ = false;
  std::string scratch_;
};

// Writes a checkpoint on all ranks together: every rank calls it with the same `dir` and `info`
// (rank 0's are used), and `write` writes the files of its rank. Either the whole checkpoint
// appears at `dir` in one step, replacing an existing one, or nothing changes. Collective: it
// blocks until all ranks have finished, even if one fails. All ranks return the same status, which
// names the rank that failed. Exceptions from `write` become INTERNAL; those of `comm` propagate.
// The retention settings in `options` apply to numbered checkpoints.
//
// `node`: if absent, `dir` must be on a file system that all ranks share. Otherwise a number common
// to the ranks of a node: every node keeps its ranks' files in its own `dir`.
absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            absl::FunctionRef<absl::Status(StateWriter&)> write,
                            std::optional<int> node = std::nullopt);
absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            const PublishOptions& options,
                            absl::FunctionRef<absl::Status(StateWriter&)> write,
                            std::optional<int> node = std::nullopt);

// Saves as ROOT/checkpoint_{info.iteration} and, once that is published, removes the oldest
// according to `options`. Refuses a number that is in use. Collective, like SaveCheckpoint.
absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, const PublishOptions& options,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write,
                                    std::optional<int> node = std::nullopt);
// The same, keeping `total_limit` checkpoints (0: all).
absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, int total_limit,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write,
                                    std::optional<int> node = std::nullopt);

// (Collective) Checks that the number may be used, for callers that assemble a save in another way.
absl::Status CheckNumberIsFree(Comm& comm, const NodeGroups& groups, const CheckpointFolder& folder,
                               int64_t iteration, int total_limit);

// Checks that all ranks have opened the same checkpoint, or that all nodes have the same manifest.
// Collective. Returns the same error on every rank: INVALID_ARGUMENT if `given` (the same on all)
// is true and ranks were given different folders of one disk; otherwise ABORTED: another process
// has replaced the checkpoint meanwhile, perhaps on one node alone.
absl::Status CheckOpenedAlike(Comm& comm, const StateReader& reader, bool given);

// Opens a checkpoint on every rank; if `dir` is empty, the one that FindCheckpointToResume returns
// on rank 0. Searches only once; a load uses OpenAndReadCheckpoint, which searches again.
// Collective; all ranks return the same error: FAILED_PRECONDITION if only some ranks see all of
// it; without `dir`, ABORTED if other processes rename or remove the checkpoint found. `tried`: the
// one that was opened or could not be.
absl::StatusOr<StateReader> OpenCheckpoint(Comm& comm, const std::string& dir,
                                           const CheckpointFolder& folder,
                                           CheckpointRegistrar* registrar = nullptr,
                                           const std::vector<std::string>& damaged = {},
                                           std::string* tried = nullptr);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_STATE_H_
