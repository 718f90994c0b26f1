#ifndef MUSTER_WORKER_CHECKPOINT_MEMORY_MIRROR_H_
#define MUSTER_WORKER_CHECKPOINT_MEMORY_MIRROR_H_

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/held_memory.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/memory_record.h"
#include "worker/collective/comm.h"
#include "worker/collective/peer_watch.h"

namespace muster {

// The ranks with which a rank exchanges its part of a save.
struct MirrorPeers {
  int to = 0;             // holds a copy of this rank's part
  std::vector<int> from;  // this rank holds copies of their parts
};

// Plans a ring over the nodes, in the order of their first ranks: the i-th rank of a node sends to
// the i-th rank of the next node, modulo their number. `nodes`: the node of each rank. Errors, the
// same for every rank: FAILED_PRECONDITION if there is only one node, or some rank would hold too
// many copies.
absl::StatusOr<MirrorPeers> PlanMirror(const std::vector<std::string>& nodes, int rank);

// Copies this rank's part of saves in memory to a rank of another node, whose agent holds it, and
// receives the parts of others, all beside training: in pieces of 8 MiB, one under way in each
// direction, from and to the memory that the agents hold.
//
// A copy counts once its files have their digests: its header is written last. There are two pieces
// of memory for each rank whose parts come here; a copy goes to the one that does not contain the
// save to be kept.
//
// One object on every rank, whose Begin() and Offer() are called for the same saves in the same
// order everywhere, and by one thread at a time.
class MemoryMirror {
 public:
  // The first slot of the mirror among this rank's pieces of memory; those before hold its own
  // saves.
  static constexpr int kFirstSlot = 4;
  static constexpr int kMostSources = (kHeldSlots - kFirstSlot) / 2;

  struct State {
    bool busy = false;
    // The result of the last copies that have ended: OK if this rank has sent its part and has
    // whole copies of the parts of others. RESOURCE_EXHAUSTED or UNAVAILABLE: no later copy can
    // succeed, because there is no memory or a peer is lost.
    absl::Status status;
  };

  // `comm`: the same ranks, for this object alone; it has a process group. `before_piece`, if not
  // null, is called before each exchange of pieces (tests). Throws if no thread can be started; the
  // other ranks do not learn of that.
  MemoryMirror(std::unique_ptr<Comm> comm, MirrorPeers peers, std::string socket,
               std::string worker_id, std::function<void()> before_piece = nullptr);
  // Abandons copies that are under way.
  ~MemoryMirror();
  MemoryMirror(const MemoryMirror&) = delete;
  MemoryMirror& operator=(const MemoryMirror&) = delete;

  // Takes over memory of this worker that an earlier attempt has filled. Must be called before the
  // first Begin().
  absl::Status Adopt(HeldMemory piece);

  // Begins to copy the next save, which is not `keep`. Must not be called while busy; the mirror is
  // busy from here on.
  void Begin(const MemorySaveId& save, const std::optional<MemorySaveId>& keep);
  // Provides this rank's part of the save, complete in memory that does not change until the copies
  // have ended, or the reason why there is none.
  void Offer(absl::StatusOr<absl::string_view> part);

  State state() const;
  // Waits until the mirror is not busy. May be called only after Offer().
  absl::Status Wait() const;

 private:
  struct Task {
    MemorySaveId save;
    std::optional<MemorySaveId> keep;
    std::optional<absl::StatusOr<absl::string_view>> part;
  };
  struct Held {
    OwnedFd fd;
    AlignedMemory memory;
  };
  // The part that comes from one rank.
  struct Incoming {
    int from = 0;
    uint64_t bytes = 0;  // size of the memory for its part; 0: none comes
    AlignedMemory* memory = nullptr;
    std::string header;
    absl::Status status;
  };

  // The memory that is sent from and received into.
  struct Buffers;

  void Run();
  absl::Status Copy(const Task& task);
  // Sends this rank's part of a save and receives others. Throws if a peer is lost.
  absl::Status Exchange(const Task& task, Buffers* buffers);
  // The steps of Exchange().
  void Announce(const Task& task, Buffers* buffers);
  // Whether the peer takes this rank's part.
  bool AgreeOnRoom(const Task& task, Buffers* buffers);
  void MovePieces(absl::string_view part, std::vector<Incoming>* incoming);
  absl::Status Complete(const Task& task, const Incoming& incoming) const;
  // Returns memory for a part of `bytes` bytes of the `source`-th rank whose parts come here.
  absl::StatusOr<AlignedMemory*> MakeRoom(size_t source, uint64_t bytes,
                                          const std::optional<MemorySaveId>& keep);

  // Send to and receive from the other ranks. The bytes are borrowed until Finish().
  void Send(const void* bytes, size_t size, int to, int tag);
  void Receive(void* bytes, size_t size, int from, int tag);
  template <class Start>
  void Post(int peer, const void* bytes, size_t size, Start start);
  void Finish();
  void CheckGoesOn();

  const MirrorPeers peers_;
  const int size_;
  const std::string socket_;
  const std::string worker_id_;
  const std::function<void()> before_piece_;
  // Used by the thread while it is busy.
  std::array<Held, kHeldSlots> held_;  // by slot
  // declared after held_, into which it receives; null: a peer was lost
  std::unique_ptr<Comm> comm_;
  PeerWatch watch_;
  std::vector<PeerWatch::Message> posted_;

  mutable Mutex mu_;
  mutable CondVar changed_;
  std::optional<Task> task_ ABSL_GUARDED_BY(mu_);
  absl::Status status_ ABSL_GUARDED_BY(mu_);
  bool stop_ ABSL_GUARDED_BY(mu_) = false;
  std::thread thread_;  // last: it uses the rest
};

}  // namespace muster

#endif  // MUSTER_WORKER_CHECKPOINT_MEMORY_MIRROR_H_
