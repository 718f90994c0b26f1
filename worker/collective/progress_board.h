#ifndef MUSTER_WORKER_COLLECTIVE_PROGRESS_BOARD_H_
#define MUSTER_WORKER_COLLECTIVE_PROGRESS_BOARD_H_

#include <atomic>
#include <cstdint>
#include <string>

#include "absl/time/time.h"

namespace muster {

// The progress of a worker: its training thread writes it, at a nanosecond or two per write; the
// heartbeat thread reads it, even while the training thread hangs. So the coordinator can report
// what a missing rank was doing.
//
// Thread-safe for one writer. Values read together may be from different moments: they are for
// reports. Names must be literals: they are kept as pointers.
class ProgressBoard {
 public:
  struct Facts {
    int64_t step = 0;
    std::string phase = "";
    // "AllReduce #41 (1,024 Float)", or "AllReduce #41 bucket 2 of 5 (1,024 Float)", with ", done"
    // once it has ended. In the phase "entering save_state" with the call that all processes have
    // to make: "AllGatherBytes #8 (86 bytes) of save_state()". Empty: none yet.
    std::string last_collective = "";
    // By Clock::Real().Now(); InfinitePast: not yet.
    absl::Time restored = absl::InfinitePast();    // the state was loaded, for the first time
    absl::Time first_step = absl::InfinitePast();  // a step was finished
    // Changes with each call of a setter except SetRestored, even if what is shown stays the same:
    // a phase that was left and entered again between two reads is progress. At least 1.
    uint64_t progress = 1;
  };

  void SetStep(int64_t step) {
    if (step > 0 && first_step_.load(std::memory_order_relaxed) == 0) NoteNow(&first_step_);
    step_.store(step, std::memory_order_relaxed);
    Progress();
  }
  void SetRestored() {
    if (restored_.load(std::memory_order_relaxed) == 0) NoteNow(&restored_);
  }
  void SetPhase(const char* phase) {
    phase_.store(phase, std::memory_order_relaxed);
    Progress();
  }
  // `elements` of type `dtype` on this rank.
  void BeginCollective(const char* name, int64_t elements, const char* dtype) {
    name_.store(name, std::memory_order_relaxed);
    buckets_.store(0, std::memory_order_relaxed);
    elements_.store(elements, std::memory_order_relaxed);
    dtype_.store(dtype, std::memory_order_relaxed);
    Increment(&count_);
    going_on_.store(true, std::memory_order_relaxed);
    Progress();
  }
  // Within a collective that processes its tensors in buckets: the current one, from 1.
  void SetBucket(int bucket, int buckets, int64_t elements, const char* dtype) {
    bucket_.store(bucket, std::memory_order_relaxed);
    buckets_.store(buckets, std::memory_order_relaxed);
    elements_.store(elements, std::memory_order_relaxed);
    dtype_.store(dtype, std::memory_order_relaxed);
    Progress();
  }
  void EndCollective() {
    going_on_.store(false, std::memory_order_relaxed);
    Progress();
  }

  Facts Read() const;

 private:
  static void NoteNow(std::atomic<int64_t>* time);
  // One writer: no read-modify-write needed.
  static void Increment(std::atomic<uint64_t>* count) {
    count->store(count->load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  }
  void Progress() { Increment(&progress_); }

  std::atomic<int64_t> step_{0};
  std::atomic<int64_t> restored_{0}, first_step_{0};  // Unix nanoseconds; 0: not yet
  std::atomic<const char*> phase_{""};
  std::atomic<const char*> name_{nullptr};
  std::atomic<const char*> dtype_{""};
  std::atomic<int64_t> elements_{0};
  std::atomic<int> bucket_{0};
  std::atomic<int> buckets_{0};     // 0: the collective has none
  std::atomic<uint64_t> count_{0};  // of collectives
  std::atomic<uint64_t> progress_{1};
  std::atomic<bool> going_on_{false};
};

// Shows a collective for as long as it lives.
class CollectiveOnBoard {
 public:
  CollectiveOnBoard(ProgressBoard& board, const char* name, int64_t elements, const char* dtype)
      : board_(board) {
    board_.BeginCollective(name, elements, dtype);
  }
  ~CollectiveOnBoard() { board_.EndCollective(); }
  CollectiveOnBoard(const CollectiveOnBoard&) = delete;
  CollectiveOnBoard& operator=(const CollectiveOnBoard&) = delete;

 private:
  ProgressBoard& board_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_PROGRESS_BOARD_H_
