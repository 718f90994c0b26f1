#ifndef MUSTER_WORKER_BIGMODEL_OFFLOAD_RING_H_
#define MUSTER_WORKER_BIGMODEL_OFFLOAD_RING_H_

#include <cstdint>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "base/clock.h"
#include "base/mutex.h"
#include "c10/core/Stream.h"
#include "worker/bigmodel/arena.h"
#include "worker/bigmodel/offload_stats.h"
#include "worker/bigmodel/stream_fences.h"
#include "worker/bigmodel/unit_order.h"
#include "worker/bigmodel/weight_readers.h"
#include "worker/bigmodel/weight_source.h"
#include "worker/parallel/paged_storage.h"

namespace muster {

// A tensor of a module whose values are elsewhere.
struct OffloadedTensor {
  std::string name;
  at::Tensor tensor;  // the module's; any memory that it has is given up
  std::shared_ptr<const WeightSource> source;
  size_t index = 0;  // in the source
  at::ScalarType type = at::kFloat;

  // Whether it can be used where its source has its file mapped: it has the type that is used.
  bool IsMapped() const {
    return source->Mapped(index).file != nullptr && source->type(index) == type;
  }
};

// Tensors that come and go together: a module, or a part of one. If they are mapped (all of them,
// in one file), they are used where they are, and take no memory of the ring: to come means that
// their pages are in the page cache. Only on the CPU.
struct OffloadedUnit {
  std::string name;
  std::vector<OffloadedTensor> tensors;
};

struct OffloadRingOptions {
  // Where operators run.
  at::Device device = at::kCPU;
  // Memory for units, on that device. At least that of the largest unit is used; if some units are
  // mapped, no more than that of all others. So much of mapped units is loaded ahead, too.
  uint64_t bytes = 0;
  int readers = 8;
  // Reads units ahead of their use.
  bool prefetch = true;
  // Of the device; null: StreamFences::Of(device).
  StreamFences* fences = nullptr;
  // For mapped units.
  const Clock* clock = &Clock::Real();
};

// Runs a model whose weights do not fit: a ring of memory holds the units that are in use and those
// that are expected next (unit_order.h), which threads read meanwhile. The module stays as it is:
// operators find the weights when they use them (paged_storage.h).
//
// Mapped units are there when the use of one begins, so that operators find no page missing that
// the file or the disk does not have, and each use looks whether the file was changed. What happens
// to the file during an operator is not found: a part that it loses ends the process (SIGBUS),
// other numbers in it are used.
//
// For inference: an operator that would need gradients of an offloaded tensor, or writes one,
// throws c10::Error. Weights that cannot be read throw StatusError that names file and tensor, at
// the operator that uses them; the next use tries again. So does what else fails on the way,
// a device or memory: no use waits for what does not come.
//
// Operators of several threads may run at a time; the ring foretells best if one does. Uses after
// the ring's end throw.
class OffloadRing {
 public:
  // Errors: RESOURCE_EXHAUSTED if the memory of the ring cannot be had.
  static absl::StatusOr<std::unique_ptr<OffloadRing>> Make(std::vector<OffloadedUnit> units,
                                                           const OffloadRingOptions& options);
  // Several, on one device each: all of them, or no tensor has changed.
  struct Plan {
    std::vector<OffloadedUnit> units;
    OffloadRingOptions options;
  };
  static absl::StatusOr<std::vector<std::unique_ptr<OffloadRing>>> MakeAll(std::vector<Plan> plans);
  ~OffloadRing();
  OffloadRing(const OffloadRing&) = delete;
  OffloadRing& operator=(const OffloadRing&) = delete;

  OffloadStats stats() const;
  // Waits until nothing is on its way, on a device too. For measurements and tests.
  void WaitUntilIdle();

 private:
  class Unit;
  enum class State { kAway, kComing, kHere };

  OffloadRing(const OffloadRingOptions& options, uint64_t bytes, size_t units);
  // All that can fail, before a tensor changes.
  absl::Status Prepare(size_t units);
  absl::Status AddUnits(std::vector<OffloadedUnit> units);

  void Use(Unit& unit);
  // Gets memory for a unit that is needed now, and has it read.
  void BringNow(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // In the ring, or besides it. Throws if there is none.
  void FindMemory(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The unit stays absent, and operators that wait for it get the error.
  void GiveUp(Unit& unit, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Prefetch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // The unit that is needed last of those that may go: further than `distance`.
  Unit* FindVictim(size_t distance) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Evict(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Free(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Orders later copies after the operators that the calling thread has queued, because they may
  // still use memory that the device's allocator hands out.
  void FollowQueuedOperators() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Has a unit read that has memory.
  void Start(Unit& unit, bool urgent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<WeightReaders::Task> TasksFor(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Of a mapped unit; none if all of it is in memory.
  std::vector<WeightReaders::Task> LoadingTasks(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void PieceIsDone(Unit& unit, const absl::Status& status, uint64_t bytes);

  const OffloadRingOptions options_;
  std::unique_ptr<StreamFences> own_fences_;
  StreamFences* const fences_;  // null on the CPU
  AlignedMemory memory_;        // on the CPU
  at::Tensor device_memory_;    // on others
  char* base_ = nullptr;
  std::vector<std::unique_ptr<Unit>> units_;

  mutable Mutex mu_;
  CondVar changed_;
  Arena arena_ ABSL_GUARDED_BY(mu_);
  UnitOrder order_ ABSL_GUARDED_BY(mu_);
  // Of each unit: how many others are expected before it.
  std::vector<size_t> distances_ ABSL_GUARDED_BY(mu_);
  std::vector<size_t> coming_ ABSL_GUARDED_BY(mu_);
  Unit* current_ ABSL_GUARDED_BY(mu_) = nullptr;
  // Behind the last operators that used memory which is free for copies, by stream.
  std::map<c10::StreamId, StreamFences::Fence> pending_ ABSL_GUARDED_BY(mu_);
  OffloadStats stats_ ABSL_GUARDED_BY(mu_);
  uint64_t overflow_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<WeightReaders> readers_;  // last: its threads use the rest
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_OFFLOAD_RING_H_
