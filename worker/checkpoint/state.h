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
class Snapshot;
struct DirectFileWritten;
struct NodeGroups;
struct PublishOptions;

// Writes one rank's files of a checkpoint into the staging folder and records their digests. The
// caller creates that folder and publishes it (SaveCheckpoint here). Not thread-safe.
class StateWriter {
 public:
  StateWriter(std::string staging, int rank) : staging_(std::move(staging)), rank_(rank) {}
  // Puts the files into memory, from where they are written later. Borrows `snapshot`. `lazy`:
  // CopyLater() counts.
  StateWriter(Snapshot* snapshot, int rank, bool lazy = false)
      : snapshot_(snapshot), rank_(rank), lazy_(lazy) {}

  int rank() const { return rank_; }

  // What is to be written counts there. Borrows `save`.
  void ReportTo(SaveProgress::Save* save) { progress_ = save; }
  // So many bytes are going to be written by this rank, about.
  void Expect(uint64_t bytes) {
    if (progress_ != nullptr) progress_->Expect(bytes);
  }
  // Files that are written again and again, and how they were laid out. Borrows `plans`.
  void PlanWith(FilePlans* plans) { plans_ = plans; }

  // Into memory: the tensor may be copied later, see Snapshot::CopyLater.
  void CopyLater(const at::Tensor& tensor);

  // Writes one file (see folder.h for names), past the page cache. No two ranks may use one name.
  // Blocks on the disk or, into memory, on the copy; the tensors may change then.
  // Errors: as WriteStateDict; INVALID_ARGUMENT for a name this writer used already.
  absl::Status Write(const std::string& name, const StateDict& state,
                     SharedTensors shared = SharedTensors::kWriteAll);

  // A model file: tensors alone, the first name of shared ones, metadata {"format": "pt"}.
  absl::Status WriteModel(const std::string& name, const NamedTensors& tensors);

  // A file of text, such as the index of a model that is in several files.
  absl::Status WriteText(const std::string& name, const std::string& text);

  // What this rank has written to the disk.
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
};

// What the manifest says of a file that was written.
ManifestFile FileOf(const std::string& name, int rank, DirectFileWritten written);

// An existing checkpoint. Reads are checked against the manifest. Thread-safe.
class StateReader {
 public:
  // Reads the manifest and checks that every file is there with its size.
  // Errors: as VerifyCheckpoint.
  static absl::StatusOr<StateReader> Open(const std::string& dir);

  // One that is not on the disk: `files` are the contents of manifest.files by name, checked
  // already, which `keep` keeps. `name` is for messages.
  static StateReader OfMemory(std::string name, Manifest manifest,
                              std::map<std::string, absl::string_view> files,
                              std::shared_ptr<const void> keep);
  bool in_memory() const { return keep_ != nullptr; }
  // The contents of a file of manifest() there.
  absl::string_view InMemory(absl::string_view name) const { return files_.at(std::string(name)); }

  const std::string& dir() const { return dir_; }
  const Manifest& manifest() const { return manifest_; }
  const CheckpointInfo& info() const { return manifest_.info; }

  bool Has(absl::string_view name) const { return manifest_.Find(name) != nullptr; }

  // How many of name(0), name(1), ... there are, such as Count(OptimizerFileName).
  int Count(std::string (*name)(int)) const;

  // Collective, before the reader is used by several threads. Reads those of `names` that are large
  // together with the ranks that need them too, each a share (see SharedFiles); Read() takes them
  // from there. `ranges`: of files of which this rank needs a part, as in SharedFiles: what Read()
  // returns of the rest has no meaning. Errors: the same on every rank, as SharedFiles::Read.
  absl::Status ReadTogether(Comm& comm, const std::vector<std::string>& names);
  absl::Status ReadTogether(Comm& comm, const std::vector<std::string>& names,
                            const std::map<std::string, std::vector<FileRange>>& ranges);
  // Where such a file is in shared memory (SharedFiles::PathOf); empty: it was not read together.
  std::string PathOfShared(absl::string_view name) const;
  // Of the files of the last call, by this rank's host.
  uint64_t bytes_read_together() const;

  // Reads a file and checks its digest in the same pass. NOT_FOUND names the file and lists what
  // there is; DATA_LOSS if it is damaged.
  absl::StatusOr<StateDict> Read(absl::string_view name) const;

 private:
  StateReader(std::string dir, Manifest manifest)
      : dir_(std::move(dir)), manifest_(std::move(manifest)) {}

  std::string dir_;
  Manifest manifest_;
  std::map<std::string, absl::string_view> files_;  // in memory
  std::shared_ptr<const void> keep_;
  std::shared_ptr<const SharedFiles> shared_;
};

// Writes a checkpoint together: every rank calls it with the same `dir` and `info` (rank 0's
// counts), and `write` writes the files of its rank. Either all of it appears at `dir` in one step,
// replacing a checkpoint that is there, or nothing changes. Collective: it blocks until all ranks
// have finished, also when one fails. All ranks return the same status, which names the rank that
// failed. Exceptions from `write` become INTERNAL; those of `comm` propagate. What `options` says
// about retention applies to numbered checkpoints.
//
// `node`: absent, `dir` must be on a file system that all ranks share. Else a number that the ranks
// of one node have in common: every node keeps the files of its ranks in a `dir` of its own.
absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            absl::FunctionRef<absl::Status(StateWriter&)> write,
                            std::optional<int> node = std::nullopt);
absl::Status SaveCheckpoint(Comm& comm, const std::string& dir, const CheckpointInfo& info,
                            const PublishOptions& options,
                            absl::FunctionRef<absl::Status(StateWriter&)> write,
                            std::optional<int> node = std::nullopt);

// Saves as ROOT/checkpoint_{info.iteration} and, after that is published, removes the oldest as
// `options` says. Refuses a number that is taken. Collective, as SaveCheckpoint.
absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, const PublishOptions& options,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write,
                                    std::optional<int> node = std::nullopt);
// Keeps `total_limit` (0: all).
absl::Status SaveNumberedCheckpoint(Comm& comm, const CheckpointFolder& folder,
                                    const CheckpointInfo& info, int total_limit,
                                    absl::FunctionRef<absl::Status(StateWriter&)> write,
                                    std::optional<int> node = std::nullopt);

// For callers that assemble a save in another way. (Collective) Whether the number may be used.
absl::Status CheckNumberIsFree(Comm& comm, const NodeGroups& groups, const CheckpointFolder& folder,
                               int64_t iteration, int total_limit);

// Collective. Whether all ranks have opened the same checkpoint; on nodes every node has the same
// manifest. ABORTED on every rank: another process has put another one into its place meanwhile.
absl::Status CheckOpenedAlike(Comm& comm, const StateReader& reader);

// Opens a checkpoint on every rank; with `dir` empty, what FindCheckpointToResume says on rank 0.
// One search: a load uses OpenAndReadCheckpoint, which searches again. Collective; all ranks return
// the same error: FAILED_PRECONDITION if some see all of it and others not; without `dir` ABORTED
// if other processes rename or remove what is found. `tried`: what was opened or could not be.
absl::StatusOr<StateReader> OpenCheckpoint(Comm& comm, const std::string& dir,
                                           const CheckpointFolder& folder,
                                           CheckpointRegistrar* registrar = nullptr,
                                           const std::vector<std::string>& damaged = {},
                                           std::string* tried = nullptr);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_STATE_H_
