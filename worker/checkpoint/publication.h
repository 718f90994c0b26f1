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

// How what the ranks have written becomes a checkpoint, and which one a resume takes: with the
// registry of the job, or by the folder alone.

// In the metadata of a rank's file of random states, its last: JSON with what the checkpoint has to
// hold as far as the rank knows, whatever its files came to hold, and of which file those are parts
// that it writes (docs/checkpoint_format.md).
inline constexpr char kPlanKey[] = "muster.plan";

struct PublishOptions {
  // Borrowed. Null on every rank or on none: without one the folder alone counts.
  CheckpointRegistrar* registrar = nullptr;
  // Of numbered checkpoints: how many are kept (0: all), and those whose step is a multiple of
  // keep_every (0: none). Older ones are removed only after the new one is published.
  int keep = 0;
  int64_t keep_every = 0;
  // false: no resume takes it until it is promoted. Needs a registrar.
  bool promote = true;
  // A file with a private Ed25519 key (PEM), which signs the records that rank 0 makes where there
  // is no registrar. Empty: they are not signed.
  std::string key_file = "";
  // Where the save says how far it is. Borrowed. Null: nowhere.
  SaveProgress* progress = nullptr;
  // Deletes the checkpoint that the new one replaces; the previous save is waited for. Borrowed.
  // Null: a save ends when that is removed.
  Disposal* disposal = nullptr;
};

struct Publication {
  PublishOptions options = {};
  CheckpointInfo info = {};  // rank 0's counts
  std::string path;          // what the checkpoint is to be called
  std::string staging_path;
  // Of a numbered one: where older ones are.
  std::optional<CheckpointFolder> folder = std::nullopt;
  // What the save has cost so far; null: not known.
  std::function<SaveTimes()> times = nullptr;
  // If not null, locked while folders beside it change, but not while this rank waits for others.
  Mutex* folder_mu = nullptr;
};

// Collective. Proves that every tensor that a rank plans is in exactly one file, from the plans and
// the headers of the files `mine` of each rank in the staging folder of its disk. Returns the same
// on every rank. Errors: INVALID_ARGUMENT naming the file; those of reading.
absl::Status ProveTogether(Comm& comm, const std::string& staging_path,
                           const std::vector<ManifestFile>& mine);

// Of rank 0, where no registry makes one: the record of a checkpoint that is to be called `path`,
// whose manifest, in the folder `dir`, lists `files` of `ranks` ranks. It continues the chain that
// ends with `previous`; its job has no name. Errors: of the key; of reading.
absl::StatusOr<RegisteredCheckpoint> MakeRecord(const Publication& publication,
                                                const std::string& dir, int ranks,
                                                const std::vector<ManifestFile>& files,
                                                const ChainEnd& previous);
// Of the records beside `path`, and of what has that name: see ReadChainEnd().
ChainEnd PreviousRecords(const std::string& path);

// Of rank 0: the checkpoint, of these files, has its name, and the registry, if there is one, has
// no record of it. Tells it to count it.
void CountUnrecorded(const Publication& publication, const std::vector<ManifestFile>& files);

// Collective; the last part of a save. `staging`: of rank 0, null elsewhere. `written`: whether
// this rank has written its files, which are `mine`. Returns the same on every rank; the first
// failure with its rank.
absl::Status PublishTogether(Comm& comm, Staging* staging, const Publication& publication,
                             const absl::Status& written, const std::vector<ManifestFile>& mine);

// Of rank 0: the checkpoint of `folder` that a resume takes. With a registry: the newest promoted
// one that is complete on the disk, including one that was sealed when its writer ended, which is
// renamed now. A registry that knows none, or that is unreachable, is ignored, and the log says so.
// Without one: the newest that is complete. Manifests and sizes are checked; who loads it checks
// the contents, and asks again with the paths of those that were damaged in `damaged`. Errors:
// NOT_FOUND; DATA_LOSS if there are only damaged ones; ABORTED if other processes rename or remove
// what is found: search again; those that may pass (StaysUnreadable()), of the newest one: no older
// one is taken then.
absl::StatusOr<std::string> FindCheckpointToResume(const CheckpointFolder& folder,
                                                   CheckpointRegistrar* registrar,
                                                   const std::vector<std::string>& damaged = {});

// Of rank 0: the checkpoint at `path`, which FindCheckpointToResume() has returned, is damaged.
// Tells the registry if there is one.
void ReportDamage(const std::string& path, CheckpointRegistrar* registrar,
                  absl::string_view damage);

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_PUBLICATION_H_
