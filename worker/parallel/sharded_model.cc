#include "worker/parallel/sharded_model.h"

#include <algorithm>
#include <exception>
#include <functional>
#include <optional>
#include <unordered_set>
#include <utility>

#include "ATen/core/grad_mode.h"
#include "absl/types/span.h"
#include "base/log.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/graph_task.h"
#include "torch/csrc/autograd/variable.h"
#include "torch/nn/module.h"
#include "worker/collective/on_all.h"
#include "worker/collective/shared_parts.h"
#include "worker/parallel/coalesce.h"
#include "worker/parallel/meeting.h"
#include "worker/parallel/packed_numbers.h"
#include "worker/parallel/paged_storage.h"
#include "worker/parallel/pass_report.h"
#include "worker/parallel/same_model.h"
#include "worker/parallel/same_plan.h"

namespace muster {
namespace {

// The unit that is used, and one that is about to be freed or is gathered ahead.
constexpr int kGatheredUnits = 2;

// For gradients of smaller units a permanent buffer is not worth its memory.
constexpr int64_t kReachableBytes = 256 << 10;

// The operation that a rank cannot do if its part of OnAll() fails.
constexpr char kShard[] = "shard the model";

bool AllOnCpu(const std::vector<std::unique_ptr<ShardUnit>>& units) {
  return std::all_of(units.begin(), units.end(),
                     [](const auto& unit) { return unit->slices().front().tensor.is_cpu(); });
}

bool AllSuit(const std::vector<std::unique_ptr<ShardUnit>>& units, const CommQueue& queue) {
  return std::all_of(units.begin(), units.end(), [&](const auto& unit) {
    return queue.Suits(unit->slices().front().tensor.device());
  });
}

// The flags that a rank sends before a forward pass.
constexpr uint32_t kChanged = 1, kFailed = 2, kFailedInStep = 4;

// Throws this rank's error, if there is one, or stores it in `failure`.
void Report(const std::exception_ptr& mine, std::exception_ptr* failure) {
  if (mine == nullptr) return;
  if (failure == nullptr) std::rethrow_exception(mine);
  if (*failure == nullptr) *failure = mine;
}

bool InBackward() { return torch::autograd::get_current_graph_task_id() != -1; }

at::Tensor OnCpu(const at::Tensor& tensor) {
  const at::NoGradGuard no_grad;
  return at::empty(tensor.sizes(), tensor.options().device(at::kCPU)).copy_(tensor);
}

// Part of the name of a place at which ranks meet that have announced a change.
constexpr char kAfterAChange[] =
    " after a change of the parameters (optimizer.step(), load_state(), ema.apply() and the like)";

std::string WrittenBehind(const std::string& rank, const std::string& parameter) {
  return c10::str(
      rank, " has changed its part of parameter '", parameter,
      "' of a sharded model by an operator on the optimizer's tensors, and other ranks compute "
      "with the value that they have gathered before: write parameters inside "
      "accelerator.summon_full_params(), or between optimizer.step() and the next forward pass");
}

// A scope for a backward pass that updates. If the pass throws, its graph is destroyed before the
// program learns of the error, and with it this object, which waits for updates under way: the
// program may destroy the optimizer next.
class UpdatesOfAPass {
 public:
  explicit UpdatesOfAPass(std::shared_ptr<ShardUpdates> updates) : updates_(std::move(updates)) {}
  ~UpdatesOfAPass() {
    if (updates_ != nullptr) updates_->Settle();
  }
  UpdatesOfAPass(const UpdatesOfAPass&) = delete;
  UpdatesOfAPass& operator=(const UpdatesOfAPass&) = delete;
  // The normal end waits for the updates already.
  void Ended() { updates_ = nullptr; }

 private:
  std::shared_ptr<ShardUpdates> updates_;
};

// A counter that is increased for a scope, and decreased on every way out of it.
class Depth {
 public:
  explicit Depth(int& depth) : depth_(depth) { ++depth_; }
  ~Depth() { --depth_; }
  Depth(const Depth&) = delete;
  Depth& operator=(const Depth&) = delete;

 private:
  int& depth_;
};

}  // namespace

ShardedModel::ShardedModel(Comm& world, Comm& shard, Comm* replicas, torch::nn::Module* module,
                           std::vector<NamedParameter> parameters, std::vector<at::Tensor> buffers,
                           const ShardingOptions& options, bool broadcast_buffers,
                           std::shared_ptr<CommQueue> queue, const Materializer& materialize,
                           std::unique_ptr<PartStore> store, Comm* reshard,
                           std::unique_ptr<PartStore> gradients)
    : world_(world),
      shard_comm_(shard),
      replicas_(replicas),
      reshard_(reshard),
      options_(options),
      broadcast_buffers_(broadcast_buffers),
      buffers_(std::move(buffers)),
      store_(std::move(store)),
      gradient_store_(std::move(gradients)),
      faults_(world.rank(), world.size()),
      queue_(std::move(queue)) {
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  OnAll(world_, kShard, [&] {
    for (const NamedParameter& parameter : parameters) {
      CheckStores(parameter);
      TORCH_CHECK(parameter.tensor.is_floating_point() && parameter.tensor.layout() == at::kStrided,
                  "parameter '", parameter.name, "' is ", parameter.tensor.scalar_type(), " ",
                  parameter.tensor.layout(),
                  ": only dense floating-point parameters can be sharded; register it as a buffer, "
                  "or train without sharding");
      tensors.push_back(parameter.tensor);
      names.push_back(parameter.name);
    }
    CheckSeparateStorage(parameters, buffers_);
  });
  VerifySameModel(world_, tensors, names, std::vector<bool>(names.size(), false),
                  /*frozen_too=*/true);
  std::vector<PlannedUnit> plan;
  OnAll(world_, kShard, [&] { plan = PlanUnits(module, parameters, options_); });
  VerifySamePlan(world_, plan, options_,
                 {.ranks = shard_comm_.size(),
                  .stores_parts = store_ != nullptr,
                  .stores_gradients = gradient_store_ != nullptr});
  tensors.clear();
  parameters.clear();
  BroadcastCoalesced(world_, buffers_, 0);
  // Reserve before a parameter has become part of a unit: if the disk is full, nothing has changed.
  const std::vector<StoredUnit> stored = Reserve(plan);
  for (size_t i = 0; i < plan.size(); ++i) AddUnit(std::move(plan[i]), materialize, stored[i]);
  if (queue_ != nullptr && !AllSuit(units_, *queue_)) queue_ = nullptr;
  if (options_.overlap) {
    // The order of communication differs with and without a queue.
    const std::string mine = queue_ != nullptr ? "overlaps" : "does not overlap";
    int rank = 0;
    for (const std::string& other : world_.AllGatherBytes(mine)) {
      TORCH_CHECK(other == mine, "options.sharding.overlap: the model of rank ", world_.rank(), " ",
                  mine, " and that of rank ", rank, " ", other,
                  ": put it on the device of the process on every rank, before prepare()");
      ++rank;
    }
  }
  keep_copy_ = OnCpu;
  watch_ = std::make_unique<WeightWatch>(shards_);
  int64_t largest = 0;  // the bytes of the largest gradients
  for (const auto& unit : units_) {
    unit->set_queue(queue_.get());
    in_place_ = in_place_ || unit->in_place();
    if (!unit->whole()) largest = std::max(largest, unit->gradient_bytes());
  }
  // The backend's collectives work on this buffer in place. It is allocated once, because memory
  // that other ranks have mapped is reused for as long as it exists. Under kOptimizer gradients are
  // whole until the end of a backward pass, where the buffer would add the memory of one unit.
  if (options_.strategy != ShardingStrategy::kOptimizer && largest >= kReachableBytes &&
      AllOnCpu(units_) && RanksShareMemory(shard_comm_)) {
    gradient_buffer_ = AllocateReachable(shard_comm_, largest, at::kByte);
  }
  reductions_ = ReductionOrder(units_.size());
  ExpectGradients();
}

ShardedModel::~ShardedModel() {
  // Work beside the program must be done with the units first.
  if (updates_ != nullptr) updates_->Settle();
  if (reducing_ != nullptr) reducing_->AbandonReduction();
  for (const auto& unit : units_) unit->Settle();
  for (const auto& [tensor, hook] : hooks_) tensor.remove_hook(hook);
  for (const auto& unit : units_) {
    for (ShardUnit::Slice& slice : unit->slices()) {
      at::Tensor& grad = slice.tensor.mutable_grad();
      if (grad.is_same(ShardUnit::GradientMark())) grad.reset();
    }
  }
}

void ShardedModel::CheckStores(const NamedParameter& parameter) const {
  const auto check = [&](const PartStore* store, const char* option) {
    TORCH_CHECK(
        store == nullptr || parameter.tensor.is_meta() || store->Takes(parameter.tensor.device()),
        "parameter '", parameter.name, "' is on ", parameter.tensor.device(), ", and ", option,
        " is for those on the device of the process: put the whole model there before "
        "prepare(), or offload them to a disk");
  };
  check(store_.get(), "offload_parameters");
  check(gradient_store_.get(), "offload_gradients");
}

std::vector<StoredUnit> ShardedModel::Reserve(const std::vector<PlannedUnit>& plan) {
  std::vector<StoredUnit> stored(plan.size());
  PartStore* const shards = options_.strategy == ShardingStrategy::kFull ? store_.get() : nullptr;
  PartStore* const gradients = gradient_store_ != nullptr ? gradient_store_.get() : shards;
  if (shards == nullptr && gradients == nullptr) return stored;
  OnAll(world_, kShard, [&] {
    for (size_t i = 0; i < plan.size(); ++i) {
      if (plan[i].whole) continue;
      const uint64_t bytes = ShardUnit::PartBytes(plan[i].parameters, shard_comm_.size());
      const auto reserve = [bytes](PartStore* store, StoredPages& among) {
        return StoredPart{.store = store, .place = store->Reserve(bytes), .among = &among};
      };
      if (shards != nullptr) stored[i].shards = reserve(shards, stored_parts_);
      const bool trained = std::any_of(
          plan[i].parameters.begin(), plan[i].parameters.end(),
          [](const NamedParameter& parameter) { return parameter.tensor.requires_grad(); });
      if (trained) stored[i].gradients = reserve(gradients, stored_gradients_);
    }
  });
  // Allocate after the ranks of a machine have all seen how much memory it has left.
  OnAll(world_, kShard, [&] {
    if (shards != nullptr) shards->Take();
    if (gradients != nullptr && gradients != shards) gradients->Take();
  });
  return stored;
}

void ShardedModel::AddUnit(PlannedUnit planned, const Materializer& materialize,
                           StoredUnit stored) {
  const size_t index = units_.size();
  std::vector<at::Tensor> values;
  for (const NamedParameter& parameter : planned.parameters) {
    // Rank 0 provides the values for all ranks.
    if (parameter.tensor.is_meta()) materialize(parameter, world_.rank() == 0);
    values.push_back(parameter.tensor);
  }
  BroadcastCoalesced(world_, values, 0);
  values.clear();
  const auto use = [this](ShardUnit& unit, bool write, const char* op) { Use(unit, write, op); };
  if (planned.whole) {
    units_.push_back(std::make_unique<ShardUnit>(std::move(planned.name),
                                                 std::move(planned.parameters), alone_,
                                                 /*frees=*/false, std::nullopt, std::nullopt, use));
    units_.back()->set_whole();
  } else {
    units_.push_back(std::make_unique<ShardUnit>(
        std::move(planned.name), std::move(planned.parameters), shard_comm_,
        options_.strategy == ShardingStrategy::kFull, options_.parameter_dtype,
        options_.reduce_dtype, use, stored, reshard_));
  }
  units_.back()->index = static_cast<uint32_t>(index);
  const std::vector<ShardUnit::Slice>& slices = units_.back()->slices();
  for (size_t i = 0; i < slices.size(); ++i) {
    const ShardUnit::Slice& slice = slices[i];
    shards_.push_back(slice.shard);
    shard_of_[slice.tensor.unsafeGetTensorImpl()] = slice.shard;
    name_of_[slice.shard.unsafeGetTensorImpl()] = slice.name;
    places_[slice.name] = {index, i};
    if (slice.tensor.requires_grad()) {
      hooks_.emplace_back(slice.tensor,
                          slice.tensor.register_hook([this, index, i](at::Tensor gradient) {
                            if (gradient.defined()) units_[index]->GradientArrives(i);
                          }));
      observers_.Add(slice.tensor, [this, index, i](const at::Tensor&) { OnGradient(index, i); });
    }
  }
  // Units are freed one after the other, so that no second copy of the model exists during
  // construction.
  units_.back()->Expire();
}

void ShardedModel::BeginForward(bool communicate, bool step_follows) {
  ThrowUnsaid();
  for (const auto& unit : units_) {
    for (const ShardUnit::Slice& slice : unit->slices()) {
      TORCH_CHECK(slice.shard.requires_grad() || !slice.tensor.requires_grad(), "parameter '",
                  slice.name,
                  "' of a sharded model was frozen when the model was prepared, and has "
                  "requires_grad now: prepare the model with all parameters that are trained "
                  "later, and freeze them afterwards");
      TORCH_CHECK(
          IsPaged(slice.tensor), "parameter '", slice.name,
          "' of a sharded model has been given other memory since prepare() (set_data(), "
          "module->to()): its values are divided among the ranks, and what is trained would "
          "not be what the model uses; convert the model before prepare(), and write "
          "values inside accelerator.summon_full_params()");
    }
  }
  ExpectGradients();
  if (!InBackward()) {
    // A pass that threw has left operations under way. Other ranks may have come to its end.
    Settle();
    const std::string before = Before();
    comparing_ = comparing_ || open_;
    open_ = updating_ = false;
    for (const auto& unit : units_) unit->set_any_updated(false);
    CheckBefore("a forward pass", [&] {
      ForgetTurns();
      if (backward_) forward_turns_.Begin();
      backward_ = false;
      noting_ = at::GradMode::is_enabled();
      for (const auto& unit : units_) unit->ForgetUnusedGradients();
      // Under kFull all ranks are in this pass, whose gathers wait for them anyway.
      if (summons_ == 0) {
        // Freeing may fail on this rank alone, for example if its disk is full: the others then
        // learn of it in the comparison, instead of waiting in a gather.
        std::exception_ptr unfreed;
        try {
          FreeParts();
        } catch (...) {
          unfreed = std::current_exception();
          faults_.NoteBeginningOfForward(unfreed);
        }
        CompareBeforeForward(before);
        if (unfreed != nullptr) std::rethrow_exception(unfreed);
        return;
      }
      FreeParts();
      for (const auto& unit : units_) KeepWrites(*unit);
      NoteWritten();
      TORCH_CHECK(written_.empty() || noting_, WrittenBehind("this rank", written_));
    });
    step_follows_ = step_follows;
    begun_ = false;
  }
  // With one rank there is nothing to wait for, and no gradient is left behind.
  const bool before = std::exchange(communicate_, communicate || world_.size() == 1);
  if (communicate_ != before) begun_ = false;
  ++forwards_;
}

void ShardedModel::ExpectGradients() {
  for (const auto& unit : units_) {
    const auto& slices = unit->slices();
    const auto trained =
        std::count_if(slices.begin(), slices.end(),
                      [](const ShardUnit::Slice& slice) { return slice.tensor.requires_grad(); });
    reductions_.Expect(unit->index, static_cast<int>(trained));
  }
}

void ShardedModel::CompareBeforeForward(const std::string& before) {
  const std::string place = "the beginning of a forward pass";
  if (comparing_ || options_.strategy == ShardingStrategy::kFull) {
    CompareChanges(place, before);
  } else if (announced_ != 0 || !faults_.own().empty()) {
    // The gathers that follow would wait for ranks that have not announced the change, and those
    // ranks would wait for something else. Their next meeting has another place, so both throw.
    CompareChanges(c10::str(place, kAfterAChange), before);
  }
  NoteWritten();
  // In training all ranks throw at the end of the backward pass. In evaluation there is no exchange
  // to inform the ranks that have written nothing. If all ranks have written, it is a change like
  // any other.
  if (!written_.empty() && !noting_) {
    try {
      CompareChanges(c10::str(place, " of evaluation after it has changed its part of a parameter"),
                     before);
    } catch (c10::Error& error) {
      error.add_context(WrittenBehind("this rank", written_));
      throw;
    }
  }
}

void ShardedModel::EndForward() {
  --forwards_;
  if (forwards_ > 0 || InBackward()) return;
  // Some expected gathers were not used. After an error other ranks may not come to these gathers,
  // so do not wait now.
  if (std::uncaught_exceptions() > 0) return;
  for (const auto& unit : units_) unit->Settle();
  // The next operation of this rank may change shards that others are reading in their pass.
  if (!in_place_ || summons_ > 0) return;
  for (const auto& unit : units_) {
    if (unit->in_place() && unit->pins() == 0) unit->Free();
  }
  try {
    MeetAt(shard_comm_, "the end of a forward pass");
  } catch (const std::exception& error) {
    // Callers are at the end of a scope, where nothing may be thrown.
    unsaid_ = std::current_exception();
    MUSTER_LOG(Error) << "at the end of a forward pass of a sharded model: " << error.what();
  }
}

void ShardedModel::AwaitReaders() {
  if (in_place_ && summons_ == 0) MeetAt(shard_comm_, "an optimizer's step", "", faults_.own());
}

void ShardedModel::ThrowUnsaid() {
  if (unsaid_ != nullptr) std::rethrow_exception(std::exchange(unsaid_, nullptr));
}

void ShardedModel::Settle() {
  if (reducing_ != nullptr) std::exchange(reducing_, nullptr)->SettleReduction();
  for (const auto& unit : units_) unit->Settle();
  if (updates_ != nullptr) updates_->Settle();
}

void ShardedModel::CheckStepped(const char* what) const {
  if (updates_ != nullptr) updates_->CheckStepped(*this, what);
}

void ShardedModel::CheckBefore(const char* what, const std::function<void()>& compare) {
  CheckHasValues();
  faults_.CheckNotMixed();
  // When ranks compare, some may have failed without the others knowing.
  const bool meets = comparing_ || !faults_.own().empty();
  if (!meets) CheckStepped(what);
  compare();
  if (meets) CheckStepped(what);
}

std::string ShardedModel::Before() const {
  if (!Interrupted()) return faults_.own();
  return c10::str("an exception has ended the backward pass of rank ", world_.rank());
}

bool ShardedModel::Interrupted() const { return faults_.own().empty() && open_ && !InBackward(); }

void ShardedModel::SetWithoutValues(const std::vector<std::string>& names) {
  // For tied weights, the first name.
  std::vector<std::string> known;
  for (const std::string& name : names) {
    if (places_.find(name) != places_.end()) known.push_back(name);
  }
  faults_.SetWithoutValues(std::move(known));
}

void ShardedModel::CheckNotMixedHere() const {
  CheckHasValues();
  faults_.CheckNotMixedHere();
}

ShardedModel::Failures ShardedModel::ForgetFailures() {
  const Failures failures = {.failures = faults_.Forget(),
                             .announced = std::exchange(announced_, 0)};
  // As after any change: some ranks may have freed what others have gathered.
  comparing_ = true;
  if (summons_ == 0) ExpireAll();
  return failures;
}

void ShardedModel::RestoreFailures(const Failures& failures) {
  faults_.Restore(failures.failures);
  announced_ += failures.announced;
}

void ShardedModel::NoteFailedStep(const std::exception_ptr& thrown) {
  // If a step inside summon_full_params() was refused, nothing has changed.
  if (summons_ == 0) faults_.NoteStep(thrown);
}

void ShardedModel::Use(ShardUnit& unit, bool write, const char* op) {
  CheckHasValues();
  if (unit.whole()) return;  // every rank has it, as in data parallelism
  ThrowUnsaid();
  TORCH_CHECK(!write || summons_ > 0, op, " writes a parameter of unit '", unit.name(),
              "', which is sharded: the ranks would lose the change. Change parameters before "
              "prepare(), or inside accelerator.summon_full_params()");
  if (write) unit.NoteWrite();
  unit.last_use = ++uses_;
  const bool backward = InBackward();
  const bool inside = forwards_ > 0 || backward;
  const bool turns = inside && (turn_of_ != &unit || backward_ != backward);
  if (turns) TurnTo(unit, backward);
  if (!unit.gathered() || (!inside && summons_ == 0 && stale_)) {
    TORCH_CHECK(inside, op, " uses a parameter of unit '", unit.name(),
                "' outside of the model's forward and backward passes, where its values are "
                "divided among the ranks: call model(...), model.call(...), or "
                "accelerator.summon_full_params()",
                std::string(op).ends_with("_like")
                    ? ". If this is the constructor of an optimizer that reads the parameters, as "
                      "torch::optim::Adagrad's does, make it before prepare()"
                    : "");
    Bring(unit);
  }
  if (turns) Prefetch();
  // After the gather ahead, which depends only on earlier uses.
  unit.NoteUse();
}

void ShardedModel::Bring(ShardUnit& unit) {
  if (unit.in_place()) {
    // One meeting for the shards of all units, because a change of shards expires all units.
    if (!agreed_) {
      history_.AddGather(unit.index);
      unit.AwaitShards();
      agreed_ = true;
    }
    KeepWrites(unit);
    return unit.Attach();
  }
  if (options_.strategy == ShardingStrategy::kFull && InBackward()) {
    BeginBackward();
    if (communicate_ && !reductions_.known() && !in_place_) ReduceComplete();
  } else if (InBackward() && announced_ != 0) {
    // Ranks that have not announced the change gather nothing here (see CompareBeforeForward).
    comparing_ = true;
    std::vector<uint32_t> announced;
    for (const std::string& other : MeetAll(
             world_, shard_comm_, c10::str("a backward pass", kAfterAChange), Pack({announced_}))) {
      announced.push_back(NumberIn(other, 0));
    }
    announced_ = 0;
    TakeAnnouncementsInBackward(announced);
  }
  MakeRoom();
  history_.AddGather(unit.index);
  KeepWrites(unit);
  unit.Gather();
}

void ShardedModel::TurnTo(ShardUnit& unit, bool backward) {
  // This comes first, because the queue is then done with earlier gradients.
  if (unit.coming()) unit.Gather();
  if (backward && !reductions_.HasTurnedTo(unit.index)) {
    ReduceDue();
    reductions_.TurnTo(unit.index);
  }
  if (backward && !backward_) backward_turns_.Begin();
  turn_of_ = &unit;
  backward_ = backward;
  (backward ? backward_turns_ : forward_turns_).Turn(unit.index, backward || noting_);
}

void ShardedModel::ForgetTurns() {
  turn_of_ = nullptr;
  reductions_.ForgetTurns();
}

void ShardedModel::Prefetch() {
  if (queue_ == nullptr || summons_ > 0) return;
  for (const auto& unit : units_) {
    if (unit->coming()) return;
  }
  const absl::Span<const uint32_t> turns = (backward_ ? backward_turns_ : forward_turns_).Coming();
  const auto next = std::find_if(turns.begin(), turns.end(), [&](uint32_t unit) {
    return !units_[unit]->present() && !units_[unit]->in_place();
  });
  if (next == turns.end()) return;
  while (Bounded()) {
    // Units that are used before the next one stay.
    int present = 0;
    ShardUnit* oldest = nullptr;
    for (const auto& unit : units_) {
      if (!unit->present() || !unit->frees()) continue;
      ++present;
      if (unit->pins() > 0 || unit.get() == turn_of_) continue;
      if (std::find(turns.begin(), next, unit->index) != next) continue;
      if (oldest == nullptr || unit->last_use < oldest->last_use) oldest = unit.get();
    }
    if (present < kGatheredUnits) break;
    if (oldest == nullptr) return;
    Displace(*oldest);
  }
  ShardUnit& unit = *units_[*next];
  // If another unit is used instead, this one is freed first.
  unit.last_use = ++uses_;
  turn_of_->last_use = ++uses_;
  history_.AddGather(unit.index);
  KeepWrites(unit);
  unit.StartGather();
}

void ShardedModel::Displace(ShardUnit& unit) {
  if (!backward_ && noting_) return unit.FreeUntilBackward();
  unit.Free();
}

bool ShardedModel::Bounded() const {
  if (options_.strategy != ShardingStrategy::kFull || summons_ > 0) return false;
  return options_.reshard_after_forward || InBackward();
}

void ShardedModel::MakeRoom() {
  while (Bounded()) {
    int present = 0;
    ShardUnit* oldest = nullptr;
    for (const auto& unit : units_) {
      if (!unit->present() || !unit->frees()) continue;
      ++present;
      if (unit->pins() > 0) continue;
      if (oldest == nullptr || unit->last_use < oldest->last_use) oldest = unit.get();
    }
    if (present < kGatheredUnits || oldest == nullptr) return;
    Displace(*oldest);
  }
}

void ShardedModel::FreeParts() {
  if (store_ == nullptr) return;
  for (const auto& unit : units_) unit->FreePart();
}

void ShardedModel::Expire() {
  ThrowUnsaid();
  CheckNotSummoned();
  ++announced_;
  ExpireAll();
}

void ShardedModel::CheckNotSummoned() const {
  TORCH_CHECK(summons_ == 0,
              "the parameters of a sharded model are about to change (optimizer.step(), "
              "load_state() or load_weights()) inside of summon_full_params(), which holds their "
              "values: do it before or after that scope");
}

void ShardedModel::Hold(const std::vector<at::Tensor>& shards) {
  for (const at::Tensor& shard : shards) {
    const std::string* const name = NameOf(shard);
    if (name != nullptr) units_[PlaceOf(*name).first]->held = true;
  }
}

void ShardedModel::ExpireStepped(const std::vector<at::Tensor>& shards) {
  ThrowUnsaid();
  CheckNotSummoned();
  ++announced_;
  Hold(shards);
  ExpireSteppable();
}

void ShardedModel::Expire(ShardUnit& unit) {
  unit.writes.reset();
  if (!written_.empty() && PlaceOf(written_).first == unit.index) written_.clear();
  unit.Expire();
}

void ShardedModel::ExpireAll() {
  Settle();
  stale_ = agreed_ = false;
  for (const auto& unit : units_) Expire(*unit);
}

void ShardedModel::ExpireSteppable() {
  Settle();
  stale_ = agreed_ = false;
  for (const auto& unit : units_) {
    // The program's `.data()` writes after a step leave no trace either, even in frozen parameters.
    if (unit->trained || unit->held) Expire(*unit);
  }
}

uint64_t ShardedModel::Writes(const ShardUnit& unit) const {
  // The slices share memory.
  uint64_t writes = watch_->changes(unit.slices().front().shard);
  for (const ShardUnit::Slice& slice : unit.slices()) {
    // Shards of a model that was prepared in inference mode have no versions, and are not trained.
    if (!slice.shard.is_inference()) writes += static_cast<uint64_t>(slice.shard._version());
  }
  return writes;
}

std::string ShardedModel::ChangesHere() const {
  // Ranks whose parts of all trained parameters are empty have noticed nothing.
  const bool mine = (comparing_ && unseen_steps_) ||
                    std::any_of(units_.begin(), units_.end(), [this](const auto& unit) {
                      return unit->writes.has_value() && *unit->writes != Writes(*unit);
                    });
  const uint32_t flags = (mine ? kChanged : 0) + (faults_.own().empty() ? 0 : kFailed) +
                         (faults_.in_step() ? kFailedInStep : 0);
  return Pack({announced_, flags});
}

void ShardedModel::CompareChanges(const std::string& place, const std::string& before) {
  const std::string mine = ChangesHere();
  // True on all ranks that compare what they have gathered. Ranks that miss each other here compare
  // again.
  const bool compared = std::exchange(comparing_, true);
  TakeChanges(MeetAll(world_, shard_comm_, place, mine, before), compared);
}

void ShardedModel::TakeChanges(const std::vector<std::string>& all, bool compared) {
  std::vector<uint32_t> announced;
  bool changed = false, in_step = false;
  int failed = 0;
  for (const std::string& bytes : all) {
    announced.push_back(NumberIn(bytes, 0));
    changed = changed || (NumberIn(bytes, 1) & kChanged) != 0;
    failed += (NumberIn(bytes, 1) & kFailed) != 0 ? 1 : 0;
    in_step = in_step || (NumberIn(bytes, 1) & kFailedInStep) != 0;
  }
  announced_ = 0;
  comparing_ = compared && announced[0] == 0;
  if (changed) {
    ExpireAll();
  } else if (stale_) {
    ExpireSteppable();
  }
  try {
    // If all ranks have failed in a backward pass, all know of it, and none has stepped since. A
    // failed step leaves each rank in a different state.
    if (in_step || (failed > 0 && failed < world_.size())) ThrowFailure();
    faults_.ForgetOwn();
    TakeAnnouncements(announced);
  } catch (...) {
    // A program that continues finds the same state on every rank.
    comparing_ = false;
    ExpireAll();
    throw;
  }
}

void ShardedModel::ThrowFailure() {
  const std::vector<std::string> all = world_.AllGatherBytes(faults_.own());
  ForgetFailures();
  history_.Clear();
  DropGradients();
  // This makes the set of models that updates_ blocks the same on all ranks, whichever model each
  // rank uses next.
  if (updates_ != nullptr) updates_->Touch();
  for (const std::string& failure : all) {
    if (faults_.mixed().empty()) faults_.SetMixed(failure);
  }
  TORCH_CHECK(false, faults_.mixed());
}

namespace {

std::vector<int64_t> VersionsOf(const ShardUnit& unit) {
  std::vector<int64_t> versions;
  for (const ShardUnit::Slice& slice : unit.slices()) {
    versions.push_back(slice.shard.is_inference() ? 0 : slice.shard._version());
  }
  return versions;
}

}  // namespace

void ShardedModel::KeepWrites(ShardUnit& unit) const {
  // The shards of a whole unit are the values that all ranks use.
  if (unit.writes.has_value() || unit.whole()) return;
  unit.writes = Writes(unit);
  unit.versions = VersionsOf(unit);
}

void ShardedModel::NoteWritten() {
  for (const auto& unit : units_) {
    if (!unit->writes.has_value()) continue;
    const std::vector<int64_t> versions = VersionsOf(*unit);
    for (size_t i = 0; i < versions.size(); ++i) {
      if (versions[i] == unit->versions[i]) continue;
      if (written_.empty()) written_ = unit->slices()[i].name;
    }
  }
}

void ShardedModel::ForgetWrites() {
  for (const auto& unit : units_) unit->writes.reset();
  written_.clear();
}

void ShardedModel::MarkChanged(const std::vector<at::Tensor>& shards) {
  for (const at::Tensor& shard : shards) {
    const std::string* const name = NameOf(shard);
    if (name == nullptr) continue;
    const auto& [unit, slice] = PlaceOf(*name);
    torch::autograd::impl::bump_version(units_[unit]->slices()[slice].tensor);
  }
  FreeParts();
}

at::Tensor ShardedModel::ShardOf(const at::Tensor& parameter) const {
  const auto it = shard_of_.find(parameter.unsafeGetTensorImpl());
  return it == shard_of_.end() ? at::Tensor() : it->second;
}

const std::string* ShardedModel::NameOf(const at::Tensor& shard) const {
  const auto it = name_of_.find(shard.unsafeGetTensorImpl());
  return it == name_of_.end() ? nullptr : &it->second;
}

bool ShardedModel::IsWhole(const at::Tensor& shard) const {
  const std::string* const name = NameOf(shard);
  return name != nullptr && units_[PlaceOf(*name).first]->whole();
}

void ShardedModel::OpenPass() {
  if (open_) return;
  updating_ = updates_ != nullptr && updates_->Begin(*this);
  touched_ = false;
  failed_alone_ = nullptr;
  open_ = true;
  reductions_.BeginPass();
  for (const auto& unit : units_) {
    unit->set_any_updated(false);
    for (ShardUnit::Slice& slice : unit->slices()) {
      slice.came = slice.updated = slice.late = false;
    }
  }
  const auto pass = std::make_shared<UpdatesOfAPass>(updating_ ? updates_ : nullptr);
  AtEndOfBackward([this, pass] {
    EndOfBackward();
    pass->Ended();
  });
}

void ShardedModel::OnGradient(size_t index, size_t slice) {
  ShardUnit& unit = *units_[index];
  // A pass that only accumulates gradients and gathers nothing is compared as well: otherwise the
  // next gather would meet another rank's reduction. Units in place are not gathered.
  const bool gathers = options_.strategy == ShardingStrategy::kFull && !in_place_;
  if (communicate_ || gathers) BeginBackward();
  if (!communicate_) return unit.KeepPending(slice);
  OpenPass();
  // A function may return no gradient: that completes the unit, but the optimizer does not use it.
  ShardUnit::Slice& to = unit.slices()[slice];
  const at::Tensor& grad = to.tensor.grad();
  if (grad.defined() && !grad.is_same(ShardUnit::GradientMark())) {
    to.used = to.came = true;
    if (reductions_.NoteUsed(index)) to.late = true;
  }
  if (!reductions_.Arrive(index)) return;
  // ZeRO-1 keeps the gradients until all have arrived, unless an optimizer uses them at once;
  // ZeRO-3 keeps them until the next unit's turn.
  const bool at_once = options_.strategy == ShardingStrategy::kGradients ||
                       (updating_ && options_.strategy == ShardingStrategy::kOptimizer);
  if (!at_once) return;
  while (reductions_.NextIsComplete()) ReduceNext();
}

void ShardedModel::ReduceDue() {
  if (!open_ || options_.strategy != ShardingStrategy::kFull) return;
  if (!reductions_.known()) {
    // If units are gathered, all ranks must be at the same gather.
    if (in_place_) ReduceUpTo(reductions_.Complete());
    return;
  }
  while (reductions_.NextIsDue()) ReduceNext();
}

void ShardedModel::ReduceUpTo(size_t end) {
  while (reductions_.taken() < end) ReduceNext();
}

void ShardedModel::ReduceComplete() {
  const size_t complete = open_ ? reductions_.Complete() : reductions_.taken();
  size_t end = reductions_.size();
  for (const std::string& other :
       MeetAll(world_, shard_comm_, "a gather in the first backward pass",
               Pack({static_cast<uint32_t>(complete)}))) {
    end = std::min<size_t>(end, NumberIn(other, 0));
  }
  ReduceUpTo(end);
}

void ShardedModel::BeginBackward() {
  if (std::exchange(begun_, true)) return;
  // In a closure, a rank that has failed between its forward and its backward pass is at the
  // closure's end.
  if (options_.strategy == ShardingStrategy::kFull || in_closure_) {
    const PassIntention mine = {.reduces = communicate_, .step_follows = step_follows_};
    std::vector<uint32_t> all, announced;
    for (const std::string& other : MeetAll(world_, shard_comm_, "the beginning of a backward pass",
                                            Pack({mine.Packed(), announced_}))) {
      all.push_back(NumberIn(other, 0));
      announced.push_back(NumberIn(other, 1));
    }
    announced_ = 0;
    TakeAnnouncementsInBackward(announced);
    CheckIntentions(all);
  }
  if (communicate_ && !reductions_.known()) {
    const std::vector<uint32_t> mine = reductions_.FirstProposal(forward_turns_.noted());
    reductions_.TakeFirst(Unpack(world_.BroadcastBytes(Pack(mine), 0)));
  }
}

void ShardedModel::TakeAnnouncements(const std::vector<uint32_t>& announced) {
  try {
    CheckAnnouncements(announced);
  } catch (const c10::Error& error) {
    faults_.SetMixed(error.what_without_backtrace());
    throw;
  }
}

void ShardedModel::TakeAnnouncementsInBackward(const std::vector<uint32_t>& announced) {
  try {
    TakeAnnouncements(announced);
  } catch (...) {
    // Some ranks have freed what others have gathered.
    ExpireAll();
    throw;
  }
}

void ShardedModel::ReduceNext() {
  const size_t index = reductions_.Next();
  // A unit that expects no gradients was frozen; CheckOrder() has compared that.
  if (reductions_.ExpectsAny(index)) Reduce(index);
}

void ShardedModel::Reduce(size_t index) {
  // One reduction at a time bounds the memory, and keeps one order of sums.
  FinishReduction();
  ShardUnit& unit = *units_[index];
  history_.AddReduction(unit.index);
  // Free it before the buffer for the gradients is allocated.
  if (options_.strategy == ShardingStrategy::kFull && unit.pins() == 0 && summons_ == 0) {
    unit.Free();
  }
  // A whole unit keeps the tensor that it reduces, so it does not use the common buffer.
  unit.StartReduction(1.0 / world_.size(), unit.whole() ? &world_ : replicas_,
                      unit.whole() ? at::Tensor() : gradient_buffer_);
  reducing_ = &unit;
  // Without a queue the reduction is done by now.
  if (updating_ && queue_ == nullptr) FinishReduction();
}

void ShardedModel::FinishReduction() {
  if (reducing_ == nullptr) return;
  ShardUnit& unit = *std::exchange(reducing_, nullptr);
  at::Tensor mine = unit.FinishReduction();
  DoAlone([&] { unit.AddGradients(std::move(mine), /*in_memory=*/updating_); });
  Update(unit, /*rest=*/false);
}

void ShardedModel::DoAlone(const std::function<void()>& body) {
  if (failed_alone_ != nullptr) return;
  try {
    body();
  } catch (...) {
    failed_alone_ = std::current_exception();
  }
}

void ShardedModel::Update(ShardUnit& unit, bool rest) {
  if (!updating_) return;
  // In the first pass it is not known yet which parameters get a second gradient: all updates wait
  // for its end.
  if (!rest && !reductions_.known()) return;
  touched_ = true;
  updates_->Touch();
  std::vector<at::Tensor> shards;
  for (ShardUnit::Slice& slice : unit.slices()) {
    // Parameters for which no rank had a gradient are left alone, which only the end of the pass
    // shows. Parameters that only have gradients of earlier micro-steps may still be used in this
    // pass.
    if (slice.updated || (!rest && !slice.came)) continue;
    if (rest && !slice.shard.grad().defined()) continue;
    slice.updated = true;
    // A graph with the old values throws if the backward pass comes to it.
    torch::autograd::impl::bump_version(slice.tensor);
    // If it is undefined, other ranks have the whole parameter.
    if (slice.shard.grad().defined()) shards.push_back(slice.shard);
  }
  unit.set_any_updated(true);
  if (!shards.empty()) DoAlone([&] { updates_->Update(std::move(shards)); });
}

void ShardedModel::EndUpdates(const std::vector<at::Tensor>& trained, bool first) {
  if (!updating_) return;
  for (const auto& unit : units_) {
    for (const bool rest : {false, true}) Update(*unit, rest);
  }
  // Updates on another thread changed the shards.
  for (const auto& unit : units_) {
    if (unit->trained) unit->writes.reset();
  }
  updating_ = false;
  for (const auto& unit : units_) unit->set_any_updated(false);
  DoAlone([&] { updates_->End(*this, trained); });
  // If one of the few remaining updates fails, only this rank throws, as for gradients that came
  // late.
  if (!first) return;
  // In the first pass all updates come after the comparison at its end, and they allocate the
  // memory for the optimizers' states.
  bool failed = false;
  for (const std::string& other :
       MeetAll(world_, shard_comm_, "the end of the updates of a first backward pass",
               failed_alone_ == nullptr ? "" : "failed")) {
    failed = failed || !other.empty();
  }
  if (!failed) return;
  thrown_on_all_ = true;
  DropGradients();
  updates_->Touch();
  ThrowFailedAlone();
}

void ShardedModel::EndOfBackward() {
  open_ = false;
  stale_ = stale_ || step_follows_ || options_.strategy == ShardingStrategy::kFull;
  comparing_ = true;
  agreed_ = begun_ = false;
  // Updates count as writes, too.
  if (!updating_) NoteWritten();
  thrown_on_all_ = false;
  try {
    ReduceUpTo(reductions_.size());
    FinishReduction();
    const bool first = !reductions_.known();
    if (first) {
      const std::vector<uint32_t> mine = reductions_.Proposal(/*once=*/updates_ != nullptr);
      reductions_.Take(Unpack(world_.BroadcastBytes(Pack(mine), 0)));
    }
    for (const auto& unit : units_) unit->Settle();
    if (updating_) DoAlone([this] { updates_->Await(); });
    EndUpdates(CheckOrder(), first);
    ForgetTurns();
    SyncBuffers();
    // This comes after the last exchange with the others, which do not know of the error.
    if (failed_alone_ != nullptr) std::rethrow_exception(std::exchange(failed_alone_, nullptr));
  } catch (...) {
    if (!thrown_on_all_) {
      // Others may continue and step: they learn of the failure when the ranks meet next.
      faults_.NoteEndOfBackward(std::current_exception());
      history_.Clear();
      DropGradients();
    }
    throw;
  }
  if (options_.strategy == ShardingStrategy::kFull && summons_ == 0) {
    for (const auto& unit : units_) {
      if (unit->pins() == 0) unit->Free();
    }
  }
}

const std::string* ShardedModel::LateAfterUpdate(const std::vector<uint32_t>& late) const {
  // All ranks know the late units.
  std::string mine;
  for (const uint32_t index : late) {
    for (const ShardUnit::Slice& slice : units_[index]->slices()) {
      mine += static_cast<char>((slice.updated ? 1 : 0) + (slice.late ? 2 : 0));
    }
  }
  std::string any(mine.size(), '\0');
  for (const std::string& other : world_.AllGatherBytes(mine)) {
    for (size_t i = 0; i < any.size(); ++i) any[i] = static_cast<char>(any[i] | other[i]);
  }
  size_t i = 0;
  for (const uint32_t index : late) {
    for (const ShardUnit::Slice& slice : units_[index]->slices()) {
      if (any[i++] == 3) return &slice.name;
    }
  }
  return nullptr;
}

void ShardedModel::ReduceLate(const std::vector<uint32_t>& late) {
  const std::string* const in_vain = updating_ && !late.empty() ? LateAfterUpdate(late) : nullptr;
  for (const uint32_t index : late) {
    if (in_vain == nullptr) {
      Reduce(index);
      FinishReduction();
    }
    // From now on the unit waits for all of its gradients, and so do the units after it.
    reductions_.MoveToTheEnd(index);
  }
  if (in_vain == nullptr) return;
  thrown_on_all_ = true;
  DropGradients();
  TORCH_CHECK(
      false, "a gradient of parameter '", *in_vain,
      "' came in a backward pass after the optimizer had updated it "
      "(options.sharding.optimizer_in_backward), which a rank does that has one when its "
      "unit is reduced, in the order of the first step: the model has changed in part; call "
      "load_state(). From now on the unit is reduced at the end of the pass");
}

std::string ShardedModel::TrainedBits() const {
  std::string bits;
  for (const auto& unit : units_) {
    for (const ShardUnit::Slice& slice : unit->slices()) {
      bits += slice.tensor.requires_grad() ? '1' : '0';
    }
  }
  return bits;
}

void ShardedModel::CheckTrained(const std::vector<std::string>& bits) const {
  for (size_t rank = 1; rank < bits.size(); ++rank) {
    const auto [mine, other] = std::mismatch(bits[0].begin(), bits[0].end(), bits[rank].begin());
    if (mine == bits[0].end()) continue;
    auto number = static_cast<size_t>(mine - bits[0].begin());
    for (const auto& unit : units_) {
      TORCH_CHECK(number >= unit->slices().size(), "parameter '", unit->slices()[number].name,
                  "' of a sharded model is ", *mine == '1' ? "trained" : "frozen",
                  " on rank 0 and ", *other == '1' ? "trained" : "frozen", " on rank ", rank,
                  ": call set_requires_grad() on all ranks alike");
      number -= unit->slices().size();
    }
  }
}

void ShardedModel::DropGradients() {
  if (updates_ != nullptr) updates_->Settle();
  for (const auto& unit : units_) {
    for (ShardUnit::Slice& slice : unit->slices()) {
      slice.pending.reset();
      slice.tensor.mutable_grad().reset();
      slice.shard.mutable_grad().reset();
      slice.marked = slice.used = slice.fresh = false;
    }
  }
  if (summons_ == 0) ExpireAll();
}

std::vector<at::Tensor> ShardedModel::CheckOrder() {
  // It has the same length on every rank in a program without errors, because it is part of the
  // exchange.
  const std::string trained = TrainedBits();
  NumberDigest trained_digest, turns_digest;
  for (const char bit : trained) trained_digest.Add(static_cast<uint32_t>(bit));
  for (const UnitTurns* turns : {&forward_turns_, &backward_turns_}) {
    for (const uint32_t unit : turns->noted()) turns_digest.Add(unit + 1);
    turns_digest.Add(0);
  }
  const std::string written = written_;
  const PassIntention intention = {.reduces = true, .step_follows = step_follows_};
  PassReport mine = {.history = history_.digest(),
                     .events = history_.size(),
                     .trained = trained_digest.value(),
                     .turns = turns_digest.value(),
                     .intention = intention.Packed(),
                     .announced = announced_,
                     .written = !written.empty(),
                     .failed = failed_alone_ != nullptr,
                     .late = reductions_.Late(),
                     .unused = {}};
  uint32_t number = 0;
  for (const auto& unit : units_) {
    for (const ShardUnit::Slice& slice : unit->slices()) {
      // A pass that updates also uses the gradients of earlier passes, of which only ranks with a
      // part know.
      const bool left = updating_ && !slice.used && !slice.fresh && slice.shard.grad().defined() &&
                        !slice.shard.grad().is_same(ShardUnit::UsedGradientMark());
      if ((updating_ || slice.tensor.requires_grad()) && !slice.used && !left) {
        mine.unused.push_back(number);
      }
      ++number;
    }
  }
  const PassReports all(MeetAll(world_, shard_comm_, "the end of a backward pass", mine.Packed()));
  announced_ = 0;
  for (UnitTurns* turns : {&forward_turns_, &backward_turns_}) {
    // Ranks with different information would gather different units ahead.
    if (all.same_history && all.same_turns) {
      turns->Keep();
    } else {
      turns->Forget();
    }
  }
  try {
    TakeAnnouncements(all.announced);
    CheckIntentions(all.intentions);
    if (all.any_failed) ThrowFailedAlone();
    if (all.any_written) {
      const std::vector<std::string> names = world_.AllGatherBytes(written);
      for (size_t rank = 0; rank < names.size(); ++rank) {
        TORCH_CHECK(names[rank].empty(), WrittenBehind(c10::str("rank ", rank), names[rank]));
      }
    }
  } catch (const std::exception&) {
    thrown_on_all_ = true;
    history_.Clear();
    DropGradients();
    throw;
  }
  if (!all.same_trained) {
    const std::vector<std::string> bits = world_.AllGatherBytes(trained);
    thrown_on_all_ = true;
    history_.Clear();
    DropGradients();
    CheckTrained(bits);
  }
  if (!all.same_history) {
    std::vector<std::vector<uint32_t>> histories;
    for (const std::string& other : world_.AllGatherBytes(Pack(history_.events()))) {
      histories.push_back(Unpack(other));
    }
    thrown_on_all_ = true;
    history_.Clear();
    // An optimizer that steps anyway must not step on the numbers of other units.
    DropGradients();
    const auto name = [this](uint32_t unit) { return units_[unit]->name(); };
    TORCH_CHECK(false, UnitHistory::Difference(histories, name));
  }
  history_.Clear();
  const auto is_trained = [&](const ShardUnit::Slice& slice) {
    return updating_ || slice.tensor.requires_grad();
  };
  // The same on all ranks, even if one fails in what follows.
  {
    uint32_t place = 0;
    for (const auto& unit : units_) {
      for (const ShardUnit::Slice& slice : unit->slices()) {
        const bool used = !std::binary_search(all.unused.begin(), all.unused.end(), place++);
        unit->trained = unit->trained || (used && is_trained(slice));
      }
    }
  }
  ReduceLate(all.late);
  // Parameters that no rank has used stay without a gradient, as without sharding: otherwise an
  // optimizer would decay them.
  number = 0;
  size_t next = 0;
  std::vector<at::Tensor> trained_shards;
  for (const auto& unit : units_) {
    for (ShardUnit::Slice& slice : unit->slices()) {
      if (next < all.unused.size() && all.unused[next] == number) {
        ++next;
        if (slice.fresh) slice.shard.mutable_grad().reset();
      } else if (is_trained(slice)) {
        trained_shards.push_back(slice.shard);
      }
      slice.used = slice.fresh = false;
      ++number;
    }
  }
  return trained_shards;
}

void ShardedModel::ThrowFailedAlone() {
  const char* const advice =
      touched_ ? "; optimizers have updated a part of the parameters in it "
                 "(options.sharding.optimizer_in_backward): call load_state()"
               : "; the gradients of this model are gone on every rank, also those of earlier "
                 "micro-steps, and its parameters are as they were";
  const std::exception_ptr mine = std::exchange(failed_alone_, nullptr);
  const std::vector<std::string> all =
      world_.AllGatherBytes(mine == nullptr ? std::string() : TextOf(mine));
  size_t rank = 0;
  while (all[rank].empty()) ++rank;
  const std::string named =
      c10::str("rank ", rank, " has failed in a backward pass of the sharded model: ");
  TORCH_CHECK(mine != nullptr, named, all[rank], advice);
  // Throw an exception of the original type.
  try {
    std::rethrow_exception(mine);
  } catch (c10::Error& error) {
    error.add_context(
        c10::str("in a backward pass of the sharded model on rank ", world_.rank(), advice));
    throw;
  }
}

void ShardedModel::SyncBuffers() {
  if (!broadcast_buffers_ || buffers_.empty()) return;
  std::vector<at::Tensor> data;
  for (const at::Tensor& buffer : buffers_) data.push_back(buffer.variable_data());
  BroadcastCoalesced(world_, data, 0);
}

std::vector<std::string> ShardedModel::UnexchangedGradients() const {
  std::vector<std::string> names;
  for (const auto& unit : units_) {
    for (const ShardUnit::Slice& slice : unit->slices()) {
      if (ShardUnit::HasPending(slice)) names.push_back(slice.name);
    }
  }
  return names;
}

void ShardedModel::ForgetPending(const std::vector<at::Tensor>& shards) {
  // A backward pass that threw may have left reductions under way, which would arrive later.
  Settle();
  std::unordered_set<const void*> wanted;
  for (const at::Tensor& shard : shards) wanted.insert(shard.unsafeGetTensorImpl());
  for (const auto& unit : units_) {
    for (ShardUnit::Slice& slice : unit->slices()) {
      if (wanted.count(slice.shard.unsafeGetTensorImpl()) == 0) continue;
      slice.pending.reset();
      // If no later micro-step adds a gradient, there is none for a step, not even zeros.
      slice.used = slice.fresh = false;
      if (ShardUnit::HasPending(slice)) slice.tensor.mutable_grad().reset();
    }
  }
}

void ShardedModel::Summon(const std::function<void()>& body) {
  ThrowUnsaid();
  if (summons_ == 0) Settle();
  CheckBefore("summon_full_params()", [&] {
    if (summons_ > 0) return;
    CompareChanges("the beginning of summon_full_params()", Before());
  });
  // What was written stays, even if the body throws then, as without sharding. The writes have
  // already increased versions.
  const auto end = [this] {
    for (const auto& unit : units_) unit->KeepOwnPart();
    if (summons_ == 1) ExpireAll();
  };
  const Depth depth(summons_);
  try {
    for (const auto& unit : units_) unit->Gather();
    body();
  } catch (...) {
    end();
    throw;
  }
  end();
}

void ShardedModel::CheckNotMixed(const char* place) {
  faults_.CheckNotMixed();
  std::vector<std::string> failures;
  std::vector<uint32_t> announced;
  bool in_step = false;
  for (const std::string& bytes : MeetAll(
           world_, shard_comm_, place,
           Pack({announced_, faults_.in_step() ? kFailedInStep : 0}) + faults_.own(), Before())) {
    announced.push_back(NumberIn(bytes, 0));
    in_step = in_step || NumberIn(bytes, 1) != 0;
    failures.push_back(bytes.substr(2 * sizeof(uint32_t)));
  }
  const auto has_failed = [](const std::string& failure) { return !failure.empty(); };
  // If all ranks have failed in a backward pass, none has stepped since.
  if (in_step || !std::all_of(failures.begin(), failures.end(), has_failed)) {
    for (const std::string& failure : failures) TORCH_CHECK(failure.empty(), failure);
  }
  TakeAnnouncements(announced);
}

void ShardedModel::AgreeOnClosure(const std::exception_ptr& thrown) {
  const std::string failure = thrown == nullptr ? "" : TextOf(thrown);
  std::vector<std::string> all;
  try {
    all = MeetAll(world_, shard_comm_, "the end of the closure of a step", failure,
                  thrown == nullptr ? Before() : failure);
  } catch (...) {
    if (thrown == nullptr) throw;
  }
  if (thrown != nullptr) std::rethrow_exception(thrown);
  for (size_t rank = 0; rank < all.size(); ++rank) {
    TORCH_CHECK(all[rank].empty(), "rank ", rank,
                " has failed in the closure of a step of an optimizer of the sharded model: ",
                all[rank], "; no rank has stepped");
  }
}

void ShardedModel::NoteFailedClosure(bool changed) {
  // No rank has stepped, and each may have left its passes at a different place.
  if (!changed && announced_ > 0) --announced_;
  comparing_ = true;
  history_.Clear();
}

void ShardedModel::CompareBeforeSave(const std::vector<std::string>& all) {
  TakeChanges(all, comparing_);
}

void ShardedModel::VisitFullParameters(
    const std::function<void(const std::string& name, const at::Tensor& value)>& visit) {
  CheckHasValues();
  CheckNotMixed();
  CheckStepped("reading the weights");
  for (const auto& unit : units_) {
    const std::vector<at::Tensor> values = unit->Values();
    for (size_t i = 0; i < values.size(); ++i) visit(unit->slices()[i].name, values[i]);
  }
}

std::vector<std::pair<std::string, at::Tensor>> ShardedModel::FullParameters(
    const KeepName& keep, std::exception_ptr* failure) {
  std::vector<std::pair<std::string, at::Tensor>> all;
  std::exception_ptr mine;
  VisitFullParameters([&](const std::string& name, const at::Tensor& value) {
    if (mine != nullptr) return;  // the others are in the same exchange
    try {
      if (keep(name)) all.emplace_back(name, keep_copy_(value));
    } catch (...) {
      mine = std::current_exception();
      all.clear();
    }
  });
  Report(mine, failure);
  return all;
}

std::vector<std::vector<bool>> ShardedModel::AgreeOnWanted(const KeepName& wanted) {
  std::vector<std::vector<bool>> all;
  std::string mine;  // '0' or '1' for each parameter; longer: the error of the filter
  std::exception_ptr thrown;
  try {
    for (const auto& unit : units_) {
      all.emplace_back();
      for (const ShardUnit::Slice& slice : unit->slices()) {
        all.back().push_back(wanted(slice.name));
        mine += all.back().back() ? '\1' : '\0';
      }
    }
  } catch (...) {
    thrown = std::current_exception();
    mine = std::string(places_.size() + 1, ' ') + TextOf(thrown);
  }
  CheckNotMixed("reading some of the weights");
  const std::vector<std::string> of_ranks = world_.AllGatherBytes(mine);
  if (thrown != nullptr) std::rethrow_exception(thrown);
  for (size_t rank = 0; rank < of_ranks.size(); ++rank) {
    const std::string& other = of_ranks[rank];
    TORCH_CHECK(other.size() <= places_.size(), "rank ", rank,
                " has failed in the filter that says which weights are read: ",
                other.substr(places_.size() + 1));
    const auto [here, there] = std::mismatch(mine.begin(), mine.end(), other.begin());
    if (here == mine.end()) continue;
    auto index = static_cast<size_t>(here - mine.begin());
    size_t unit = 0;
    while (index >= units_[unit]->slices().size()) index -= units_[unit++]->slices().size();
    TORCH_CHECK(false, "rank ", *here != 0 ? world_.rank() : static_cast<int>(rank),
                " reads parameter '", units_[unit]->slices()[index].name,
                "' of a sharded model, and rank ",
                *here != 0 ? static_cast<int>(rank) : world_.rank(),
                " does not: the filter must say the same on every rank");
  }
  return all;
}

std::vector<std::pair<std::string, at::Tensor>> ShardedModel::SomeParameters(const KeepName& wanted,
                                                                             bool keep) {
  CheckHasValues();
  const std::vector<std::vector<bool>> all_wanted = AgreeOnWanted(wanted);
  CheckStepped("reading the weights");
  std::vector<std::pair<std::string, at::Tensor>> all;
  std::exception_ptr mine;
  for (size_t u = 0; u < units_.size(); ++u) {
    const std::vector<at::Tensor> values = units_[u]->Values(all_wanted[u]);
    if (!keep || mine != nullptr) continue;  // the others are in the same exchange
    try {
      for (size_t i = 0; i < values.size(); ++i) {
        if (!values[i].defined()) continue;
        all.emplace_back(units_[u]->slices()[i].name, keep_copy_(values[i]));
      }
    } catch (...) {
      mine = std::current_exception();
      all.clear();
    }
  }
  Report(mine, nullptr);
  return all;
}

void ShardedModel::BeginLoad(const std::map<std::string, at::Tensor>& values) {
  const bool all = std::all_of(places_.begin(), places_.end(), [&](const auto& place) {
    return values.find(place.first) != values.end();
  });
  if (!all) return;
  // Failures and changes of single ranks no longer matter, nor does a backward pass that an
  // exception has ended.
  ForgetFailures();
  if (!InBackward()) {
    open_ = updating_ = false;
    history_.Clear();
  }
}

void ShardedModel::EndLoad(const std::map<std::string, at::Tensor>& values) {
  faults_.GiveValues([&](const std::string& name) { return values.find(name) != values.end(); });
}

void ShardedModel::LoadParameters(const std::map<std::string, at::Tensor>& values) {
  agreed_ = false;
  BeginLoad(values);
  ForgetWrites();
  for (const auto& unit : units_) {
    std::vector<at::Tensor> full(unit->slices().size());
    for (size_t i = 0; i < full.size(); ++i) {
      const auto it = values.find(unit->slices()[i].name);
      if (it != values.end()) full[i] = it->second;
    }
    unit->SetValues(full);
  }
  EndLoad(values);
  MarkChanged(shards_);
}

void ShardedModel::LoadParts(const std::map<std::string, at::Tensor>& parts, const CopyAll& copy) {
  const at::NoGradGuard no_grad;
  BeginLoad(parts);
  std::vector<at::Tensor> changed;
  std::vector<std::pair<at::Tensor, at::Tensor>> copies;
  for (const auto& [name, part] : parts) {
    const auto& [unit, slice] = PlaceOf(name);
    changed.push_back(units_[unit]->slices()[slice].shard);
    if (copy == nullptr) {
      changed.back().copy_(part);
    } else {
      copies.emplace_back(changed.back(), part);
    }
  }
  if (copy != nullptr) copy(copies);
  EndLoad(parts);
  Expire();
  MarkChanged(changed);
}

std::map<std::string, at::Tensor> ShardedModel::Assemble(
    const std::function<at::Tensor(const std::string& name)>& state, const KeepName& keep,
    std::exception_ptr* failure) {
  CheckStepped("reading the optimizer's state");
  std::vector<std::vector<at::Tensor>> parts;
  std::string mine;  // the dtype of each parameter's state, plus one; 0: it has none
  for (const auto& unit : units_) {
    parts.emplace_back();
    for (const ShardUnit::Slice& slice : unit->slices()) {
      parts.back().push_back(state(slice.name));
      const at::Tensor& part = parts.back().back();
      mine += part.defined() ? static_cast<char>(static_cast<int>(part.scalar_type()) + 1) : '\0';
    }
  }
  std::string have(mine.size(), '\0');
  for (const std::string& other : shard_comm_.AllGatherBytes(mine)) {
    for (size_t i = 0; i < have.size(); ++i) have[i] = std::max(have[i], other[i]);
  }
  std::map<std::string, at::Tensor> all;
  std::exception_ptr thrown;
  size_t first = 0;
  for (size_t u = 0; u < units_.size(); ++u) {
    const std::vector<ShardUnit::Slice>& slices = units_[u]->slices();
    const std::string here = have.substr(first, slices.size());
    first += slices.size();
    const char kind = *std::max_element(here.begin(), here.end());
    if (kind == '\0') continue;
    const std::vector<at::Tensor> full =
        units_[u]->Assemble(parts[u], static_cast<at::ScalarType>(kind - 1));
    if (thrown != nullptr) continue;  // the others are in the same exchange
    try {
      for (size_t i = 0; i < slices.size(); ++i) {
        if (here[i] != '\0' && keep(slices[i].name))
          all.emplace(slices[i].name, keep_copy_(full[i]));
      }
    } catch (...) {
      thrown = std::current_exception();
      all.clear();
    }
  }
  Report(thrown, failure);
  return all;
}

const std::pair<size_t, size_t>& ShardedModel::PlaceOf(const std::string& name) const {
  const auto it = places_.find(name);
  TORCH_CHECK(it != places_.end(), "the sharded model has no parameter '", name, "'");
  return it->second;
}

int64_t ShardedModel::PartSize(const std::string& name) const {
  const auto& [unit, slice] = PlaceOf(name);
  return units_[unit]->slices()[slice].shard.numel();
}

std::pair<int64_t, int64_t> ShardedModel::PartRange(const std::string& name) const {
  const auto& [unit, slice] = PlaceOf(name);
  return units_[unit]->PartRange(slice);
}

at::Tensor ShardedModel::PartOf(const std::string& name, const at::Tensor& full) const {
  const auto& [unit, slice] = PlaceOf(name);
  return units_[unit]->PartOf(slice, full).clone();
}

at::Tensor ShardedModel::KeptPartOf(const std::string& name, const at::Tensor& full) const {
  const auto& [unit, slice] = PlaceOf(name);
  return keep_copy_(units_[unit]->PartOf(slice, full));
}

}  // namespace muster
