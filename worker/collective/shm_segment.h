#ifndef MUSTER_WORKER_COLLECTIVE_SHM_SEGMENT_H_
#define MUSTER_WORKER_COLLECTIVE_SHM_SEGMENT_H_

#include <atomic>
#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "c10/util/intrusive_ptr.h"
#include "torch/csrc/distributed/c10d/Store.hpp"
#include "worker/collective/shm_pool.h"

namespace muster {

// Processes with the same text can open each other's files under /proc. Empty: unknown.
std::string HostIdentity();

// A rank's call in one step; all ranks compare it before they use any data.
struct ShmCall {
  uint64_t sequence = 0;
  int64_t bytes = 0;
  int32_t root = 0;
  uint8_t operation = 0;
  uint8_t dtype = 0;
  uint8_t reduction = 0;
  bool operator==(const ShmCall& other) const = default;
};

// Memory that the ranks of one host share, and their steps through it.
//
//   header | cells: one per rank | slots: kBuffers per rank | results: kBuffers
//
// The ranks move in steps, with the same count on all. In a step each rank writes its slot and its
// call, arrives, waits for all others, and then reads. A second arrival in the same step is
// possible (to read the others' results). Buffers alternate: a rank that writes in step s + 2 has
// seen all ranks arrive in step s + 1, so they have finished reading in step s.
//
// The memory has no name (memfd): nothing is left behind however the processes end. Waiting spins
// briefly, then sleeps on a futex. A pidfd reveals a rank that died, a flag one that left. A rank
// that waits for it throws c10::DistBackendError and marks the segment broken, so that all ranks
// leave. One thread per rank at a time.
//
// Data in the ranks' pools need no slots: each rank publishes their place in its call.
class ShmSegment {
 public:
  static constexpr int64_t kSlotBytes = 512 << 10;
  static constexpr int kBuffers = 2;

  // Collective over `store`. Returns null, on every rank alike and with the reason in `*why`, if
  // the ranks cannot share memory: other hosts, other pid namespaces, no permission. Throws like
  // the store. `pool`: this rank's; null: it has none. names[r]: the name of rank r in messages;
  // empty: r.
  static std::unique_ptr<ShmSegment> Open(const c10::intrusive_ptr<c10d::Store>& store, int rank,
                                          int size, const ShmPool* pool, std::string* why,
                                          std::vector<int> names = {});
  ~ShmSegment();
  ShmSegment(const ShmSegment&) = delete;
  ShmSegment& operator=(const ShmSegment&) = delete;

  // Begins a step: publishes this rank's call and, if its data are in its pool, their place.
  void Begin(const ShmCall& call, const ShmPlace& place = {});
  // This rank's slot and rank r's, in the current step; kSlotBytes each.
  char* slot() { return slot(rank_); }
  char* slot(int r);
  // An additional buffer of the step; each rank writes its own part by agreement.
  char* result();
  // Arrives and waits for all others until `deadline`. `what` is for messages.
  void Meet(std::chrono::steady_clock::time_point deadline, const std::string& what);
  // The call of rank r in the current step, after the first Meet.
  const ShmCall& call(int r) const;
  // After the first Meet: place() is the place of rank r's data, if they are in its pool, and At()
  // their address here (of another rank). Throws and breaks the segment if they cannot be mapped.
  const ShmPlace& place(int r) const;
  char* At(int r);
  // Whether this rank has a pool and can access those of all others.
  bool reaches_pools() const { return reaches_pools_; }
  // Whether that is true of all ranks, as far as they have reported: once true, it stays true.
  bool all_reach_pools();

  // Makes all current and future waits fail with an error.
  void Break(const std::string& why);
  int rank() const { return rank_; }
  int size() const { return size_; }

 private:
  struct Header;
  struct Cell;
  ShmSegment(int rank, int size, std::vector<int> names)
      : rank_(rank), size_(size), names_(std::move(names)) {}

  bool Map(int fd, size_t bytes);
  void OpenPools();
  Cell& cell(int r) const;
  int NameOf(int r) const { return names_.empty() ? r : names_[r]; }
  void WaitFor(int peer, uint32_t phase, std::chrono::steady_clock::time_point deadline,
               const std::string& what);
  void ThrowIfBroken(const std::string& what) const;
  [[noreturn]] void Fail(const std::string& why);

  const int rank_;
  const int size_;
  const std::vector<int> names_;
  char* base_ = nullptr;
  size_t bytes_ = 0;
  size_t data_offset_ = 0;
  std::vector<int> pidfds_;  // of the others; -1: none
  std::vector<std::unique_ptr<ShmPeerPool>> peers_;
  bool reaches_pools_ = false;
  bool all_reach_pools_ = false;
  uint64_t step_ = 0;
  uint32_t phase_ = 0;
  int spins_ = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_COLLECTIVE_SHM_SEGMENT_H_
