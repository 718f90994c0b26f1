#ifndef MUSTER_WORKER_CHECKPOINT_MEMORY_TIER_H_
#define MUSTER_WORKER_CHECKPOINT_MEMORY_TIER_H_

#include <array>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/held_memory.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "worker/checkpoint/deferred_copy.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/memory_record.h"
#include "worker/checkpoint/snapshot.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/comm.h"

namespace muster {

// Checkpoints in memory that outlives the processes of the job: the node's agent holds it, and the
// next attempt reads it. They survive the end of processes, not of their agents.
//
// Each rank has two pieces of memory. A save goes to the one that does not hold the last save that
// all ranks have whole, and is overwritten only once a later one is whole on every rank. A save
// counts if all ranks have it.
//
// One object on every rank, whose calls are made in the same order everywhere by one thread.
class MemoryTier {
 public:
  // Collective. Nothing is reserved before the first save. `socket` and `worker_id` as the agent
  // gave them. Errors, the same on every rank: FAILED_PRECONDITION some rank has no agent, or
  // another object of its process for this worker; those of TakeHeldMemory.
  static absl::StatusOr<std::unique_ptr<MemoryTier>> Open(Comm& comm, const std::string& socket,
                                                          const std::string& worker_id);
  // Waits for the save that has begun.
  ~MemoryTier();
  MemoryTier(const MemoryTier&) = delete;
  MemoryTier& operator=(const MemoryTier&) = delete;

  // Collective. Copies the files that `write` puts; what that gives to CopyLater() is copied after
  // the return if `lazy`, see WaitForCopy(). The files are digested by a thread. Returns the same
  // on every rank: how the save before ended, with the rank that failed. RESOURCE_EXHAUSTED: this
  // save was not begun, and there is no memory for others. UNAVAILABLE: the agent of a rank did not
  // answer; later saves may succeed.
  absl::Status Save(Comm& comm, const CheckpointInfo& info, int64_t since_disk, bool lazy,
                    absl::FunctionRef<absl::Status(StateWriter&)> write);

  // As AsyncSaver::WaitForCopy.
  void WaitForCopy();

  // Waits until the last save is whole here. How it went; for this rank alone.
  absl::Status Wait();

  struct Found {
    StateReader reader;
    int64_t since_disk = 0;
    MemorySaveId save;
    uint64_t copied_bytes = 0;  // from other nodes, into memory that this rank has made
  };
  struct FindOptions {
    // A new file in memory for the parts of other nodes. Null: CreateHoldableMemory.
    std::function<absl::StatusOr<OwnedFd>(const std::string& name)> create = nullptr;
  };
  // Collective. The newest save that all ranks have and whose files have their digests; nothing if
  // there is none. What a node lacks comes from the others: one copy, which the ranks of the node
  // share if they can open each other's files under /proc. The reader is valid until the next save.
  absl::StatusOr<std::optional<Found>> Find(Comm& comm, const FindOptions& options);
  absl::StatusOr<std::optional<Found>> Find(Comm& comm) { return Find(comm, FindOptions()); }
  // Training continues from it: it is not overwritten before a later save is whole.
  void Keep(const MemorySaveId& save);
  // Training continues from elsewhere: nothing in memory counts any more.
  void Forget();

 private:
  // This rank's files of a save that this node has.
  struct Piece {
    std::shared_ptr<AlignedMemory> memory;
    MemoryRecord record;
  };
  class Search;
  struct Slot {
    OwnedFd fd;
    std::unique_ptr<Snapshot> snapshot;
  };
  struct Pending {
    int slot = 0;
    MemorySaveId save;
    CheckpointInfo info;
    int64_t since_disk = 0;
    std::shared_ptr<DeferredCopy> deferred;
  };

  MemoryTier(const Comm& comm, std::string socket, std::string worker_id);
  // Takes over this worker's memory of earlier attempts.
  absl::Status Adopt();
  // Makes the slot ready for the files of a save.
  absl::Status Prepare(int slot);
  absl::StatusOr<std::vector<Piece>> PiecesHere() const;
  absl::Status Complete(const Pending& pending);
  void Run();

  const std::string socket_;
  const std::string worker_id_;
  const int rank_;
  const int size_;
  const Clock& clock_ = Clock::Real();

  // Of the caller's thread, and of the other one while a save is pending.
  std::array<Slot, kHeldSlots> slots_;
  bool adopted_ = false;
  int good_ = -1;     // the slot of the last save that all ranks have; -1: none
  int current_ = -1;  // that of the last save; -1: none since the last Save() failed or began
  uint64_t sequence_ = 0;
  std::shared_ptr<DeferredCopy> last_deferred_;

  Mutex mu_;
  CondVar changed_;
  std::unique_ptr<Pending> pending_ ABSL_GUARDED_BY(mu_);  // the thread's work
  absl::Status status_ ABSL_GUARDED_BY(mu_);               // of the last save
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MEMORY_TIER_H_
