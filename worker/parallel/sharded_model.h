#ifndef MUSTER_WORKER_PARALLEL_SHARDED_MODEL_H_
#define MUSTER_WORKER_PARALLEL_SHARDED_MODEL_H_

#include <cstdint>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"
#include "worker/collective/comm_queue.h"
#include "worker/collective/local_comm.h"
#include "worker/parallel/gradient_observers.h"
#include "worker/parallel/part_store.h"
#include "worker/parallel/reduction_order.h"
#include "worker/parallel/shard_faults.h"
#include "worker/parallel/shard_plan.h"
#include "worker/parallel/shard_unit.h"
#include "worker/parallel/shard_updates.h"
#include "worker/parallel/sharding_options.h"
#include "worker/parallel/stored_page.h"
#include "worker/parallel/unit_history.h"
#include "worker/parallel/unit_turns.h"
#include "worker/parallel/weight_changes.h"

namespace muster {

// One model whose parameters, gradients and optimizer states are divided among the ranks, according
// to ShardingOptions. The module is unchanged and is called as before: its parameters are gathered
// when an operator uses them (paged_storage.h), in the forward and the backward pass, and freed
// when others replace them. The gradients of a unit are reduced once all of them exist.
//
// The optimizer updates shards() instead of the parameters: 1-D tensors, one for each parameter,
// with this rank's part of it (maybe empty).
//
//   model.BeginForward(communicate);   // on every rank
//   auto output = net(x);
//   model.EndForward();
//   loss.backward();                   // the shards have their gradients
//   model.Expire();                    // before the shards change
//   optimizer.step();
//
// All ranks must use the same units in the same order in each step: if only one rank leaves out a
// unit, the ranks wait for each other. Different orders of units of the same size are detected at
// the end of the backward pass, before an optimizer steps on wrong numbers, and throw on every
// rank.
//
// With a CommQueue, communication overlaps with computation (docs/decisions/0042, on a GPU 0066):
// on a thread or a stream. When a step reaches a unit, the queue begins to gather the unit that the
// previous step used next; its use waits for the gather. The queue reduces gradients while the
// backward pass runs through earlier layers. The choice of the unit to gather ahead depends only on
// the program and on an order that all ranks have agreed on, never on time, so that the collectives
// of all ranks have one order. Results are the same to the last bit. Between passes the queue is
// empty; the use that waits throws its errors.
//
// Outside forward and backward passes a use of the parameters throws, as does an operator that
// writes them: Summon() allows both.
//
// If the ranks share memory (docs/decisions/0056), units of kFull are used in the memory of the
// shards of all ranks. A rank writes its shards only when no other rank reads them: the end of a
// forward pass and of a backward pass that reduces waits for all ranks, and so does a gather after
// a change.
//
// Construction is a collective: it compares models and units of all ranks, and the values become
// those of rank 0. Parameters must be on their device, with their final requires_grad. Not
// thread-safe. Errors are c10::Error.
class ShardedModel {
 public:
  // Whether this rank needs a parameter's full tensor.
  using KeepName = std::function<bool(const std::string& name)>;

  // Gives memory to a parameter on the meta device, and its values if wanted. Called in the same
  // order on every rank, for one unit after the other, each of which is divided before the next
  // one.
  using Materializer = std::function<void(const NamedParameter& parameter, bool with_values)>;

  // `world`: all ranks. `shard`: the ranks that divide one copy; `replicas`: those that hold the
  // same part of other copies, null if there is one copy. All are borrowed. `module`: null for
  // TorchScript. `names` and `parameters`: as for DataParallel. `broadcast_buffers`: as for DDP.
  // `queue`: for gathers and reductions beside the computation; the three Comms must be ordered
  // with it (MakeOrderedComm). Null, or one that does not suit the parameters' device: they run in
  // order with the program. `materialize`: for parameters on the meta device. `store`: for the
  // shards of kFull while nothing uses them, and for their gradients. `reshard`: the group of
  // options.reshard_group_size ranks that this rank belongs to, a part of `shard`, in the same
  // order; null if that is 0. Borrowed, and ordered with `queue`. `gradients`: for the gradients of
  // the shards only, under every strategy; null: they are in `store` or, without it, in memory.
  ShardedModel(Comm& world, Comm& shard, Comm* replicas, torch::nn::Module* module,
               std::vector<NamedParameter> parameters, std::vector<at::Tensor> buffers,
               const ShardingOptions& options, bool broadcast_buffers = true,
               std::shared_ptr<CommQueue> queue = nullptr,
               const Materializer& materialize = nullptr,
               std::unique_ptr<PartStore> store = nullptr, Comm* reshard = nullptr,
               std::unique_ptr<PartStore> gradients = nullptr);
  ~ShardedModel();
  ShardedModel(const ShardedModel&) = delete;
  ShardedModel& operator=(const ShardedModel&) = delete;

  // A micro-step that does not communicate leaves its gradients with the parameters; the next one
  // that does reduces the sum. `step_follows`: a step follows its backward pass, as far as the
  // caller knows; then gathered parameters are invalid after that pass. Otherwise, from a backward
  // pass that reduces to the next Expire(), they stay valid until a rank has changed its shards.
  // The same on every rank: all ranks throw if they find a difference, at the latest at the end of
  // a backward pass that reduces on all of them.
  void BeginForward(bool communicate, bool step_follows = true);
  // In full sharding in place it waits for all ranks; an error is logged, and thrown by the next
  // use of the model.
  void EndForward();
  // (collective) Call it before an optimizer changes shards: in full sharding in place it waits
  // until no other rank reads them, in a pass that reduces nothing (torch::autograd::grad of
  // inputs).
  void AwaitReaders();
  // From now on the shards are updated inside backward passes that reduce: those of each unit as
  // soon as its gradients are reduced. A backward pass that uses the unit's parameters afterwards
  // throws.
  void UpdateInBackward(std::shared_ptr<ShardUpdates> updates) { updates_ = std::move(updates); }

  // An optimizer's step on shards of this model has thrown, on this rank only as far as it knows.
  // All ranks throw that error when they meet next, and from then on until all parameters are
  // loaded.
  void NoteFailedStep(const std::exception_ptr& thrown);
  // Throws if the parameters are known to be a mixture: some ranks have failed, maybe in the middle
  // of a step, and others may have stepped.
  void CheckNotMixedHere() const;
  // (collective) Call it before weights are read, or replaced while optimizers keep their states:
  // throws on every rank if they are a mixture, since some ranks have failed or changed their parts
  // where others have not. `place`: the purpose, for messages to ranks that are elsewhere.
  void CheckNotMixed(const char* place = "reading the weights");
  // All parameters are about to be replaced, on every rank: earlier failures and changes no longer
  // prevent reading them. Returns what RestoreFailures() needs if nothing is replaced.
  struct Failures {
    ShardFaults::Failures failures;
    uint32_t announced = 0;
  };
  Failures ForgetFailures();
  void RestoreFailures(const Failures& failures);
  // Call it on every rank when a load has failed midway. `why`: the error of all uses until the
  // next load.
  void NoteFailedLoad(const std::string& why) { faults_.SetMixed(why); }
  // Whether an exception has ended a backward pass of this rank midway: other ranks may still wait
  // for it there.
  bool Interrupted() const;
  // The error of this rank alone, or a note that an exception has ended its backward pass; empty:
  // neither.
  std::string Before() const;
  // Throws inside Summon(), which holds the values that are about to change.
  void CheckNotSummoned() const;
  // Whether Summon() is running.
  bool summoned() const { return summons_ > 0; }

  // Makes the next backward pass reduce.
  void Communicate() {
    communicate_ = true;
    begun_ = false;
  }

  // The shards are about to change: gathered parameters become invalid. Call it on every rank,
  // equally often: all throw if they find a difference, in the next forward pass after a backward
  // pass that has reduced, at the latest at the end of the next one that does, and before a gather
  // that would wait for ranks that have not called it. Do not call it inside Summon().
  void Expire();
  // An optimizer holds `shards`: what was gathered of their units becomes invalid after a step.
  void Hold(const std::vector<at::Tensor>& shards);
  // As Expire(), before the step of an optimizer that holds `shards`; but gathered values of units
  // that no optimizer holds stay valid.
  void ExpireStepped(const std::vector<at::Tensor>& shards);
  // A closure of an optimizer's step begins or ends: backward passes in between compare the ranks'
  // places before their first exchange, since a rank whose closure has failed comes to
  // AgreeOnClosure().
  void SetInClosure(bool inside) { in_closure_ = inside; }
  // (collective) The closure of an optimizer's step has ended on this rank, before the update.
  // Throws on every rank if it has failed on some: `thrown` itself if it is not null, else the
  // errors of the other ranks. Do not call it after a backward pass that an exception has ended, in
  // which others may wait, nor after an exchange that has failed on all ranks (IsOfRanksApart).
  void AgreeOnClosure(const std::exception_ptr& thrown);
  // The step of ExpireStepped() with a closure has failed. `changed`: the optimizer may have
  // changed shards before that.
  void NoteFailedClosure(bool changed);
  // For a save. ChangesHere() returns this rank's contribution to an exchange of the caller, of
  // constant size; CompareBeforeSave() takes the contributions of all ranks, by rank. (The latter
  // is collective if a rank has failed.) It throws on every rank if some have failed in a backward
  // pass or changed their parts where others have not: the saved state would be a mixture.
  static constexpr size_t kChangesBytes = 8;
  std::string ChangesHere() const;
  void CompareBeforeSave(const std::vector<std::string>& all);
  // Steps on the shards may be invisible (see Writes): from now on gathered parameters are invalid
  // after any backward pass that reduces. On every rank.
  void ExpectUnseenSteps() { unseen_steps_ = true; }

  // These shards were changed, on every rank: a backward pass through a graph with the old values
  // throws, as LibTorch's own check does for parameters that are changed in place. (Gathered values
  // come and go without that check.)
  void MarkChanged(const std::vector<at::Tensor>& shards);

  // These parameters have memory and no values yet: all uses of the model throw, on every rank,
  // until LoadParts() or LoadParameters() has given values to all of them. The same on every rank.
  void SetWithoutValues(const std::vector<std::string>& names);
  void CheckHasValues() const { faults_.CheckHasValues(); }

  // One shard for each parameter.
  const std::vector<at::Tensor>& shards() const { return shards_; }
  // The shard of a parameter; undefined if the parameter is not of this model.
  at::Tensor ShardOf(const at::Tensor& parameter) const;
  // The name of the parameter that a shard is a part of; null if it is not of this model.
  const std::string* NameOf(const at::Tensor& shard) const;

  // Whether the shard is a whole parameter of an ignored module, which all ranks have.
  bool IsWhole(const at::Tensor& shard) const;

  // Names of the parameters with gradients that no backward pass has reduced.
  std::vector<std::string> UnexchangedGradients() const;
  // Drops such gradients of these shards' parameters.
  void ForgetPending(const std::vector<at::Tensor>& shards);

  // (collective) Runs `body` with all parameters gathered and writable. A rank keeps what was
  // written to its own part; write the same on every rank.
  void Summon(const std::function<void()>& body);

  // (collective) Passes each full parameter to `visit`, by its first name. One unit is gathered at
  // a time, and its values are gone after its last parameter. `visit` must not throw: other ranks
  // are in the same exchange.
  void VisitFullParameters(
      const std::function<void(const std::string& name, const at::Tensor& value)>& visit);
  // (collective) Returns the full parameters for which keep(name), by name, copied to the CPU. One
  // unit is gathered at a time. An error on only this rank (no memory for the copies) is reported
  // after the whole exchange: in `failure`, if other exchanges follow; null: it is thrown.
  std::vector<std::pair<std::string, at::Tensor>> FullParameters(
      const KeepName& keep, std::exception_ptr* failure = nullptr);
  // (collective) Returns the full parameters for which wanted(name), which must be the same ones on
  // every rank (or all ranks throw), by name, copied to the CPU: nothing else is exchanged. `keep`
  // false: this rank gets none. An error on only this rank is thrown after the whole exchange.
  std::vector<std::pair<std::string, at::Tensor>> SomeParameters(const KeepName& wanted, bool keep);
  // Loads the values of full parameters, by name; parameters that are not in `values` keep theirs.
  void LoadParameters(const std::map<std::string, at::Tensor>& values);
  // The same from this rank's parts of them (PartOf). `copy` copies the second tensor of each pair
  // to the first; null: copy_() does.
  using CopyAll = std::function<void(const std::vector<std::pair<at::Tensor, at::Tensor>>&)>;
  void LoadParts(const std::map<std::string, at::Tensor>& parts, const CopyAll& copy = nullptr);

  // (collective) For a tensor of state that each shard has, as an optimizer's: returns the full
  // tensor for each parameter with keep(name) that has it on any rank, by the parameter's name, on
  // the CPU. `state(name)`: undefined if a shard has none. `failure`: as for FullParameters().
  std::map<std::string, at::Tensor> Assemble(
      const std::function<at::Tensor(const std::string& name)>& state, const KeepName& keep,
      std::exception_ptr* failure = nullptr);
  // Sets how FullParameters(), Assemble() and KeptPartOf() copy their results from now on. `copy`
  // copies a tensor on the CPU or on the device of the parameters to a new tensor on the CPU. The
  // default copies to memory.
  using CopyTensor = std::function<at::Tensor(const at::Tensor& tensor)>;
  void KeepCopiesBy(CopyTensor copy) { keep_copy_ = std::move(copy); }
  // The number of elements of parameter `name` in this rank's shard.
  int64_t PartSize(const std::string& name) const;
  // Returns this rank's part of the full tensor for parameter `name`: 1-D, in its own memory on the
  // device of `full`.
  at::Tensor PartOf(const std::string& name, const at::Tensor& full) const;
  // The same for a full tensor on the CPU that is temporarily kept in addition to the shards:
  // copied by the function of KeepCopiesBy().
  at::Tensor KeptPartOf(const std::string& name, const at::Tensor& full) const;
  // The elements of a contiguous full tensor that PartOf() reads: first and past the last.
  std::pair<int64_t, int64_t> PartRange(const std::string& name) const;

  Comm& shard_comm() { return shard_comm_; }
  const std::vector<std::unique_ptr<ShardUnit>>& units() const { return units_; }

 private:
  // The unit and the slice of a parameter.
  const std::pair<size_t, size_t>& PlaceOf(const std::string& name) const;
  // (collective) Returns which slices of which units SomeParameters() reads.
  std::vector<std::vector<bool>> AgreeOnWanted(const KeepName& wanted);
  // Throws if a store does not accept `parameter`.
  void CheckStores(const NamedParameter& parameter) const;
  // (collective) Reserves room in the stores for the units of `plan`.
  std::vector<StoredUnit> Reserve(const std::vector<PlannedUnit>& plan);
  // `stored`: the places of a unit that is divided.
  void AddUnit(PlannedUnit planned, const Materializer& materialize, StoredUnit stored);
  void Use(ShardUnit& unit, bool write, const char* op);
  void TurnTo(ShardUnit& unit, bool backward);
  void ForgetTurns();
  // Gathers a unit that is not present.
  void Bring(ShardUnit& unit);
  // Begins to gather the unit that is expected next and not present.
  void Prefetch();
  // Frees a unit that makes room for another one.
  void Displace(ShardUnit& unit);
  // Whether units are freed to make room for others.
  bool Bounded() const;
  void MakeRoom();
  void FreeParts();
  // Throws the error that the end of a forward pass could not throw.
  void ThrowUnsaid();
  // Waits for the operations that an interrupted pass has left under way.
  void Settle();
  void ExpireAll();
  // Expires the units that an optimizer, or the program through one, may have changed.
  void ExpireSteppable();
  void Expire(ShardUnit& unit);
  // (collective) Compares at `place` whether shards have changed since the parameters were
  // gathered: before each forward pass of kFull, and after a backward pass that reduces until the
  // ranks know that the change was announced. If those of some rank have changed, calls
  // ExpireAll(); if a step follows that pass, ExpireSteppable(). `before`: what this rank has gone
  // through, for errors about ranks at different places.
  void CompareChanges(const std::string& place, const std::string& before);
  // Acts on the result of the exchange. `compared`: whether ranks were comparing before it.
  void TakeChanges(const std::vector<std::string>& all, bool compared);
  // CompareChanges(), if it is due.
  void CompareBeforeForward(const std::string& before);
  // (collective) Throws the error of some rank, as do all uses of the model until its parameters
  // are loaded.
  [[noreturn]] void ThrowFailure();
  // Call it before the program does `what`, for which `compare` brings the ranks together: throws
  // if this rank's parameters are not those of a whole step.
  void CheckBefore(const char* what, const std::function<void()>& compare);
  // A load of all parameters ends failures and announcements of single ranks.
  void BeginLoad(const std::map<std::string, at::Tensor>& values);
  // These parameters have their values now.
  void EndLoad(const std::map<std::string, at::Tensor>& values);
  // A number that changes when this rank's shards of a unit have been written: by operators on them
  // or by Muster's optimizers. LibTorch's SGD writes `.data()`, which it does not show.
  uint64_t Writes(const ShardUnit& unit) const;
  // Records the unit's writes before its first gather; afterwards NoteWritten() notes if an
  // operator has written one of its shards.
  void KeepWrites(ShardUnit& unit) const;
  void NoteWritten();
  void ForgetWrites();
  void CheckTrained(const std::vector<std::string>& frames) const;
  std::string TrainedBits() const;
  // Drops the gradients of this pass, before an error of all ranks.
  void DropGradients();
  // Counts how many gradients each unit gets, according to the parameters' current requires_grad.
  void ExpectGradients();
  void OnGradient(size_t unit, size_t slice);
  // (collective) Called before the first gather or gradient of a pass: under kFull and in closures
  // it compares what the ranks are about to do, and determines the order of reductions in the first
  // pass that reduces.
  void BeginBackward();
  // All ranks throw if they have not announced equally many changes, as do all uses of the model
  // until its parameters are loaded.
  void TakeAnnouncements(const std::vector<uint32_t>& announced);
  void TakeAnnouncementsInBackward(const std::vector<uint32_t>& announced);
  void OpenPass();
  void ReduceDue();
  void ReduceNext();
  void ReduceUpTo(size_t end);
  // (collective) In the first pass that reduces: reduces the units that are complete on every rank.
  void ReduceComplete();
  void Reduce(size_t unit);
  void FinishReduction();
  // Runs an operation of this rank alone. If it throws, the rank continues to reduce with the
  // others, and all throw at the end of the pass.
  void DoAlone(const std::function<void()>& body);
  // Updates the shards of the unit that have their gradients. `rest`: also those of parameters for
  // which this rank had no gradient in this pass.
  void Update(ShardUnit& unit, bool rest);
  // `first`: the order of units was not known when the pass began (then this is collective).
  void EndUpdates(const std::vector<at::Tensor>& trained, bool first);
  void CheckStepped(const char* what) const;
  // The name of a parameter that some rank has updated in this pass, and for which some rank has
  // got a gradient after its unit was reduced; null: none.
  const std::string* LateAfterUpdate(const std::vector<uint32_t>& late) const;
  void ReduceLate(const std::vector<uint32_t>& late);
  void EndOfBackward();
  // (collective) Throws the errors that DoAlone() of some ranks has caught.
  [[noreturn]] void ThrowFailedAlone();
  // Returns the shards of all parameters for which some rank had a gradient in this pass.
  std::vector<at::Tensor> CheckOrder();
  void SyncBuffers();

  Comm& world_;
  Comm& shard_comm_;
  Comm* const replicas_;
  Comm* const reshard_;
  const ShardingOptions options_;
  const bool broadcast_buffers_;
  const std::vector<at::Tensor> buffers_;
  LocalComm alone_;  // the Comm of units that are not divided
  const std::unique_ptr<PartStore> store_, gradient_store_;  // null: none
  StoredPages stored_parts_, stored_gradients_;
  std::vector<std::unique_ptr<ShardUnit>> units_;
  std::vector<at::Tensor> shards_;
  std::unique_ptr<WeightWatch> watch_;                    // of shards_
  std::unordered_map<const void*, at::Tensor> shard_of_;  // by the parameter's TensorImpl
  std::unordered_map<const void*, std::string> name_of_;  // by the shard's
  std::unordered_map<std::string, std::pair<size_t, size_t>> places_;  // unit and slice, by name
  GradientObservers observers_;

  bool communicate_ = true;
  int forwards_ = 0;       // under way
  int summons_ = 0;        // under way
  bool in_place_ = false;  // some unit is in place; the same on all ranks
  // For units in place: all ranks have the shards that they had at the last gather.
  bool agreed_ = false;
  std::exception_ptr unsaid_;
  at::Tensor gradient_buffer_;  // of the units, which are reduced one after the other; may be
                                // undefined
  bool open_ = false;           // a backward pass that reduces is under way
  // Such a pass has ended since the last gathers, so some optimizer may have stepped.
  bool stale_ = false;
  // Such a pass has ended, and the ranks have not agreed yet that Expire() has followed: the shards
  // may have been changed by others. The same on all ranks.
  bool comparing_ = false;
  uint32_t announced_ = 0;  // calls of Expire() since the ranks have last compared them
  ShardFaults faults_;
  bool thrown_on_all_ = false;  // the error at the end of this backward pass is thrown on all ranks
  // The first exception that DoAlone() has caught in this backward pass; null: none.
  std::exception_ptr failed_alone_;
  bool begun_ = false;        // BeginBackward() has been called for this pass
  bool step_follows_ = true;  // after the pass that was begun last
  bool unseen_steps_ = false;
  bool in_closure_ = false;
  // The parameter of a shard that an operator has written since, without an announcement; empty:
  // none.
  std::string written_;
  uint64_t uses_ = 0;  // clock of last_use
  ReductionOrder reductions_{0};
  // The unit that this pass has turned to last (null: none yet), and whether the pass was backward.
  ShardUnit* turn_of_ = nullptr;
  bool backward_ = false;
  bool noting_ = true;  // this forward pass is one of training
  UnitTurns forward_turns_, backward_turns_;
  std::vector<std::pair<at::Tensor, unsigned>> hooks_;
  UnitHistory history_;
  std::shared_ptr<CommQueue> queue_;  // null: nothing overlaps
  ShardUnit* reducing_ = nullptr;     // its gradients are on their way

  CopyTensor keep_copy_;
  std::shared_ptr<ShardUpdates> updates_;  // null: optimizers step between passes
  bool updating_ = false;                  // this backward pass updates
  bool touched_ = false;                   // some rank may have updated in this pass already
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARDED_MODEL_H_
