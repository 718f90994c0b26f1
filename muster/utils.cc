#include "muster/utils.h"

#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/grad_mode.h"
#include "base/variable_list.h"
#include "muster/internal/core.h"
#include "muster/internal/full_state.h"
#include "muster/internal/model_slot.h"
#include "worker/collective/nested_collectives.h"
#include "worker/job/environment.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/guard.h"
#include "worker/train/sync_state.h"

namespace muster {

void set_seed(uint64_t seed, bool device_specific, bool deterministic) {
  int rank = 0;
  if (device_specific) {
    const absl::StatusOr<Environment> environment = ReadEnvironment(ProcessVariables());
    ThrowIfError(environment.status());
    TORCH_CHECK(environment->seated,
                "set_seed(device_specific) before this process has a rank: make the Accelerator "
                "first and use set_seed(accelerator, seed, true)");
    rank = environment->rank.value;
  }
  SetSeed(seed, rank, {.device_specific = device_specific, .deterministic = deterministic});
}

void set_seed(const Accelerator& accelerator, uint64_t seed, bool device_specific,
              bool deterministic) {
  SetSeed(seed, accelerator.process_index(),
          {.device_specific = device_specific, .deterministic = deterministic});
}

void synchronize_rng_states(Accelerator& accelerator, const std::vector<std::string>& rng_types) {
  bool gpu = false;
  for (const std::string& type : rng_types) {
    TORCH_CHECK(type == "torch" || type == "cuda", "synchronize_rng_states: unknown \"", type,
                "\"; use torch or cuda, or pass a generator");
    gpu = gpu || type == "cuda";
  }
  if (rng_types.empty()) return;
  accelerator.core().steps().CheckAllTakePart("synchronize_rng_states()");
  SynchronizeRng(accelerator.comm(), 0, gpu && accelerator.device().is_cuda());
}

RankLogger get_logger(Accelerator& accelerator) {
  // The program is required to keep the Accelerator, and with it the Core.
  return RankLogger(accelerator.comm(), nullptr, [core = &accelerator.core()] {
    core->steps().CheckAllTakePart("logging in order");
  });
}

void synchronize_rng_states(Accelerator& accelerator, at::Generator& generator) {
  accelerator.core().steps().CheckAllTakePart("synchronize_rng_states()");
  SynchronizeGenerator(accelerator.comm(), generator);
}

int64_t find_executable_batch_size(Accelerator& accelerator, int64_t starting_batch_size,
                                   const std::function<void(int64_t)>& attempt,
                                   const std::function<int64_t(int64_t)>& reduce_batch_size) {
  accelerator.core().steps().CheckAllTakePart("find_executable_batch_size()");
  internal::StateObjects& state = accelerator.core().checkpoints().objects();
  const int64_t first = state.next_number();
  const auto forget = [&] {
    accelerator.free_memory();
    // The objects of a call that succeeded here, but not on another process, have ended with it.
    state.RemoveSince(first);
  };
  try {
    return FindExecutableBatchSize(
        accelerator.comm(),
        {.starting_batch_size = starting_batch_size, .reduce = reduce_batch_size, .forget = forget},
        attempt);
  } catch (...) {
    state.RemoveSince(first);
    throw;
  }
}

bool Ema::update() {
  if (!core_->steps().sync_gradients()) return false;
  TORCH_CHECK(core_->steps().communicate(),
              "an average of weights is updated inside LocalSGD, where every process has its own "
              "weights: update it after the scope, or without LocalSGD");
  TORCH_CHECK(
      !core_->steps().joining() || core_->process().size() == 1,
      "an average of weights is updated inside join_uneven_inputs(), where processes that "
      "have run out of batches do not update theirs: train with even batches (the default), "
      "or update it after the scope");
  core_->steps().CheckStepped("ema.update()");
  weights_->Update();
  return true;
}

namespace {

std::shared_ptr<internal::ModelSlot> ModelOf(const internal::DividedObject& average) {
  std::shared_ptr<internal::ModelSlot> model = average.model();
  TORCH_CHECK(model != nullptr,
              "the sharded model that a muster::Ema averages no longer exists: keep the "
              "prepared model for as long as the average is used");
  return model;
}

// The average of a sharded model.
class DividedAverage : public internal::DividedObject {
 public:
  DividedAverage(std::shared_ptr<EmaWeights> weights, std::weak_ptr<internal::ModelSlot> model)
      : weights_(std::move(weights)), model_(std::move(model)) {}

  std::shared_ptr<internal::ModelSlot> model() const override { return model_.lock(); }
  std::string KeyOf(const std::string& parameter) const override {
    return EmaWeights::KeyOf(parameter);
  }
  StateDict Collect(const std::function<bool(const std::string& name)>& keep,
                    std::exception_ptr* failure) const override {
    const StateDict mine = weights_->SaveState();
    StateDict state;
    internal::CopyScalars(mine, &state);
    const std::shared_ptr<internal::ModelSlot> model = ModelOf(*this);
    for (auto& [name, average] : model->sharded()->Assemble(
             [&](const std::string& name) {
               const absl::StatusOr<at::Tensor> part = mine.GetTensor(KeyOf(name));
               ThrowIfError(part.status());
               return *part;
             },
             keep, failure)) {
      state.SetTensor(KeyOf(name), average);
    }
    return state;
  }
  void LoadParts(const StateDict& parts) override { weights_->LoadState(parts); }

 private:
  const std::shared_ptr<EmaWeights> weights_;
  const std::weak_ptr<internal::ModelSlot> model_;
};

// Returns this process's parts of a sharded model's parameters, by their first names.
EmaWeights::Named ShardsOf(const ShardedModel& model) {
  EmaWeights::Named shards;
  for (const at::Tensor& shard : model.shards()) shards.emplace_back(*model.NameOf(shard), shard);
  return shards;
}

}  // namespace

Ema::Ema(Accelerator& accelerator, const std::shared_ptr<internal::ModelSlot>& model,
         const EmaOptions& options)
    : core_(&accelerator.core()), buffers_(model->source().buffers()) {
  const ShardedModel* const sharded = model->sharded();
  if (sharded == nullptr) {
    weights_ = std::make_shared<EmaWeights>(model->source().parameters(), options);
    return;
  }
  sharded->CheckHasValues();  // whose values are the first average
  // The shards of a unit share one version; the parameters that they are parts of have versions of
  // their own.
  std::map<std::string, at::Tensor> parameters;
  for (const auto& unit : sharded->units()) {
    for (const ShardUnit::Slice& slice : unit->slices()) parameters[slice.name] = slice.tensor;
  }
  weights_ = std::make_shared<EmaWeights>(
      ShardsOf(*sharded), options, [parameters = std::move(parameters)](const std::string& name) {
        return parameters.at(name);
      });
  divided_ = std::make_shared<DividedAverage>(weights_, model);
}

std::shared_ptr<internal::ModelSlot> Ema::Sharded() const {
  return divided_ == nullptr ? nullptr : ModelOf(*divided_);
}

StateDict Ema::state_dict() const {
  if (divided_ == nullptr) return weights_->SaveState();
  const bool main = core_->process().rank() == 0;
  return divided_->Collect([&](const std::string&) { return main; }, nullptr);
}

void Ema::load_state_dict(const StateDict& state) {
  const std::shared_ptr<internal::ModelSlot> model = Sharded();
  if (model == nullptr) return weights_->LoadState(state);
  StateDict parts;
  internal::TakeParts(*model, internal::KeysOf(*divided_, *model), state, &parts);
  weights_->LoadState(parts);
}

void Ema::CopyTo(const Named& parameters, const Named& buffers) const {
  std::map<std::string, at::Tensor> own(buffers_.begin(), buffers_.end());
  for (const auto& [name, buffer] : buffers) {
    const auto it = own.find(name);
    TORCH_CHECK(it != own.end() && it->second.sizes() == buffer.sizes(),
                "the averaged model has no "
                "buffer '",
                name, "' of shape ", buffer.sizes());
  }
  const std::shared_ptr<internal::ModelSlot> model = Sharded();
  ShardedModel* const sharded = model == nullptr ? nullptr : model->sharded();
  const bool itself =
      sharded != nullptr && !parameters.empty() && sharded->ShardOf(parameters[0].second).defined();
  if (itself) {
    core_->steps().CheckStepped("ema.copy_to()");
    sharded->AwaitReaders();
  }
  core_->steps().AboutToChange(itself ? model.get() : nullptr);
  if (sharded == nullptr) {
    weights_->CopyTo(parameters);
  } else if (itself) {
    weights_->CopyTo(ShardsOf(*sharded));
    sharded->MarkChanged(sharded->shards());
  } else {
    Named averages;
    const StateDict all = divided_->Collect([](const std::string&) { return true; }, nullptr);
    for (const auto& [key, average] : all.tensors()) {
      averages.emplace_back(key.substr(EmaWeights::KeyOf("").size()), average);
    }
    EmaWeights::CopyAverages(averages, parameters);
  }
  const at::NoGradGuard no_grad;
  for (const auto& [name, buffer] : buffers) {
    if (!buffer.is_same(own.at(name))) at::Tensor(buffer).copy_(own.at(name));
  }
}

bool shards_models(Accelerator& accelerator) {
  return accelerator.core().process().sharding().strategy != ShardingStrategy::kNone;
}

std::vector<at::Tensor> LocalSGD::Averaged(const internal::ModelSource& model) {
  std::vector<at::Tensor> tensors;
  for (const auto& [name, parameter] : model.parameters()) tensors.push_back(parameter);
  for (const auto& [name, buffer] : model.buffers()) {
    if (buffer.is_floating_point()) tensors.push_back(buffer);
  }
  return tensors;
}

LocalSGD::LocalSGD(Accelerator& accelerator, std::vector<at::Tensor> parameters,
                   int64_t local_sgd_steps, bool enabled)
    : core_(&accelerator.core()),
      local_(accelerator.comm(), std::move(parameters), local_sgd_steps, enabled),
      exceptions_(std::uncaught_exceptions()) {
  if (local_.enabled()) scope_.emplace(core_);
}

namespace {

// (collective) Loads the state of rank 0 in place of `own`. A schedule of the program's own class
// cannot go back: if a rank has skipped fewer steps than rank 0 (fp16), all take the state of the
// rank that is furthest.
void TakeStateOfMain(Comm& comm, const PlainState& own, internal::SchedulerSlot& scheduler) {
  PlainState state = BroadcastPlainState(comm, own, 0);
  bool refuses = false;
  try {
    scheduler.CheckState(state);
  } catch (const c10::Error&) {
    refuses = true;
  }
  int furthest = 0;
  int64_t most = -1;
  bool any_refuses = false;
  const auto all = GatherObject(comm, std::make_pair(refuses, scheduler.step_count()));
  for (size_t rank = 0; rank < all.size(); ++rank) {
    any_refuses = any_refuses || all[rank].first;
    if (all[rank].second <= most) continue;
    most = all[rank].second;
    furthest = static_cast<int>(rank);
  }
  if (any_refuses) state = BroadcastPlainState(comm, own, furthest);
  scheduler.LoadState(state);
}

// (collective) Replaces the state of optimizers, schedules and the loss scale, which processes have
// changed by separate steps, by that of rank 0: with different states, equal gradients would make
// the weights differ again, and gradients with different loss scales have no right average.
void TakeStepsOfMain(internal::Core& core) {
  Comm& comm = core.process().comm();
  // The optimizer's state contains this rank's rates, too.
  std::vector<PlainState> schedules;
  for (const auto& scheduler : core.registry().schedulers()) {
    schedules.push_back(scheduler->SaveState());
  }
  for (const auto& optimizer : core.registry().optimizers()) {
    optimizer->set_steps(BroadcastObject(comm, optimizer->steps(), 0));
    // A state that cannot be saved cannot be sent.
    if (!optimizer->handle().CannotSave().empty()) continue;
    BroadcastOptimizerState(comm, optimizer->handle(), 0);
  }
  for (size_t i = 0; i < schedules.size(); ++i) {
    TakeStateOfMain(comm, schedules[i], *core.registry().schedulers()[i]);
  }
  GradScaler* const scaler = core.steps().scaler();
  if (scaler == nullptr) return;
  // Gradients that wait for a step continue with the loss scale that all ranks now have.
  core.steps().TakeScale(BroadcastPlainState(comm, scaler->SaveState(), 0));
}

}  // namespace

LocalSGD::~LocalSGD() noexcept(false) {
  if (std::uncaught_exceptions() != exceptions_) return;
  core_->steps().AboutToChange();
  local_.Finish();
  if (local_.enabled()) TakeStepsOfMain(*core_);
}

bool LocalSGD::step() {
  core_->steps().AboutToChange();
  return local_.Step();
}

}  // namespace muster
