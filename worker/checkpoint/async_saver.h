#ifndef MUSTER_WORKER_CHECKPOINT_ASYNC_SAVER_H_
#define MUSTER_WORKER_CHECKPOINT_ASYNC_SAVER_H_

#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/snapshot.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/comm.h"

namespace muster {

// Saves checkpoints beside training. A save copies this rank's state into memory, which is all that
// training waits for; a thread writes it to the disk, waits for the other ranks, and publishes the
// checkpoint as SaveCheckpoint does. The memory for two saves is kept: one may be written while the
// next is copied; a third waits for the first.
//
// One object on every rank, whose calls are made in the same order everywhere by one thread.
class AsyncSaver {
 public:
  struct Options {
    // Of this rank's writes; 0: as fast as the disk takes them.
    int64_t max_bytes_per_second = 0;
    // Blocks under way at a time.
    int in_flight = 2;
  };

  struct Request {
    // Empty: ROOT/checkpoint_{info.iteration} of `folder`, where rotation leaves `total_limit`
    // checkpoints (0: all) once the new one is published.
    std::string dir = "";
    std::optional<CheckpointFolder> folder = std::nullopt;
    int total_limit = 0;
    CheckpointInfo info = {};

    std::string path() const { return dir.empty() ? folder->PathOf(info.iteration) : dir; }
  };

  // How a save has ended.
  struct Outcome {
    std::string path;
    // The same on every rank: OK, or why there is no checkpoint.
    absl::Status status;
    uint64_t bytes = 0;  // that this rank wrote
    // How long the save made training wait, and from then until it was published.
    absl::Duration stall;
    absl::Duration persist;
  };

  // `comm`: the same ranks as those that save, for the thread alone.
  AsyncSaver(std::unique_ptr<Comm> comm, const Options& options);
  // Waits for the saves that have begun, and logs failures that were never reported.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  // Collective over `comm`: every rank calls it with the same request (rank 0's counts), and
  // `write` on each rank puts that rank's files. On return the state may change. Waits while two
  // saves are being written. Errors, the same on every rank: as SaveCheckpoint before anything is
  // written; those of Snapshot. `earlier` gets how the saves ended that have ended meanwhile, the
  // same ones on every rank, each once.
  absl::Status Begin(Comm& comm, const Request& request,
                     absl::FunctionRef<absl::Status(StateWriter&)> write,
                     std::vector<Outcome>* earlier);

  // Waits for the saves that have begun. Every outcome that has not been given yet. Not a
  // collective, though the ranks' threads wait for one another.
  std::vector<Outcome> Wait();

  // Whether a save is being written. On rank 0, false means that it has its name or has failed.
  bool busy() const;

 private:
  // A save that is copied, on its way to the disk.
  struct Save {
    Request request;
    std::optional<Staging> staging;  // rank 0
    std::string staging_path;
    std::unique_ptr<Snapshot> snapshot;
    absl::Duration stall;
    absl::Time begun;
  };

  std::unique_ptr<Snapshot> TakeSnapshot();
  void GiveBack(std::unique_ptr<Snapshot> snapshot);
  // The collective part of Begin.
  absl::Status Copy(Comm& comm, Save& save, absl::FunctionRef<absl::Status(StateWriter&)> write,
                    std::vector<Outcome>* earlier);
  absl::Status Persist(Save& save);
  absl::Status WriteFiles(const Save& save, std::vector<ManifestFile>* files);
  void Run();

  const std::unique_ptr<Comm> comm_;
  RateLimiter limiter_;
  const int in_flight_;
  const int rank_;
  const Clock& clock_ = Clock::Real();

  // What stands beside the checkpoints (a staging folder of a dead writer, a checkpoint on its way
  // out) is touched by one thread at a time: either would take the other's for abandoned.
  Mutex folder_mu_;

  mutable Mutex mu_;
  CondVar changed_;
  std::vector<std::unique_ptr<Snapshot>> idle_ ABSL_GUARDED_BY(mu_);
  std::deque<std::unique_ptr<Save>> queue_ ABSL_GUARDED_BY(mu_);
  // Saves by number, from 1: queued, and done.
  int64_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t done_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<Outcome> outcomes_ ABSL_GUARDED_BY(mu_);  // of the last ones done
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_ASYNC_SAVER_H_
