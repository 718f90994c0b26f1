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

// Checkpoints in memory that outlives the processes of the job: the node's agent holds it, and the
// next attempt reads it. They survive the end of processes. They survive the loss of a node, with
// its agent, if they are mirrored: each rank's part is copied to a rank of another node.
//
// A save goes to a piece of memory that holds neither the last save that all ranks have whole, nor
// the last one that is mirrored, nor the one that is being mirrored. These are one or two pieces
// while mirrors are finished before the next save, and four at most. A save counts if the part of
// every rank is whole on some node.
//
// One object on every rank, whose calls are made in the same order everywhere by one thread.
class MemoryTier {
 public:
  struct MirrorOptions {
    // Collective. A Comm of the same ranks with a process group, for a thread alone. Called if the
    // ranks are on several nodes. Null: saves are not mirrored.
    std::function<absl::StatusOr<std::unique_ptr<Comm>>()> connect = nullptr;
    // See MemoryMirror.
    std::function<void()> before_piece = nullptr;
  };
  // Collective. Nothing is reserved before the first save. `socket` and `worker_id` as the agent
  // gave them. Errors, the same on every rank: FAILED_PRECONDITION some rank has no agent, or
  // another object of its process for this worker; those of TakeHeldMemory.
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

  // Collective. Copies the files that `write` puts; what that gives to CopyLater() is copied after
  // the return if `lazy`, see WaitForCopy(). The files are digested by a thread. Returns the same
  // on every rank, with the rank that failed: what `write` returns or throws; RESOURCE_EXHAUSTED:
  // there is no memory for this save, nor for others; UNAVAILABLE: the agent of a rank did not
  // answer, or it had no memory beyond that of saves that are not mirrored; later saves may
  // succeed. `earlier` gets, also the same everywhere, how the save before this one ended after its
  // return: that a tensor was changed before it was copied, ... The save is mirrored if the mirror
  // of an earlier one is not under way.
  absl::Status Save(Comm& comm, const CheckpointInfo& info, int64_t since_disk, bool lazy,
                    absl::FunctionRef<absl::Status(StateWriter&)> write, absl::Status* earlier);

  // As AsyncSaver::WaitForCopy.
  void WaitForCopy();

  // Waits until the last save is whole here. How it went; for this rank alone.
  absl::Status Wait();
  // Collective. The same for all ranks; the next save has nothing more to say of an error.
  absl::Status Settle(Comm& comm);
  // Waits until the last save is mirrored here, if it is to be. How the last mirror went: this
  // rank's part of it. OK if none was made.
  absl::Status WaitForMirror();

  struct Found {
    StateReader reader;
    int64_t since_disk = 0;
    MemorySaveId save;
    // The newest save of which two nodes have the part of every rank; else the one that is found.
    MemorySaveId mirrored;
    bool own_part_is_here = true;  // on this node, undamaged
    uint64_t copied_bytes = 0;     // from other nodes, into memory that this rank has made
  };
  struct FindOptions {
    // A new file in memory for the parts of other nodes. Null: CreateHoldableMemory.
    std::function<absl::StatusOr<OwnedFd>(const std::string& name)> create = nullptr;
    // The same on every rank. Saves of earlier steps are not looked for.
    int64_t from_step = -1;
  };
  // Collective. The newest save that all ranks have and whose files have their digests; nothing if
  // there is none, or a node has no memory for the parts of others, which it would not have at the
  // next start either. Errors, the same on every rank, where that is not known or cannot be read
  // now: an agent that does not answer (UNAVAILABLE), ... No older save is taken then. A part that
  // is damaged on one node is taken from another that mirrors it. What a node lacks comes from the
  // others: one copy, which the ranks of the node share if they can open each other's files under
  // /proc. The reader is valid until the next save.
  absl::StatusOr<std::optional<Found>> Find(Comm& comm, const FindOptions& options);
  absl::StatusOr<std::optional<Found>> Find(Comm& comm) { return Find(comm, FindOptions()); }
  // Training continues from it: it is not overwritten before a later save is whole, nor its mirror
  // before a later one is mirrored.
  void Keep(const Found& found);
  // Collective. Training continues from elsewhere, so nothing in memory counts any more. Errors,
  // the same on every rank: an agent that does not answer (UNAVAILABLE), and others; then
  // everything in memory still counts.
  absl::Status Forget(Comm& comm);

 private:
  // This rank's files of a save that this node has.
  struct Piece {
    std::string place;  // the worker and its slot
    std::shared_ptr<AlignedMemory> memory;
    MemoryRecord record;
  };
  class Search;
  // What the ranks exchange at the beginning of a save, before they agree on its copy.
  struct Word;
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
    bool mirrored = false;    // it is to be
    bool completing = false;  // some thread writes its record
  };
  // This rank's own pieces of memory: those of a mirror follow.
  static constexpr int kOwnSlots = MemoryMirror::kFirstSlot;
  // As many suffice without a mirror.
  static constexpr int kPlainSlots = 2;

  MemoryTier(const Comm& comm, std::string socket, std::string worker_id);
  // Takes over this worker's memory of earlier attempts.
  absl::Status Adopt();
  // Collective. Learns where the ranks are. Without several nodes or connections between them there
  // is no mirror.
  void OpenMirror(Comm& comm, const MirrorOptions& options);
  // Of workers that ran on this node in earlier attempts: once later saves have replaced theirs.
  void DropWhatOthersLeft();
  // What all ranks have said of their mirrors.
  void LearnOfMirror(bool busy, const absl::Status& status);
  // Of this rank.
  void ReturnMirrorsMemory();
  // Where the next save goes.
  int FreeSlot() const;
  // Makes the slot ready for the files of a save.
  absl::Status Prepare(int slot);
  // How a save ends that the memory was too small for.
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
  int current_ = -1;    // that of the last save; -1: none since the last Save() failed or began
  int mirrored_ = -1;   // that of the last save that is mirrored; -1: none
  int mirroring_ = -1;  // that of the save that is being mirrored, or was; -1: none
  // The save whose mirror stays.
  std::optional<MemorySaveId> kept_mirror_;
  MemorySaveId mirroring_save_;
  uint64_t sequence_ = 0;
  std::unique_ptr<MemoryMirror> mirror_;  // null: there is none
  std::set<std::string> workers_here_;    // of this node
  bool tidies_ = false;                   // this rank drops what others have left here
  // A save of this object is whole on all ranks, or mirrored.
  bool whole_ = false;
  bool has_mirrored_ = false;
  std::shared_ptr<DeferredCopy> last_deferred_;

  Mutex mu_;
  CondVar changed_;
  std::unique_ptr<Pending> pending_ ABSL_GUARDED_BY(mu_);  // the thread's work
  absl::Status status_ ABSL_GUARDED_BY(mu_);               // of the last save
  // There is no memory for saves that are mirrored.
  absl::Status no_mirror_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MEMORY_TIER_H_
