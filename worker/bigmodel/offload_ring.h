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

// A tensor of a module whose values are stored elsewhere.
struct OffloadedTensor {
  std::string name;
  at::Tensor tensor;  // the module's tensor; its memory, if any, is given up
  std::shared_ptr<const WeightSource> source;
  size_t index = 0;  // in the source
  at::ScalarType type = at::kFloat;

  // Whether it can be used where its source has mapped its file: its type there is the one that is
  // used.
  bool IsMapped() const {
    return source->Mapped(index).file != nullptr && source->type(index) == type;
  }
};

// Tensors that are loaded and evicted together: a module, or a part of one. If they are mapped (all
// of them, in one file), they are used in place, and take no memory of the ring: loading them means
// that their pages are in the page cache. Mapped units are only on the CPU.
struct OffloadedUnit {
  std::string name;
  std::vector<OffloadedTensor> tensors;
};

struct OffloadRingOptions {
  // The device on which operators run.
  at::Device device = at::kCPU;
  // Memory for units, on that device. At least that of the largest unit is used; if some units are
  // mapped, no more than that of all others. The same amount of mapped units is loaded ahead, too.
  uint64_t bytes = 0;
  int readers = 8;
  // Reads units ahead of their use.
  bool prefetch = true;
  // The fences of the device; null: StreamFences::Of(device).
  StreamFences* fences = nullptr;
  // For mapped units.
  const Clock* clock = &Clock::Real();
};

// Runs a model whose weights do not fit into memory: a ring of memory holds the units that are in
// use and those that are expected next (unit_order.h), which threads read meanwhile. The module
// stays unchanged: operators find the weights when they use them (paged_storage.h).
//
// Mapped units are in memory when a use begins, so that operators find no page missing that the
// file or the disk does not have, and each use checks whether the file was changed. Changes of the
// file during an operator are not detected: if a part is truncated, the process ends (SIGBUS);
// other values in it are used.
//
// For inference: an operator that would need gradients of an offloaded tensor, or writes one,
// throws c10::Error. Weights that cannot be read throw StatusError that names file and tensor, at
// the operator that uses them; the next use tries again. The same holds for other failures, of a
// device or of memory: no use waits forever.
//
// Operators of several threads may run at a time; the ring predicts best if only one thread runs
// them. Uses after the ring's end throw.
class OffloadRing {
 public:
  // Errors: RESOURCE_EXHAUSTED if there is no memory for the ring.
  static absl::StatusOr<std::unique_ptr<OffloadRing>> Make(std::vector<OffloadedUnit> units,
                                                           const OffloadRingOptions& options);
  // Makes several rings, each on one device: either all of them, or no tensor has changed.
  struct Plan {
    std::vector<OffloadedUnit> units;
    OffloadRingOptions options;
  };
  static absl::StatusOr<std::vector<std::unique_ptr<OffloadRing>>> MakeAll(std::vector<Plan> plans);
  ~OffloadRing();
  OffloadRing(const OffloadRing&) = delete;
  OffloadRing& operator=(const OffloadRing&) = delete;

  OffloadStats stats() const;
  // Waits until no transfer is under way, including those of a device. For measurements and tests.
  void WaitUntilIdle();

 private:
  class Unit;
  enum class State { kAway, kComing, kHere };

  OffloadRing(const OffloadRingOptions& options, uint64_t bytes, size_t units);
  // Does everything that can fail, before a tensor changes.
  absl::Status Prepare(size_t units);
  absl::Status AddUnits(std::vector<OffloadedUnit> units);

  void Use(Unit& unit);
  // Gets memory for a unit that is needed now, and starts to read it.
  void BringNow(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Finds memory for the unit in the ring, or beside it. Throws if there is none.
  void FindMemory(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Leaves the unit absent; operators that wait for it get the error.
  void GiveUp(Unit& unit, const absl::Status& status) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Prefetch() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns the unit, among those that may be evicted, that is needed last: further than
  // `distance`.
  Unit* FindVictim(size_t distance) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Evict(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  void Free(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Orders later copies after the operators that the calling thread has queued, because they may
  // still use memory that the device's allocator hands out.
  void FollowQueuedOperators() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Starts to read a unit that has memory.
  void Start(Unit& unit, bool urgent) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  std::vector<WeightReaders::Task> TasksFor(Unit& unit) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mu_);
  // Returns the tasks that load a mapped unit; none if all of it is in memory.
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
  // For each unit, how many others are expected before it.
  std::vector<size_t> distances_ ABSL_GUARDED_BY(mu_);
  std::vector<size_t> coming_ ABSL_GUARDED_BY(mu_);
  Unit* current_ ABSL_GUARDED_BY(mu_) = nullptr;
  // Fences after the last operators that used memory which is free for copies, by stream.
  std::map<c10::StreamId, StreamFences::Fence> pending_ ABSL_GUARDED_BY(mu_);
  OffloadStats stats_ ABSL_GUARDED_BY(mu_);
  uint64_t overflow_ ABSL_GUARDED_BY(mu_) = 0;
  std::optional<WeightReaders> readers_;  // declared last: its threads use the members above
};

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_OFFLOAD_RING_H_
