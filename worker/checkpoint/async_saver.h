#ifndef MUSTER_WORKER_CHECKPOINT_ASYNC_SAVER_H_
#define MUSTER_WORKER_CHECKPOINT_ASYNC_SAVER_H_

#include <atomic>
#include <cstdint>
#include <deque>
#include <memory>
#include <optional>
#include <set>
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
#include "worker/checkpoint/polite_pace.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/save_progress.h"
#include "worker/checkpoint/snapshot.h"
#include "worker/checkpoint/staged_save.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/comm.h"

namespace muster {

// Saves checkpoints beside training. A save copies this rank's state into memory, or to the place
// that Request::keep gives for it; training waits only for that copy. Tensors that only the
// optimizer changes are copied by a thread while training continues. Another thread writes the copy
// to the disk, waits for the other ranks, and publishes the checkpoint as SaveCheckpoint does. The
// memory for two saves is kept: one may be written while the next is copied; a third waits for the
// first.
//
// One object on every rank, whose calls are made in the same order everywhere by one thread.
class AsyncSaver {
 public:
  struct Options {
    // The limit for this rank's writes. 0: as fast as the disk takes them, or, while training wants
    // all cores, slowly enough that training loses less than 3 % (PolitePace), if that takes no
    // more than a minute. Writes that training waits for are not held back.
    int64_t max_bytes_per_second = 0;
    // How many ranks of this node save.
    int local_ranks = 1;
    // Blocks that are being written at a time.
    int in_flight = 2;
    // Whether tensors passed to StateWriter::CopyLater() are copied after Begin() returns; see
    // WaitForCopy().
    bool lazy = false;
  };

  struct Request {
    // Empty: ROOT/checkpoint_{info.iteration} of `folder`, where rotation leaves `total_limit`
    // checkpoints (0: all) once the new one is published.
    std::string dir = "";
    std::optional<CheckpointFolder> folder = std::nullopt;
    int total_limit = 0;
    // The other settings of the publication; its `keep` is replaced by total_limit.
    PublishOptions publish = {};
    CheckpointInfo info = {};
    // The node of this rank, as in SaveCheckpoint.
    std::optional<int> node = std::nullopt;
    // Where this rank's copies go, as in Snapshot::KeepBy(); null: into memory.
    Snapshot::KeepTensor keep = nullptr;

    std::string path() const { return dir.empty() ? folder->PathOf(info.iteration) : dir; }
  };

  // The result of a save. Rank 0 logs it at once.
  struct Outcome {
    std::string path;
    // The same on every rank: OK, or the reason why there is no checkpoint.
    absl::Status status;
    uint64_t bytes = 0;  // written by this rank
    // How long the save made training wait, including the wait for its copies, and how long it then
    // took until the checkpoint was published.
    absl::Duration stall;
    absl::Duration persist;
  };

  // `comm`: the same ranks as those that save, for the thread's use alone. Throws std::system_error
  // if no thread can be started; the other ranks do not learn of that.
  AsyncSaver(std::unique_ptr<Comm> comm, const Options& options);
  // Waits for the saves that have begun.
  ~AsyncSaver();
  AsyncSaver(const AsyncSaver&) = delete;
  AsyncSaver& operator=(const AsyncSaver&) = delete;

  // Collective over `comm`: every rank calls it with the same request (rank 0's counts), and
  // `write` writes the files of its rank. After the return the state may change, except for the
  // tensors that were passed to CopyLater(). Waits while two saves are being written, which then no
  // longer rest. Errors, the same on every rank: those of SaveCheckpoint before anything is
  // written; those of Snapshot. `earlier` gets the outcomes of the saves that have ended since, the
  // same on every rank, each once.
  absl::Status Begin(Comm& comm, const Request& request,
                     absl::FunctionRef<absl::Status(StateWriter&)> write,
                     std::vector<Outcome>* earlier);

  // Must be called before tensors change that were passed to CopyLater(): helps to copy them and
  // returns when all are copied. Cheap if they are copied already.
  void WaitForCopy();

  // Waits for the saves that have begun. Returns every outcome that has not been returned yet. Not
  // a collective, though the ranks' threads wait for one another.
  std::vector<Outcome> Wait();

  // Abandons all saves that have begun, because a peer is lost: those that are being written end
  // after the current block, and fail. Final. Does not block.
  void Abandon();

  // Whether a save is being written. On rank 0, false means that it is published or has failed.
  bool busy() const;

  // Whether a save has failed whose outcome Begin() and Wait() have not returned yet. Other ranks
  // may learn of it later.
  bool failed() const;

 private:
  // A save that is copied, on its way to the disk.
  struct Save {
    Request request;
    std::optional<StagedSave> staged;
    std::unique_ptr<Snapshot> snapshot;
    std::shared_ptr<DeferredCopy> deferred;
    absl::Duration stall;
    absl::Time begun;
    std::unique_ptr<SaveProgress::Save> progress;  // null: no progress is reported
  };

  // While an object of this class exists, training waits for the saves, which therefore do not
  // rest.
  class Hurry;

  // Ends the threads.
  void End();
  std::unique_ptr<Snapshot> TakeSnapshot();
  void GiveBack(std::unique_ptr<Snapshot> snapshot);
  // The collective part of Begin.
  absl::Status Copy(Comm& comm, Save& save, absl::FunctionRef<absl::Status(StateWriter&)> write,
                    std::vector<Outcome>* earlier);
  absl::Status Persist(Save& save);
  absl::Status WriteFiles(const Save& save, std::vector<ManifestFile>* files);
  // Called by a writing thread after each block; the arguments are those of PolitePace::Rest.
  void RestIfCoresAreWanted(absl::Duration also, absl::Duration most);
  PolitePace& PaceOfThisThread() const;
  bool Stops() const;
  void Run();
  void RunCopies();

  const std::unique_ptr<Comm> comm_;
  RateLimiter limiter_;
  std::atomic<bool> abandoned_{false};
  const int in_flight_;
  const bool lazy_;
  const int rank_;
  const bool polite_;  // if false, a rate limit sets the speed
  PoliteWriters writers_;
  const Clock& clock_ = Clock::Real();

  // Lets one thread at a time change the folders beside the checkpoints (a staging folder of a dead
  // writer, a checkpoint that is being removed); otherwise each thread would treat the other's
  // folders as abandoned.
  Mutex folder_mu_;

  // The folders that SettleNodes() has examined; it looks only for what is older than this process.
  // Used by the thread that calls Begin().
  std::set<std::string> settled_;

  mutable Mutex mu_;
  CondVar changed_;
  std::vector<std::unique_ptr<Snapshot>> idle_ ABSL_GUARDED_BY(mu_);
  std::deque<std::unique_ptr<Save>> queue_ ABSL_GUARDED_BY(mu_);
  // Saves by number, from 1: queued, and done.
  int64_t begun_ ABSL_GUARDED_BY(mu_) = 0;
  int64_t done_ ABSL_GUARDED_BY(mu_) = 0;
  std::deque<Outcome> outcomes_ ABSL_GUARDED_BY(mu_);  // of the newest saves that are done
  std::deque<std::shared_ptr<DeferredCopy>> to_copy_ ABSL_GUARDED_BY(mu_);  // for copier_
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::shared_ptr<DeferredCopy> last_deferred_;  // of the newest save; for the caller's thread
  // Declared last, because the threads use the members above.
  std::thread copier_;
  std::thread thread_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_ASYNC_SAVER_H_
