#ifndef MUSTER_WORKER_CHECKPOINT_MEMORY_TIER_H_
#define MUSTER_WORKER_CHECKPOINT_MEMORY_TIER_H_

#include <array>
#include <cstdint>
#include <functional>
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
#include "base/clock.h"
#include "base/held_memory.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "worker/checkpoint/deferred_copy.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/memory_mirror.h"
#include "worker/checkpoint/memory_record.h"
#include "worker/checkpoint/snapshot.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/comm.h"

namespace muster {

// Checkpoints in memory that outlives the processes of the job: the node's agent holds the memory,
// and the next attempt reads it. The checkpoints survive the end of processes. They survive the
// loss of a node, with its agent, if they are mirrored: each rank's part is copied to a rank of
// another node.
//
// A save goes to a piece of memory that holds neither the last save that is whole on all ranks, nor
// the last one that is mirrored, nor the one that is being mirrored. That takes one or two pieces
// if mirrors are finished before the next save, and four at most. A save counts if the part of
// every rank is whole on some node.
//
// One object on every rank, whose calls are made in the same order everywhere by one thread.
class MemoryTier {
 public:
  struct MirrorOptions {
    // Collective. Returns a Comm of the same ranks with a process group, for the use of one thread.
    // Called if the ranks are on several nodes. Null: saves are not mirrored.
    std::function<absl::StatusOr<std::unique_ptr<Comm>>()> connect = nullptr;
    // See MemoryMirror.
    std::function<void()> before_piece = nullptr;
  };
  // Collective. Reserves no memory before the first save. `socket` and `worker_id` are those that
  // the agent gave. Errors, the same on every rank: FAILED_PRECONDITION if some rank has no agent,
  // or its process has another object for this worker; those of TakeHeldMemory.
  static absl::StatusOr<std::unique_ptr<MemoryTier>> Open(Comm& comm, const std::string& socket,
                                                          const std::string& worker_id,
                                                          const MirrorOptions& mirror);
  static absl::StatusOr<std::unique_ptr<MemoryTier>> Open(Comm& comm, const std::string& socket,
                                                          const std::string& worker_id) {
    return Open(comm, socket, worker_id, MirrorOptions());
  }
  // Waits for the save that has begun.
  ~MemoryTier();
  MemoryTier(const MemoryTier&) = delete;
  MemoryTier& operator=(const MemoryTier&) = delete;

  // Collective. Copies the files that `write` writes; if `lazy`, the tensors that it passes to
  // CopyLater() are copied after the return, see WaitForCopy(). A thread digests the files. Returns
  // the same on every rank, naming the rank that failed: the error that `write` returns or throws;
  // RESOURCE_EXHAUSTED if there is no memory for this save, nor for later ones; UNAVAILABLE if the
  // agent of a rank did not answer, or had no memory beyond that of saves that are not mirrored;
  // later saves may succeed. `earlier` gets, also the same everywhere, how the previous save ended
  // after its return: for example, that a tensor was changed before it was copied. The save is
  // mirrored if the mirror of an earlier one is not under way.
  absl::Status Save(Comm& comm, const CheckpointInfo& info, int64_t since_disk, bool lazy,
                    absl::FunctionRef<absl::Status(StateWriter&)> write, absl::Status* earlier);

  // Like AsyncSaver::WaitForCopy.
  void WaitForCopy();

  // Waits until the last save is whole here. Returns how it went, for this rank alone.
  absl::Status Wait();
  // Collective. Like Wait(), with the same result on all ranks; the next save does not report that
  // error again.
  absl::Status Settle(Comm& comm);
  // Waits until the last save is mirrored here, if it is to be. Returns the result of this rank's
  // part of the last mirror; OK if none was made.
  absl::Status WaitForMirror();

  struct Found {
    StateReader reader;
    int64_t since_disk = 0;
    MemorySaveId save;
    // The newest save of which two nodes have the part of every rank; if there is none, the save
    // that was found.
    MemorySaveId mirrored;
    bool own_part_is_here = true;  // on this node, undamaged
    uint64_t copied_bytes = 0;     // from other nodes, into memory that this rank has made
  };
  struct FindOptions {
    // Makes a new file in memory for the parts of other nodes. Null: CreateHoldableMemory.
    std::function<absl::StatusOr<OwnedFd>(const std::string& name)> create = nullptr;
    // The same on every rank. Saves of earlier steps are ignored.
    int64_t from_step = -1;
  };
  // Collective. Finds the newest save that all ranks have and whose files have their digests.
  // Returns nothing if there is none, or if a node has no memory for the parts of others, which it
  // would not have at the next start either. Errors, the same on every rank, if the newest save is
  // not known or cannot be read now, for example because an agent does not answer (UNAVAILABLE): no
  // older save is taken then. A part that is damaged on one node is taken from another that mirrors
  // it. Parts that a node lacks come from other nodes: one copy, which the ranks of the node share
  // if they can open each other's files under /proc. The reader is valid until the next save.
  absl::StatusOr<std::optional<Found>> Find(Comm& comm, const FindOptions& options);
  absl::StatusOr<std::optional<Found>> Find(Comm& comm) { return Find(comm, FindOptions()); }
  // Keeps `found` because training continues from it: it is not overwritten before a later save is
  // whole, nor its mirror before a later one is mirrored.
  void Keep(const Found& found);
  // Collective. Discards everything in memory, because training continues from elsewhere. Errors,
  // the same on every rank: UNAVAILABLE if an agent does not answer, and others; then everything in
  // memory still counts.
  absl::Status Forget(Comm& comm);

 private:
  // This rank's files of a save that this node has.
  struct Piece {
    std::string place;  // the worker and its slot
    std::shared_ptr<AlignedMemory> memory;
    MemoryRecord record;
  };
  class Search;
  // The message that the ranks exchange at the beginning of a save, before they agree on its copy.
  struct SaveAnnouncement;
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
    bool mirrored = false;    // it is to be mirrored
    bool completing = false;  // some thread writes its record
  };
  // The number of this rank's own pieces of memory; those of a mirror follow.
  static constexpr int kOwnSlots = MemoryMirror::kFirstSlot;
  // The number of pieces that suffices without a mirror.
  static constexpr int kPlainSlots = 2;

  MemoryTier(const Comm& comm, std::string socket, std::string worker_id);
  // Takes over this worker's memory of earlier attempts.
  absl::Status Adopt();
  // Collective. Learns on which node each rank is. There is no mirror without several nodes and
  // connections between them.
  void OpenMirror(Comm& comm, const MirrorOptions& options);
  // Drops the memory of workers that ran on this node in earlier attempts, once later saves have
  // replaced theirs.
  void DropWhatOthersLeft();
  // Takes note of the state of the mirrors of all ranks.
  void LearnOfMirror(bool busy, const absl::Status& status);
  // Returns the memory of this rank's mirrors to the agent.
  void ReturnMirrorsMemory();
  // Returns the slot of the next save.
  int FreeSlot() const;
  // Makes the slot ready for the files of a save.
  absl::Status Prepare(int slot);
  // Returns the status of a save for which the memory was too small.
  absl::Status WithoutMemory(int slot, const absl::Status& status);
  absl::StatusOr<std::vector<Piece>> PiecesHere() const;
  static std::string DamagedFile(const Piece& piece);
  absl::Status Complete(const Pending& pending);
  // Helps with the save that is pending, and returns when it is whole or has failed. Thread-safe.
  void FinishPending();
  void Run();

  const std::string socket_;
  const std::string worker_id_;
  const int rank_;
  const int size_;
  const Clock& clock_ = Clock::Real();

  // Used by the caller's thread and, while a save is pending, by the other thread.
  std::array<Slot, kOwnSlots> slots_;
  bool adopted_ = false;
  int good_ = -1;       // the slot of the last save that all ranks have; -1: none
  int current_ = -1;    // slot of the last save; -1: none since the last Save() failed or began
  int mirrored_ = -1;   // slot of the last save that is mirrored; -1: none
  int mirroring_ = -1;  // slot of the save that is being or was last mirrored; -1: none
  // The save whose mirror must stay.
  std::optional<MemorySaveId> kept_mirror_;
  MemorySaveId mirroring_save_;
  uint64_t sequence_ = 0;
  std::unique_ptr<MemoryMirror> mirror_;  // null: there is none
  std::set<std::string> workers_here_;    // the workers of this node
  bool tidies_ = false;                   // this rank drops what others have left here
  // Whether a save of this object is whole on all ranks, and whether one is mirrored.
  bool whole_ = false;
  bool has_mirrored_ = false;
  std::shared_ptr<DeferredCopy> last_deferred_;

  Mutex mu_;
  CondVar changed_;
  std::unique_ptr<Pending> pending_ ABSL_GUARDED_BY(mu_);  // the thread's work
  absl::Status status_ ABSL_GUARDED_BY(mu_);               // status of the last save
  // Not OK: there is no memory for saves that are mirrored.
  absl::Status no_mirror_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // declared last: it uses the members above
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MEMORY_TIER_H_
