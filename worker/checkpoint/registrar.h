#ifndef MUSTER_WORKER_CHECKPOINT_REGISTRAR_H_
#define MUSTER_WORKER_CHECKPOINT_REGISTRAR_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace muster {

// A checkpoint as the registry of the job knows it.
struct RegisteredCheckpoint {
  enum class State { kPreparing, kSealed, kPublished, kDeleting };

  std::string job;
  uint64_t id = 0;
  State state = State::kPreparing;
  std::string path;     // absolute
  std::string staging;  // where its files are until it is published
  int64_t iteration = 0;
  int64_t step = 0;
  uint64_t plan = 0;
  int ranks = 0;
  bool promoted = false;   // a resume may take it
  bool pinned = false;     // retention leaves it alone
  bool published = false;  // it had its name: its folder is `path`
  // What the last verification of its files found; empty: nothing wrong, or there was none.
  std::string damage;
  bool damage_in_contents = false;  // found by reading all bytes, not by sizes alone
  uint64_t created_us = 0;
  int64_t files = 0;
  uint64_t bytes = 0;
  // Hexadecimal digits: see "The chain" in docs/checkpoint_format.md. `sha256` is empty until the
  // checkpoint is sealed; `signature` if the coordinator has no key (--checkpoint_key).
  std::string files_sha256;
  std::string previous_sha256;
  std::string sha256;
  std::string signature;
};

// A tensor, or a box of one, in a file.
struct ShardSlice {
  std::string tensor;  // unique in the checkpoint
  std::string dtype;
  std::vector<int64_t> global_shape;
  std::vector<int64_t> offset;
  std::vector<int64_t> extent;
};

struct ShardFileReport {
  std::string name;
  uint64_t bytes = 0;
  std::string xxh3;
  std::vector<ShardSlice> slices;
};

struct CheckpointRegistration {
  std::string path;
  std::string staging;
  int64_t iteration = 0;
  int64_t step = 0;
  uint64_t plan = 0;
  int ranks = 1;
  // For the job's published checkpoints, besides pinned ones: how many are kept (0: all). Those
  // whose step is a multiple of `keep_every` (0: none) stay, too.
  int keep = 0;
  int64_t keep_every = 0;
  bool promote = true;
};

// The time that a save took on rank 0. Zero: not known.
struct SaveTimes {
  absl::Duration stall;  // training waited
  absl::Duration save;   // from its beginning until it had its name
};

// Records which checkpoints of a job are whole (docs/protocol.md, "Checkpoints"). Every call may be
// repeated. Methods block, through an outage of the registry for as long as the job tolerates one.
// Thread-safe.
class CheckpointRegistrar {
 public:
  virtual ~CheckpointRegistrar() = default;

  // The job whose checkpoints these are; empty if it is not known.
  virtual std::string job() const { return ""; }
  // Distinguishes this registry from any other, including one that was reset or started from an
  // older copy of its records. Known after the first answered call; empty if it is not known.
  virtual std::string identity() const { return ""; }
  // Called by rank 0: registers a save. An unfinished registration of the same path is given up.
  // Errors: UNIMPLEMENTED if there is no registry; UNAVAILABLE; FAILED_PRECONDITION and ABORTED if
  // this generation has ended.
  virtual absl::StatusOr<uint64_t> Begin(const CheckpointRegistration& registration) = 0;
  // Called by each rank: reports what it wrote, and all of it again after a restart of the
  // registry.
  virtual absl::Status ReportShards(uint64_t id, int rank,
                                    const std::vector<ShardFileReport>& files) = 0;
  // Called by rank 0: seals the checkpoint. Returns nothing if ranks must report again. Errors:
  // INVALID_ARGUMENT naming the first tensor that is not there exactly once; NOT_FOUND if it was
  // given up. After any other error it may be sealed.
  virtual absl::StatusOr<std::optional<RegisteredCheckpoint>> Seal(uint64_t id) = 0;
  // Called by rank 0 once the folder has its name. Returns the checkpoints to delete, oldest first.
  virtual absl::StatusOr<std::vector<RegisteredCheckpoint>> Publish(uint64_t id,
                                                                    const SaveTimes& times) = 0;
  // Called by rank 0 once a checkpoint has its name that was sealed without a record of this
  // registry: it is to be counted with the others. `bytes`: the size of its files. Waits for a
  // registry that is away for a few seconds at most.
  virtual void CountUnrecorded(uint64_t bytes, const SaveTimes& times) = 0;
  // Called by rank 0: reports that these checkpoints are deleted.
  virtual absl::Status Deleted(const std::vector<uint64_t>& ids) = 0;
  // Called by rank 0: gives up a registration. Does not wait for a registry that is away, which
  // gives up unfinished registrations later.
  virtual void Abort(uint64_t id, const std::string& reason) = 0;
  // Reports that the files of a checkpoint were examined: `damage` is what was found; empty:
  // nothing. `contents`: all bytes were read, not only the sizes. The registry lets no resume take
  // a damaged checkpoint until it is found whole. Does not wait for a registry that is away.
  virtual void Verified(const RegisteredCheckpoint& checkpoint, absl::string_view damage,
                        bool contents) = 0;
  virtual absl::Status Pin(uint64_t id) = 0;
  virtual absl::Status Unpin(uint64_t id) = 0;
  // Returns all checkpoints of the job, by id, which is the order in which they were begun.
  virtual absl::StatusOr<std::vector<RegisteredCheckpoint>> List() = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_REGISTRAR_H_
