#ifndef MUSTER_WORKER_PARALLEL_SHARD_UNIT_H_
#define MUSTER_WORKER_PARALLEL_SHARD_UNIT_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"
#include "worker/collective/comm_queue.h"
#include "worker/collective/shared_parts.h"
#include "worker/parallel/paged_storage.h"
#include "worker/parallel/part_store.h"
#include "worker/parallel/stored_page.h"

namespace muster {

class ShardUnit;

// A parameter of the model, by its name in the module.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

// The place of a unit's shards, or of their gradients, while nothing uses them: `place` has
// PartBytes() bytes. The objects behind the pointers are borrowed, and outlive the unit.
struct StoredPart {
  PartStore* store = nullptr;  // null: in memory
  uint64_t place = 0;
  StoredPages* among = nullptr;
};
struct StoredUnit {
  StoredPart shards, gradients;
};

// Parameters that are gathered and freed together, all of one dtype and device. They lie one after
// the other in a flat buffer of comm.size() equal parts, and stay views of it; part r belongs to
// rank r, which keeps its values permanently (`shards`), and the others get them by Gather().
//
//   flat      [ part 0 | part 1 | ... ]      freed and allocated again, if `frees`
//   tensors   [ weight   | bias | norm  ]    cut by the borders of parts
//   shards    of rank 1:   [ei|bias|n]       leaf tensors, 1-D, what the optimizer updates
//
// If the ranks share memory, shards of large units lie in it, and the others read them there
// instead of receiving them. A full buffer that would be freed, and has the same dtype, then needs
// no memory at all: it is a view of the shards of all ranks (in_place()). See docs/decisions/0056.
//
// If the shards have a PartStore, they are in a file, or a device's in the host's memory, while
// nothing uses them: an operator that takes one brings the whole unit into memory (a StoredPage),
// where it stays until FreePart(). The same holds for gradients that have a PartStore, with a page
// of their own, from the end of a reduction until no tensor has them any more.
//
// Not thread-safe.
class ShardUnit : public Page {
 public:
  // `use(write, op)` decides whether an operator may use the parameters, and gathers them. `comm`:
  // the ranks that divide the unit; borrowed. Takes over the values of `parameters`, which must be
  // equal on all ranks. `frees`: Free() frees the full buffer; otherwise it stays, and the shards
  // are a part of it, if they have its dtype. `gathered_as`: the dtype of the full buffer, for fp32
  // parameters; `reduced_as`: that of the reduction of gradients. Absent: that of the parameters.
  // `stored`: its shards are used only if `frees`. `reshard`: some of the ranks of `comm`, for
  // FreeUntilBackward(); borrowed.
  ShardUnit(std::string name, std::vector<NamedParameter> parameters, Comm& comm, bool frees,
            std::optional<at::ScalarType> gathered_as, std::optional<at::ScalarType> reduced_as,
            std::function<void(ShardUnit&, bool write, const char* op)> use, StoredUnit stored = {},
            Comm* reshard = nullptr);
  // The bytes of the part of each of `ranks` ranks.
  static uint64_t PartBytes(const std::vector<NamedParameter>& parameters, int ranks);
  ShardUnit(const ShardUnit&) = delete;
  ShardUnit& operator=(const ShardUnit&) = delete;

  void Require(bool write, const char* op) override { use_(*this, write, op); }
  void Allow(const at::Tensor& tensor, bool /*write*/, const char* op) override {
    if (any_updated_) CheckNotUpdated(tensor, op);
  }
  // The queue for gathers and reductions beside the computation, in the queue's memory; it must
  // suit the parameters' device. Borrowed; null: none. Set it before the first gather.
  void set_queue(CommQueue* queue) { queue_ = queue; }
  // Whether any slice is `updated`: then an operator that takes such a parameter throws.
  void set_any_updated(bool any) { any_updated_ = any; }

  // A parameter in the unit. `shard`: this rank's part, elements [begin, begin + numel) in the
  // order of memory; 1-D, maybe empty; a leaf.
  struct Slice {
    std::string name;
    at::Tensor tensor;  // the module's: paged
    std::vector<int64_t> sizes, strides;
    int64_t offset;  // in elements of the flat buffer
    at::Tensor shard;
    int64_t begin = 0;
    // The gradients of micro-steps that were not reduced, in the dtype of the reduction.
    at::Tensor pending;
    // Since the last Forget(). used: this rank had a gradient. fresh: the shard had none before.
    bool used = false, fresh = false;
    // Whether `.grad` was set to GradientMark(), which the program may have zeroed since.
    bool marked = false;
    // In this backward pass. came: this rank had a gradient. updated: it was reduced and goes to
    // the object that updates the shard (shard_updates.h). late: it came after the unit was
    // reduced.
    bool came = false, updated = false, late = false;
  };
  const std::string& name() const { return name_; }
  const std::vector<Slice>& slices() const { return slices_; }
  std::vector<Slice>& slices() { return slices_; }
  int64_t full_bytes() const;  // of the flat buffer
  // Whether the unit takes memory only while it is gathered.
  bool frees() const { return frees_ && !in_place_; }
  // Whether the full values are a view of the shards of all ranks.
  bool in_place() const { return in_place_; }
  // Whether all ranks of the model have the whole unit, not a part of it.
  bool whole() const { return whole_; }
  void set_whole() { whole_ = true; }

  // Writes the shards to the store if they have changed, and frees their memory. Does nothing if an
  // operator uses them or they have no store. Thread-safe.
  void FreePart();
  // Whether the shards are in memory.
  bool part_is_present() const;
  // Whether gradients of shards that may be in the store are in memory.
  bool gradients_are_present() const;
  // Drops the page of gradients if no tensor has them any more.
  void ForgetUnusedGradients();
  // Call it when an operator has written the full values.
  void NoteWrite() { written_ = true; }

  // Whether the full values are present and equal to the shards.
  bool gathered() const { return gathered_; }
  // Whether a gather is under way.
  bool coming() const { return coming_ != nullptr; }
  bool present() const { return gathered_ || coming(); }
  // (collective) Gathers the full values, into this rank's own memory, or waits for the gather
  // under way.
  void Gather();
  // Makes the full values of a unit in place present. Not a collective: all ranks must have their
  // shards ready (AwaitShards), and change none while others use the values.
  void Attach();
  // (collective) Returns when the shards of all ranks have the values that this rank is to see.
  void AwaitShards();
  // (collective) Begins the gather on the queue, unless the values are present. Its memory is
  // allocated when the queue comes to it, after the previous collective has freed its own.
  void StartGather();
  // An operator is about to use the full values, which are present, on the current stream.
  void NoteUse();
  // Waits for the gather under way. If it fails, the next user of the queue gets the error.
  void Settle();
  // Frees the full buffer, if `frees`; waits for the gather under way.
  void Free();
  // The same if the backward pass gathers it again: the ranks of `reshard`, if any, keep a copy
  // divided among them, which Gather() uses until Free() or Expire().
  void FreeUntilBackward();
  int64_t kept_bytes() const { return kept_.defined() ? static_cast<int64_t>(kept_.nbytes()) : 0; }
  // Call it when the shards have changed: the gathered values are no longer valid.
  void Expire();
  // (collective) Returns copies of the full parameters, in their own dtype.
  std::vector<at::Tensor> Values();
  // (collective) The same for the slices with wanted[i], which must be the same on every rank: the
  // others are undefined, and their values are not exchanged.
  std::vector<at::Tensor> Values(const std::vector<bool>& wanted);
  // Copies this rank's part of the gathered values, which were written, to the shards.
  void KeepOwnPart();

  // The `.grad` of parameters while their gradients are elsewhere: using it throws, and zeroing it
  // is noticed.
  static const at::Tensor& GradientMark();
  // The `.grad` of a shard once an optimizer has used its gradient in the backward pass: using it
  // throws until the program zeroes it.
  static const at::Tensor& UsedGradientMark();
  // A backward pass is about to add to `.grad` of slice `index`. Throws if the program has zeroed
  // the module, and with it gradients of earlier micro-steps.
  void GradientArrives(size_t index);
  // The gradient has arrived: a micro-step that is not reduced moves it to `pending`.
  void KeepPending(size_t index);
  // (collective) Takes pending gradients and `.grad` from the parameters, and sums them over the
  // ranks, multiplied by `factor`: on the queue or, if there is none, now. A parameter without a
  // gradient counts as zeros. `replicas`: the ranks that hold the same shard of other copies; null:
  // there is one copy. One reduction of a unit at a time. `buffer`: gradient_bytes() bytes that
  // nothing else uses until the reduction has finished; undefined: allocates memory.
  void StartReduction(double factor, Comm* replicas, const at::Tensor& buffer = {});
  int64_t gradient_bytes() const;
  // Waits for the reduction. Returns this rank's part of the sums, for AddGradients(); undefined:
  // there was no reduction.
  at::Tensor FinishReduction();
  // Adds the sums to `.grad` of the shards. `in_memory`: new gradients stay out of the store, since
  // they are used at once.
  void AddGradients(at::Tensor mine, bool in_memory = false);
  // Finishes the reduction after a pass that has thrown: the next user of the queue gets the error.
  void SettleReduction();
  // Waits for the reduction and drops the result.
  void AbandonReduction();
  // Whether a slice has a gradient that was not reduced.
  static bool HasPending(const Slice& slice);

  // (collective) Assembles full tensors from 1-D tensors like `.grad`, one for each slice and as
  // long as its shard. An undefined one counts as zeros.
  std::vector<at::Tensor> Assemble(const std::vector<at::Tensor>& parts, at::ScalarType dtype);
  // Returns this rank's part of a full tensor of slice `index`, in the order of memory: a view, if
  // `full` has that order.
  at::Tensor PartOf(size_t index, const at::Tensor& full) const;
  // The elements of a contiguous full tensor that PartOf() reads: first and past the last.
  std::pair<int64_t, int64_t> PartRange(size_t index) const;
  // Overwrites the shards with the values of the full tensors that are defined.
  void SetValues(const std::vector<at::Tensor>& full);

  // For the model's bookkeeping: the unit's number, and when it was used last.
  uint32_t index = 0;
  uint64_t last_use = 0;
  // Whether some rank has had a gradient for a slice, in a pass that reduced: an optimizer may
  // change it. The same on every rank.
  bool trained = false;
  // Whether an optimizer that Muster knows has a shard: the program may write it through that at
  // any time. The same on every rank.
  bool held = false;
  // ShardedModel::Writes() and the versions of the shards before the first gather of the values
  // that are gathered. Absent: nothing was gathered since they changed.
  std::optional<uint64_t> writes;
  std::vector<int64_t> versions;

 private:
  struct Coming {
    CommQueue::Ticket ticket;
    at::Tensor full;  // the gathered values, if `frees`
  };
  struct Reduction {
    CommQueue::Ticket ticket;  // null without a queue
    at::Tensor full, mine;     // the values to reduce, and this rank's part of the result
  };

  void CheckNotUpdated(const at::Tensor& tensor, const char* op) const;
  at::Tensor View(const at::Tensor& flat, const Slice& slice) const;
  void GatherInto(at::Tensor& full);
  // This rank's part of the flat buffer, divided among the ranks of reshard_.
  at::Tensor ReshardSlot(const at::Tensor& flat) const;
  void FreeFlat();
  void Arrive(const Coming& coming);
  void Detach();
  // Allocates memory that the queue's collectives use as well.
  at::Tensor Allocate(int64_t numel, const at::TensorOptions& options) const;
  at::Tensor TakeGradients(const at::Tensor& buffer);
  static void Mark(Slice& slice);
  // The module was zeroed since `slice` was marked: drops its gradients, so that only those of
  // later passes count.
  static void DropZeroed(Slice& slice);
  // Adds the unit's name to the errors that `collective` throws.
  template <typename Fn>
  void Named(const char* doing, Fn collective) const;
  // This rank's part of the flat buffer; the shards have their own memory if separate().
  at::Tensor OwnSlot(const at::Tensor& flat) const;
  bool separate() const { return frees_ || flat_.scalar_type() != dtype_; }
  // Moves the shards to memory that the other ranks read.
  void Share(const at::TensorOptions& options);

  const std::string name_;
  Comm& comm_;
  const bool frees_;
  at::ScalarType dtype_ = at::kFloat,
                 reduced_as_ = at::kFloat;  // of the parameters and shards; of the reduction
  const std::function<void(ShardUnit&, bool, const char*)> use_;
  std::vector<Slice> slices_;
  int64_t part_ = 0;   // elements of each rank
  at::Tensor flat_;    // [size * part]; without memory while it is freed
  at::Tensor master_;  // [part]: this rank's values; without memory while they are in the store
  std::optional<SharedParts> shared_;
  bool in_place_ = false;
  bool attached_ = false;  // flat_ has the memory of shared_
  bool allocated_ = true;
  bool gathered_ = true;
  CommQueue* queue_ = nullptr;
  std::shared_ptr<Coming> coming_;
  // The last gather on a stream, whose values are present; null: none.
  CommQueue::Ticket brought_;
  std::shared_ptr<Reduction> reduction_;
  std::optional<PageRegistration> registration_;
  bool whole_ = false;
  Comm* const reshard_;
  at::Tensor kept_;  // [size * part / reshard_->size()], of the dtype of the flat buffer

  const StoredUnit stored_;
  // Null: in memory.
  std::shared_ptr<StoredPage> part_page_, gradients_page_;
  bool any_updated_ = false;
  bool written_ = false;  // the full values were written since they were gathered
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARD_UNIT_H_
