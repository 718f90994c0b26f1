#ifndef MUSTER_WORKER_CHECKPOINT_PUBLICATION_H_
#define MUSTER_WORKER_CHECKPOINT_PUBLICATION_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/mutex.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/save_progress.h"
#include "worker/checkpoint/seal_chain.h"
#include "worker/collective/comm.h"

namespace muster {

class Disposal;

// Turns what the ranks have written into a checkpoint, and chooses the one that a resume takes:
// with the registry of the job, or by the folder alone.

// The key, in the metadata of a rank's file of random states (its last file), of JSON with the
// tensors that the checkpoint has to hold as far as the rank knows, independent of what its files
// turn out to hold, and with the file of which the rank's files are parts
// (docs/checkpoint_format.md).
inline constexpr char kPlanKey[] = "muster.plan";

struct PublishOptions {
  // Borrowed. Null on every rank or on none: without a registry the folder alone counts.
  CheckpointRegistrar* registrar = nullptr;
  // For numbered checkpoints: how many are kept (0: all). Those whose step is a multiple of
  // keep_every (0: none) stay, too. Older ones are removed only after the new one is published.
  int keep = 0;
  int64_t keep_every = 0;
  // false: no resume takes the checkpoint until it is promoted. Needs a registrar.
  bool promote = true;
  // A file with a private Ed25519 key (PEM), which signs the records that rank 0 makes if there is
  // no registrar. Empty: they are not signed.
  std::string key_file = "";
  // Receives the progress of the save. Borrowed. Null: it is not reported.
  SaveProgress* progress = nullptr;
  // Deletes the checkpoint that the new one replaces, while the save continues; a save waits for
  // the deletions of the previous one. Borrowed. Null: a save ends when that checkpoint is removed.
  Disposal* disposal = nullptr;
};

struct Publication {
  PublishOptions options = {};
  CheckpointInfo info = {};  // rank 0's counts
  std::string path;          // the name that the checkpoint is to get
  std::string staging_path;
  // For a numbered checkpoint: the folder with the older ones.
  std::optional<CheckpointFolder> folder = std::nullopt;
  // Returns what the save has cost so far; null: not known.
  std::function<SaveTimes()> times = nullptr;
  // If not null, locked while folders beside it change, but not while this rank waits for others.
  Mutex* folder_mu = nullptr;
};

// Collective. Proves that every tensor that a rank plans is in exactly one file, from the plans and
// the headers of the files `mine` of each rank in the staging folder of its disk. Returns the same
// on every rank. Errors: INVALID_ARGUMENT naming the file; those of reading.
absl::Status ProveTogether(Comm& comm, const std::string& staging_path,
                           const std::vector<ManifestFile>& mine);

// On rank 0, if no registry makes one: makes the record of a checkpoint that is to be called
// `path`, whose manifest, in the folder `dir`, lists `files` of `ranks` ranks. The record continues
// the chain that ends with `previous`; its job has no name. Errors: those of the key and of
// reading.
absl::StatusOr<RegisteredCheckpoint> MakeRecord(const Publication& publication,
                                                const std::string& dir, int ranks,
                                                const std::vector<ManifestFile>& files,
                                                const ChainEnd& previous);
// Returns the end of the chain of the records beside `path`, and of the one at `path`: see
// ReadChainEnd().
ChainEnd PreviousRecords(const std::string& path);

// On rank 0: tells the registry, if there is one, to count the checkpoint of these files, which has
// its name but no record at the registry.
void CountUnrecorded(const Publication& publication, const std::vector<ManifestFile>& files);

// Collective; the last part of a save. `staging`: rank 0's; null on other ranks. `written`: whether
// this rank has written its files, which are `mine`. Returns the same on every rank: the first
// failure, with its rank.
absl::Status PublishTogether(Comm& comm, Staging* staging, const Publication& publication,
                             const absl::Status& written, const std::vector<ManifestFile>& mine);

// On rank 0: returns the checkpoint of `folder` that a resume takes. With a registry, that is the
// newest promoted one that is complete on the disk, including one that was sealed when its writer
// ended, which is renamed now. A registry that knows none, or that is unreachable, is ignored, and
// the log says so. Without a registry, it is the newest one that is complete. Checks manifests and
// sizes; the caller checks the contents when it loads, and calls again with the paths of damaged
// checkpoints in `damaged`. Errors: NOT_FOUND; DATA_LOSS if all are damaged; ABORTED if other
// processes rename or remove what is found: search again; transient errors (StaysUnreadable()) of
// the newest one: no older one is taken then.
absl::StatusOr<std::string> FindCheckpointToResume(const CheckpointFolder& folder,
                                                   CheckpointRegistrar* registrar,
                                                   const std::vector<std::string>& damaged = {});

// On rank 0: tells the registry, if there is one, that the checkpoint at `path`, which
// FindCheckpointToResume() has returned, is damaged.
void ReportDamage(const std::string& path, CheckpointRegistrar* registrar,
                  absl::string_view damage);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_PUBLICATION_H_
