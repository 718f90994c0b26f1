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

// A parameter of the model, as its module has it.
struct NamedParameter {
  std::string name;
  at::Tensor tensor;
};

// Where the shards of a unit, or their gradients, are while nothing uses them: `place` is of
// PartBytes(). What is behind the pointers is borrowed, and outlives the unit.
struct StoredPart {
  PartStore* store = nullptr;  // null: in memory
  uint64_t place = 0;
  StoredPages* among = nullptr;
};
struct StoredUnit {
  StoredPart shards, gradients;
};

// The parameters that are gathered and freed together, all of one dtype and device. They lie one
// after the other in a flat buffer of comm.size() equal parts, and stay views of it; part r belongs
// to rank r, which holds its values for good (`shards`), and the others get them by Gather().
//
//   flat      [ part 0 | part 1 | ... ]      freed and allocated again, if `frees`
//   tensors   [ weight   | bias | norm  ]    cut by the borders of parts
//   shards    of rank 1:   [ei|bias|n]       leaf tensors, 1-D, what the optimizer updates
//
// Where the ranks share memory, shards of large units lie in it, and the others read them there
// instead of having them sent. A full buffer that would be freed, and is of the same dtype, then
// needs no memory at all: it is a view of the shards of all ranks (in_place()). See
// docs/decisions/0056.
//
// With a PartStore for them the shards are in a file, or a device's in memory of the host, while
// nothing uses them: an operator that takes one gets all of the unit into memory (a StoredPage),
// where they stay until FreePart(). So are their gradients, with a PartStore for these: a page of
// its own, from the end of a reduction until no tensor has them any more.
//
// Not thread-safe.
class ShardUnit : public Page {
 public:
  // `use(write, op)` decides whether an operator may use the parameters, and gathers them.
  // `comm`: the ranks that divide the unit; borrowed. Takes the values of `parameters` over; those
  // of all ranks must be equal. `frees`: the full buffer is freed where Free() says so; otherwise
  // it stays, and the shards are a part of it, if they have its dtype. `gathered_as`: the dtype of
  // the full buffer, for fp32 parameters; `reduced_as`: that of the reduction of gradients. Absent:
  // that of the parameters. `stored`: its shards only if it frees. `reshard`: some of the ranks of
  // `comm`, for FreeUntilBackward(); borrowed.
  ShardUnit(std::string name, std::vector<NamedParameter> parameters, Comm& comm, bool frees,
            std::optional<at::ScalarType> gathered_as, std::optional<at::ScalarType> reduced_as,
            std::function<void(ShardUnit&, bool write, const char* op)> use, StoredUnit stored = {},
            Comm* reshard = nullptr);
  // Bytes of the part of each of `ranks` ranks.
  static uint64_t PartBytes(const std::vector<NamedParameter>& parameters, int ranks);
  ShardUnit(const ShardUnit&) = delete;
  ShardUnit& operator=(const ShardUnit&) = delete;

  void Require(bool write, const char* op) override { use_(*this, write, op); }
  void Allow(const at::Tensor& tensor, bool /*write*/, const char* op) override {
    if (any_updated_) CheckNotUpdated(tensor, op);
  }
  // For gathers and reductions beside the computation, with memory of the queue's: one that suits
  // the parameters' device. Borrowed; null: there is none. Before the first gather.
  void set_queue(CommQueue* queue) { queue_ = queue; }
  // An operator that takes a parameter with `updated` throws.
  void set_any_updated(bool any) { any_updated_ = any; }

  // A parameter in the unit. `shard`: the part of it that is this rank's, [begin, begin + numel) of
  // its elements in the order of memory; 1-D, maybe empty; a leaf.
  struct Slice {
    std::string name;
    at::Tensor tensor;  // the module's: paged
    std::vector<int64_t> sizes, strides;
    int64_t offset;  // in the flat buffer
    at::Tensor shard;
    int64_t begin = 0;
    // The gradients of micro-steps that were not reduced, in the dtype of the reduction.
    at::Tensor pending;
    // Since the last Forget(). used: this rank had a gradient. fresh: the shard had none before.
    bool used = false, fresh = false;
    // `.grad` is GradientMark(), unless the program has zeroed it.
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
  // It takes memory while it is gathered.
  bool frees() const { return frees_ && !in_place_; }
  // The full values are the shards of all ranks, where these are.
  bool in_place() const { return in_place_; }
  // All ranks of the model have the whole unit, not a part of it.
  bool whole() const { return whole_; }
  void set_whole() { whole_ = true; }

  // Writes the shards to the store if they have changed, and frees their memory, unless an operator
  // uses them or they are not in one. Thread-safe.
  void FreePart();
  // Whether they are in memory.
  bool part_is_present() const;
  // Whether gradients of shards are in memory that may be in the store.
  bool gradients_are_present() const;
  // Forgets the page of gradients that no tensor has any more.
  void ForgetUnusedGradients();
  // An operator has written the full values.
  void NoteWrite() { written_ = true; }

  // Whether the full values are present and equal to the shards.
  bool gathered() const { return gathered_; }
  // They are on their way.
  bool coming() const { return coming_ != nullptr; }
  bool present() const { return gathered_ || coming(); }
  // (collective) Makes them so; waits for those that are on their way. In memory of this rank's
  // own.
  void Gather();
  // The same of a unit in place, and not a collective: all ranks must have theirs (AwaitShards),
  // and change none while others use the values.
  void Attach();
  // (collective) Returns when the shards of all ranks are what this one is to see.
  void AwaitShards();
  // (collective) Begins it on the queue, unless they are present. The memory for them is allocated
  // when the queue comes to it, so that the collective before has given up its own.
  void StartGather();
  // An operator is about to use the full values, which are there: on the stream that is current.
  void NoteUse();
  // Waits for those that are on their way. Whoever uses the queue next learns of an error.
  void Settle();
  // Frees the full buffer, if `frees`; waits for what is on its way.
  void Free();
  // The same where the backward pass gathers it again: the ranks of `reshard`, if there are, keep a
  // copy divided among them, from which Gather() comes until Free() or Expire().
  void FreeUntilBackward();
  int64_t kept_bytes() const { return kept_.defined() ? static_cast<int64_t>(kept_.nbytes()) : 0; }
  // The shards have changed: what was gathered counts no more.
  void Expire();
  // (collective) Copies of the full parameters, of their own dtype.
  std::vector<at::Tensor> Values();
  // (collective) The same of those slices for which wanted[i], the same ones on every rank: others
  // are undefined, and their values are not exchanged.
  std::vector<at::Tensor> Values(const std::vector<bool>& wanted);
  // Takes this rank's part of the gathered values, which were written, for the shards.
  void KeepOwnPart();

  // The `.grad` of parameters while their gradients are elsewhere: using it throws, and zeroing it
  // is noticed.
  static const at::Tensor& GradientMark();
  // The `.grad` of a shard once an optimizer has used its gradient in the backward pass: using it
  // throws until the program zeroes it.
  static const at::Tensor& UsedGradientMark();
  // A backward pass is about to add to `.grad` of slice `index`. Throws if the program has zeroed
  // the module, and with it gradients of micro-steps before.
  void GradientArrives(size_t index);
  // It has: a micro-step that is not reduced moves it to `pending`.
  void KeepPending(size_t index);
  // (collective) Takes pending gradients and `.grad` from the parameters, and sums them over the
  // ranks, multiplied by `factor`: on the queue, or, if there is none, now. A parameter without a
  // gradient counts as zeros. `replicas`: the ranks that hold the same shard of other copies; null:
  // there is one copy. One reduction of a unit at a time. `buffer`: for gradient_bytes() bytes,
  // which nobody else uses until it has finished; undefined: memory is taken for it.
  void StartReduction(double factor, Comm* replicas, const at::Tensor& buffer = {});
  int64_t gradient_bytes() const;
  // Waits for it. This rank's part of the sums, for AddGradients(); undefined: there was none.
  at::Tensor FinishReduction();
  // Adds them to `.grad` of the shards. `in_memory`: what is new there stays out of the store,
  // since it is used at once.
  void AddGradients(at::Tensor mine, bool in_memory = false);
  // The same after a pass that has thrown: the next user of the queue gets the error.
  void SettleReduction();
  // Waits for it and drops the result.
  void AbandonReduction();
  // Whether a slice has a gradient that was not reduced.
  static bool HasPending(const Slice& slice);

  // (collective) Puts `.grad`-like 1-D tensors, one for each slice and as long as its shard,
  // together to the tensors that they are parts of. An undefined one counts as zeros.
  std::vector<at::Tensor> Assemble(const std::vector<at::Tensor>& parts, at::ScalarType dtype);
  // This rank's part of a full tensor of slice `index`, in the order of memory: a view, if `full`
  // has that order.
  at::Tensor PartOf(size_t index, const at::Tensor& full) const;
  // Which elements of a contiguous full tensor that reads: first and past the last.
  std::pair<int64_t, int64_t> PartRange(size_t index) const;
  // Overwrites the shards with the values of the full tensors, where they are defined.
  void SetValues(const std::vector<at::Tensor>& full);

  // For the model's bookkeeping: its number, and when it was used last.
  uint32_t index = 0;
  uint64_t last_use = 0;
  // Some rank has had a gradient for one of them, in a pass that reduced: an optimizer may change
  // it. The same on every rank.
  bool trained = false;
  // An optimizer that Muster knows has one of them: the program may write it through that at any
  // time. The same on every rank.
  bool held = false;
  // ShardedModel::Writes() and the versions of the shards, before the first gather of what is
  // gathered. Absent: nothing was gathered since they changed.
  std::optional<uint64_t> writes;
  std::vector<int64_t> versions;

 private:
  struct Coming {
    CommQueue::Ticket ticket;
    at::Tensor full;  // what was gathered, if `frees`
  };
  struct Reduction {
    CommQueue::Ticket ticket;  // null without a queue
    at::Tensor full, mine;     // what is reduced, and this rank's part of the result
  };

  void CheckNotUpdated(const at::Tensor& tensor, const char* op) const;
  at::Tensor View(const at::Tensor& flat, const Slice& slice) const;
  void GatherInto(at::Tensor& full);
  // This rank's part of the flat buffer among those of reshard_.
  at::Tensor ReshardSlot(const at::Tensor& flat) const;
  void FreeFlat();
  void Arrive(const Coming& coming);
  void Detach();
  // Memory that the queue's collectives use as well.
  at::Tensor Allocate(int64_t numel, const at::TensorOptions& options) const;
  at::Tensor TakeGradients(const at::Tensor& buffer);
  static void Mark(Slice& slice);
  // The module was zeroed since `slice` was marked: its gradients are to be those of later passes.
  static void DropZeroed(Slice& slice);
  // Names the unit in what `collective` throws.
  template <typename Fn>
  void Named(const char* doing, Fn collective) const;
  // This rank's part of the flat buffer; the shards have memory of their own if separate().
  at::Tensor OwnSlot(const at::Tensor& flat) const;
  bool separate() const { return frees_ || flat_.scalar_type() != dtype_; }
  // The shards in memory that the other ranks read.
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
  // The gather on a stream that has brought what is there; null: none.
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
  bool written_ = false;  // the full values, since they were gathered
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARD_UNIT_H_
