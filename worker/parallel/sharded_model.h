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

// One model whose parameters, gradients and optimizer states are divided among the ranks, as
// ShardingOptions say. The module is unchanged and is called as before: its parameters are gathered
// when an operator uses them (paged_storage.h), in the forward and the backward pass, and freed
// when others replace them. The gradients of a unit are reduced once all of them exist.
//
// The optimizer updates shards(), in place of the parameters: 1-D tensors, one for each parameter,
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
// Outside of forward and backward passes a use of the parameters throws, as does an operator that
// writes them: Summon() is for both.
//
// Where the ranks share memory (docs/decisions/0056), units of kFull are used where the shards of
// all ranks are. A rank writes its shards only when no other one reads them: the end of a forward
// pass and of a backward pass that reduces waits for all ranks, and so does a gather after a
// change.
//
// Construction is a collective: it compares models and units of all ranks, and the values become
// those of rank 0. Parameters must be on their device, and require gradients as they will. Not
// thread-safe. Errors are c10::Error.
class ShardedModel {
 public:
  // Whether this rank has a use for a parameter's full tensor.
  using KeepName = std::function<bool(const std::string& name)>;

  // Gives a parameter on the meta device memory, and its values if wanted. Called in the same order
  // on every rank, for one unit after the other, each of which is divided before the next one.
  using Materializer = std::function<void(const NamedParameter& parameter, bool with_values)>;

  // `world`: all ranks. `shard`: the ranks that divide one copy; `replicas`: those that hold the
  // same part of other copies, null if there is one copy. All are borrowed. `module`: null for
  // TorchScript. `names` and `parameters`: as DataParallel's. `broadcast_buffers`: as DDP's.
  // `queue`: for gathers and reductions beside the computation; the three are Comms in order with
  // it (MakeOrderedComm). Null, or one that does not suit the parameters' device: in order with the
  // program. `materialize`: for parameters on the meta device. `store`: for the shards of kFull
  // while nothing uses them, and for their gradients. `reshard`: the ranks of
  // options.reshard_group_size that this one is of, among those of `shard`, each in its own order;
  // null: 0. Borrowed, and in order with `queue`. `gradients`: for the gradients of the shards
  // alone, under every strategy; null: they are where `store` is, or else in memory.
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
  // that does reduces the sum. `step_follows`: on its backward pass, as far as the caller knows;
  // gathered parameters count no more after that. Otherwise, from a backward pass that reduces to
  // the next Expire(), they count until a rank has changed its shards. The same on every rank: all
  // ranks throw if they find out that it is not, at the latest at the end of a backward pass that
  // reduces on all of them.
  void BeginForward(bool communicate, bool step_follows = true);
  // In full sharding in place it waits for all ranks; an error is logged, and thrown by what uses
  // the model next.
  void EndForward();
  // (collective) Before an optimizer changes shards: in full sharding in place it waits until no
  // other rank reads them, in a pass that reduces nothing (torch::autograd::grad of inputs).
  void AwaitReaders();
  // From now on the shards are updated inside of backward passes that reduce: of each unit as soon
  // as its gradients are reduced. A backward pass that uses the unit's parameters afterwards
  // throws.
  void UpdateInBackward(std::shared_ptr<ShardUpdates> updates) { updates_ = std::move(updates); }

  // An optimizer's step on shards of this model throws, on this rank alone as far as it knows. All
  // ranks throw that where they meet next, and from then on until all parameters are loaded.
  void NoteFailedStep(const std::exception_ptr& thrown);
  // Throws where the parameters are known to be a mixture: some ranks have failed, maybe in the
  // middle of a step, and others may have stepped.
  void CheckNotMixedHere() const;
  // (collective) Before weights are read, or replaced while optimizers keep their states: throws on
  // every rank if they are a mixture, since some ranks have failed or changed their parts where
  // others have not. `place`: what for, in the messages to ranks that are elsewhere.
  void CheckNotMixed(const char* place = "reading the weights");
  // All parameters are about to be replaced, on every rank: failures and changes of before do not
  // keep anyone from reading them. Returns what RestoreFailures() needs if nothing is replaced.
  struct Failures {
    ShardFaults::Failures failures;
    uint32_t announced = 0;
  };
  Failures ForgetFailures();
  void RestoreFailures(const Failures& failures);
  // On every rank: a load has failed on the way. `why`: what all uses throw until the next load.
  void NoteFailedLoad(const std::string& why) { faults_.SetMixed(why); }
  // Whether an exception has ended a backward pass of this rank on its way: others may still wait
  // for it there.
  bool Interrupted() const;
  // The error that only this rank has had, or a note that an exception has ended its backward pass;
  // empty: neither.
  std::string Before() const;
  // Throws inside of Summon(), which holds the values that are about to change.
  void CheckNotSummoned() const;
  // Inside of Summon().
  bool summoned() const { return summons_ > 0; }

  // Makes the next backward pass reduce.
  void Communicate() {
    communicate_ = true;
    begun_ = false;
  }

  // The shards are about to change: gathered parameters count no more. On every rank, equally
  // often: all throw if they find out that it was not, in the next forward pass after a backward
  // pass that has reduced, at the latest at the end of the next one that does, and before a gather
  // that would wait for ranks that have not. Not inside of Summon().
  void Expire();
  // An optimizer holds `shards`: what was gathered of their units counts no more after a step.
  void Hold(const std::vector<at::Tensor>& shards);
  // As Expire(), before the step of an optimizer that holds `shards`: what was gathered of units
  // counts on that no optimizer holds.
  void ExpireStepped(const std::vector<at::Tensor>& shards);
  // A closure of an optimizer's step begins or ends: backward passes in between compare where the
  // ranks are before their first exchange, since a rank that the closure has failed on comes to
  // AgreeOnClosure().
  void SetInClosure(bool inside) { in_closure_ = inside; }
  // (collective) The closure of an optimizer's step has ended on this rank, before the update.
  // Throws on every rank if some have failed in it: `thrown` itself where it is not null, what they
  // have failed with elsewhere. Not after a backward pass that an exception has ended, where others
  // may wait, nor after an exchange that has failed on all ranks (IsOfRanksApart).
  void AgreeOnClosure(const std::exception_ptr& thrown);
  // The step of ExpireStepped() with a closure has failed. `changed`: the optimizer may have
  // changed shards before.
  void NoteFailedClosure(bool changed);
  // Before a save. ChangesHere() is what this rank adds to an exchange of the caller's, of a size
  // that is always the same; CompareBeforeSave() takes what all ranks have added, by rank. (The
  // latter is collective where a rank has failed.) It throws on every rank if some have failed in a
  // backward pass or changed their parts where others have not: what is saved would be a mixture.
  static constexpr size_t kChangesBytes = 8;
  std::string ChangesHere() const;
  void CompareBeforeSave(const std::vector<std::string>& all);
  // Steps on the shards may be invisible (see Writes): from now on gathered parameters are invalid
  // after any backward pass that reduces. On every rank.
  void ExpectUnseenSteps() { unseen_steps_ = true; }

  // These shards were changed, on every rank: a backward pass through a graph that has the values
  // before throws, as LibTorch's own check does for parameters that are changed in place. (Gathered
  // values come and go without that check.)
  void MarkChanged(const std::vector<at::Tensor>& shards);

  // These parameters have memory and no values yet: what uses the model throws, on every rank,
  // until LoadParts() or LoadParameters() has given all of them theirs. The same on every rank.
  void SetWithoutValues(const std::vector<std::string>& names);
  void CheckHasValues() const { faults_.CheckHasValues(); }

  // One for each parameter.
  const std::vector<at::Tensor>& shards() const { return shards_; }
  // That of a parameter; undefined if it is none of this model.
  at::Tensor ShardOf(const at::Tensor& parameter) const;
  // The name of the parameter that a shard is a part of; null if it is none of this model.
  const std::string* NameOf(const at::Tensor& shard) const;

  // Whether it is a whole parameter, which all ranks have, of an ignored module.
  bool IsWhole(const at::Tensor& shard) const;

  // Names of the parameters with gradients that no backward pass has reduced.
  std::vector<std::string> UnexchangedGradients() const;
  // Drops such gradients of the parameters that these shards are a part of.
  void ForgetPending(const std::vector<at::Tensor>& shards);

  // (collective) Runs `body` with all parameters gathered, and allowed to be written. What a rank
  // has written to its own part stays; write the same on every rank.
  void Summon(const std::function<void()>& body);

  // (collective) Gives each full parameter to `visit`, by its first name. One unit is gathered at a
  // time, and its values are gone after the last of them. `visit` does not throw: other ranks are
  // in the same exchange.
  void VisitFullParameters(
      const std::function<void(const std::string& name, const at::Tensor& value)>& visit);
  // (collective) The full parameters for which keep(name), by name, copied to the CPU. One unit is
  // gathered at a time. An error on only this rank (no memory for the copies) is reported after the
  // whole exchange: in `failure`, if other exchanges follow; null: it is thrown.
  std::vector<std::pair<std::string, at::Tensor>> FullParameters(
      const KeepName& keep, std::exception_ptr* failure = nullptr);
  // (collective) The full parameters for which wanted(name), which must be the same ones on every
  // rank (or all ranks throw), by name, copied to the CPU: nothing else is exchanged. `keep` false:
  // this rank gets none. An error on only this rank is thrown after the whole exchange.
  std::vector<std::pair<std::string, at::Tensor>> SomeParameters(const KeepName& wanted, bool keep);
  // The values of full parameters, by name; names that are not in `values` stay as they are.
  void LoadParameters(const std::map<std::string, at::Tensor>& values);
  // The same from this rank's parts of them (PartOf). `copy` copies each second tensor to the
  // first; null: copy_() does.
  using CopyAll = std::function<void(const std::vector<std::pair<at::Tensor, at::Tensor>>&)>;
  void LoadParts(const std::map<std::string, at::Tensor>& parts, const CopyAll& copy = nullptr);

  // (collective) For a tensor of state that each shard has, as the optimizer's are: the full one
  // for each parameter with keep(name) that has it on any rank, by the parameter's name, on the
  // CPU. `state(name)`: undefined where a shard has none. `failure`: as of FullParameters().
  std::map<std::string, at::Tensor> Assemble(
      const std::function<at::Tensor(const std::string& name)>& state, const KeepName& keep,
      std::exception_ptr* failure = nullptr);
  // How FullParameters(), Assemble() and KeptPartOf() copy what they return; from then on. It
  // copies a tensor on the CPU or on the device of the parameters to a new tensor on the CPU. The
  // default copies to memory.
  using CopyTensor = std::function<at::Tensor(const at::Tensor& tensor)>;
  void KeepCopiesBy(CopyTensor copy) { keep_copy_ = std::move(copy); }
  // Elements of parameter `name` in this rank's shard.
  int64_t PartSize(const std::string& name) const;
  // This rank's part of the full tensor for parameter `name`: 1-D, in memory of its own on the
  // device of `full`.
  at::Tensor PartOf(const std::string& name, const at::Tensor& full) const;
  // The same for a full tensor on the CPU that is temporarily kept in addition to the shards: a
  // copy as of KeepCopiesBy().
  at::Tensor KeptPartOf(const std::string& name, const at::Tensor& full) const;
  // Which elements of a contiguous full tensor PartOf() reads: first and past the last.
  std::pair<int64_t, int64_t> PartRange(const std::string& name) const;

  Comm& shard_comm() { return shard_comm_; }
  const std::vector<std::unique_ptr<ShardUnit>>& units() const { return units_; }

 private:
  // Unit and slice.
  const std::pair<size_t, size_t>& PlaceOf(const std::string& name) const;
  // (collective) Which slices of which units SomeParameters() reads.
  std::vector<std::vector<bool>> AgreeOnWanted(const KeepName& wanted);
  // Throws if a store does not take `parameter`.
  void CheckStores(const NamedParameter& parameter) const;
  // (collective) Room in the stores for the units of `plan`.
  std::vector<StoredUnit> Reserve(const std::vector<PlannedUnit>& plan);
  // `stored`: of a unit that is divided.
  void AddUnit(PlannedUnit planned, const Materializer& materialize, StoredUnit stored);
  void Use(ShardUnit& unit, bool write, const char* op);
  void TurnTo(ShardUnit& unit, bool backward);
  void ForgetTurns();
  // Gathers a unit that is absent.
  void Bring(ShardUnit& unit);
  // Begins to gather the unit that is used next and absent.
  void Prefetch();
  // Frees a unit that gives its place to another one.
  void Displace(ShardUnit& unit);
  // Whether units are freed to make room for others.
  bool Bounded() const;
  void MakeRoom();
  void FreeParts();
  // What the end of a forward pass could not throw.
  void ThrowUnsaid();
  // Waits for what an interrupted pass has left under way.
  void Settle();
  void ExpireAll();
  // Expires the units that an optimizer, or the program through one, may have changed.
  void ExpireSteppable();
  void Expire(ShardUnit& unit);
  // (collective) At `place`, after a backward pass that reduces until the shards are announced to
  // change, and before each forward pass of kFull: compares whether they are, and does the above if
  // those of some rank have changed since the parameters were gathered, or if a step follows on
  // that pass.
  // `before`: what this rank has gone through, for errors about ranks at different places.
  void CompareChanges(const std::string& place, const std::string& before);
  // What follows on the exchange. `compared`: whether ranks were comparing before it.
  void TakeChanges(const std::vector<std::string>& all, bool compared);
  // The same where it is due.
  void CompareBeforeForward(const std::string& before);
  // (collective) Throws what some rank has failed with, and so do all uses of the model until its
  // parameters are loaded.
  [[noreturn]] void ThrowFailure();
  // Before the program does `what`, which `compare` brings the ranks together for: throws where
  // this rank's parameters are not those of a whole step.
  void CheckBefore(const char* what, const std::function<void()>& compare);
  // A load of all parameters ends what ranks have failed with or announced alone.
  void BeginLoad(const std::map<std::string, at::Tensor>& values);
  // These have their values now.
  void EndLoad(const std::map<std::string, at::Tensor>& values);
  // Another number once this rank's shards of a unit have been written: by operators on them or by
  // Muster's optimizers. LibTorch's SGD writes `.data()`, which does not show.
  uint64_t Writes(const ShardUnit& unit) const;
  // Keeps them before the first gather of a unit; afterwards NoteWritten() notes if an operator has
  // written one of its shards.
  void KeepWrites(ShardUnit& unit) const;
  void NoteWritten();
  void ForgetWrites();
  void CheckTrained(const std::vector<std::string>& frames) const;
  std::string TrainedBits() const;
  // Gives the gradients of this pass up, before an error of all ranks.
  void DropGradients();
  // How many gradients each unit gets, as parameters require them now.
  void ExpectGradients();
  void OnGradient(size_t unit, size_t slice);
  // (collective) Before the first gather or gradient of a pass: compares what ranks are about to
  // do, under kFull and in closures, and knows then in which order the first pass that reduces does
  // so.
  void BeginBackward();
  // All ranks throw if they have not announced equally many changes, and so do all uses of the
  // model until its parameters are loaded.
  void TakeAnnouncements(const std::vector<uint32_t>& announced);
  void TakeAnnouncementsInBackward(const std::vector<uint32_t>& announced);
  void OpenPass();
  void ReduceDue();
  void ReduceNext();
  void ReduceUpTo(size_t end);
  // (collective) In the first pass that reduces: those that are complete on every rank.
  void ReduceComplete();
  void Reduce(size_t unit);
  void FinishReduction();
  // Does what is this rank's alone. If it throws, the rank goes on to reduce with the others, and
  // all throw at the end of the pass.
  void DoAlone(const std::function<void()>& body);
  // Has those shards of the unit updated that have their gradients. `rest`: also those of
  // parameters that this rank had no gradient for in this pass.
  void Update(ShardUnit& unit, bool rest);
  // `first`: the order of units was not known when the pass began. (collective then)
  void EndUpdates(const std::vector<at::Tensor>& trained, bool first);
  void CheckStepped(const char* what) const;
  // The name of a parameter that some rank has updated in this pass, and some rank has got a
  // gradient for after its unit was reduced; null: none.
  const std::string* LateAfterUpdate(const std::vector<uint32_t>& late) const;
  void ReduceLate(const std::vector<uint32_t>& late);
  void EndOfBackward();
  // (collective) Throws what DoAlone() of some ranks has thrown.
  [[noreturn]] void ThrowFailedAlone();
  // Returns the shards of what some rank had a gradient for in this pass.
  std::vector<at::Tensor> CheckOrder();
  void SyncBuffers();

  Comm& world_;
  Comm& shard_comm_;
  Comm* const replicas_;
  Comm* const reshard_;
  const ShardingOptions options_;
  const bool broadcast_buffers_;
  const std::vector<at::Tensor> buffers_;
  LocalComm alone_;  // divides the units that are not divided
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
  bool in_place_ = false;  // of some unit; all ranks alike
  // Units in place: all ranks have the shards that they had at the last gather.
  bool agreed_ = false;
  std::exception_ptr unsaid_;
  at::Tensor gradient_buffer_;  // of units that are reduced, one after the other; may be undefined
  bool open_ = false;           // a backward pass that reduces is under way
  // Such a pass has ended since the last gathers, so some optimizer may have stepped.
  bool stale_ = false;
  // Such a pass has ended, and ranks have not agreed yet that Expire() has followed: the shards may
  // have been changed by others. All ranks alike.
  bool comparing_ = false;
  uint32_t announced_ = 0;  // times that Expire() was called since ranks have compared it
  ShardFaults faults_;
  bool thrown_on_all_ = false;  // what the end of this backward pass throws
  // What DoAlone() has thrown in this backward pass; null: nothing.
  std::exception_ptr failed_alone_;
  bool begun_ = false;        // BeginBackward() has been called for this pass
  bool step_follows_ = true;  // after the pass that was begun last
  bool unseen_steps_ = false;
  bool in_closure_ = false;
  // The parameter of a shard that an operator has written since, unannounced; empty: none.
  std::string written_;
  uint64_t uses_ = 0;  // clock of last_use
  ReductionOrder reductions_{0};
  // The unit that this pass has turned to last, null: none yet; and whether the pass was backward.
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
  bool touched_ = false;                   // and some rank may have done so already
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARDED_MODEL_H_
