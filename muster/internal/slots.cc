#include "muster/internal/slots.h"

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <unordered_set>
#include <utility>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_split.h"
#include "base/log.h"
#include "base/malloc_tuning.h"
#include "muster/internal/backward_updates.h"
#include "muster/internal/backward_watch.h"
#include "muster/internal/step_controller.h"
#include "worker/bigmodel/empty_weights.h"
#include "worker/collective/on_all.h"
#include "worker/parallel/ddp.h"
#include "worker/parallel/paged_storage.h"
#include "worker/parallel/shard_plan.h"
#include "worker/parallel/sharded_model.h"
#include "worker/parallel/sync_batch_norm.h"
#include "worker/train/activation_policy.h"
#include "worker/train/activation_store.h"
#include "worker/train/disk_copies.h"
#include "worker/train/disk_parts.h"
#include "worker/train/host_parts.h"

namespace muster::internal {
namespace {

// Returns the device of a model that stays where it is: that of its first parameter that is not on
// the CPU, if there is one. `meta`: the device where a model without memory gets some.
at::Device DeviceOf(const ModelSource& source, const at::Device& meta) {
  std::optional<at::Device> first;
  for (const auto& [name, parameter] : source.parameters()) {
    if (parameter.is_meta()) continue;
    if (!parameter.is_cpu()) return parameter.device();
    first = parameter.device();
  }
  return first.value_or(meta);
}

// Makes the store for values that are on `device`; null if they stay there. `ranks`: the number of
// ranks on this machine.
std::unique_ptr<PartStore> StoreAt(Offload place, const std::string& path, const at::Device& device,
                                   int ranks, HostParts::Contents of) {
  if (!GoesElsewhere(place, device)) return nullptr;
  if (place == Offload::kCpu) return std::make_unique<HostParts>(device, ranks, of);
  return std::make_unique<DiskParts>(path);
}

// Returns null if gradients go with the parameters: one store counts what both need.
std::unique_ptr<PartStore> StoreOfGradients(const ShardingOptions& sharding,
                                            const at::Device& device, int ranks) {
  const Offload place = sharding.offload_gradients;
  const bool same_folder = sharding.offload_gradients_path == sharding.offload_parameters_path;
  if (place == sharding.offload_parameters && (place != Offload::kDisk || same_folder)) {
    return nullptr;
  }
  return StoreAt(place, sharding.offload_gradients_path, device, ranks,
                 HostParts::Contents::kGradients);
}

std::unique_ptr<ActivationPolicy> ActivationPolicyFor(const Process& process,
                                                      torch::nn::Module* module) {
  const ActivationCheckpointingOptions& options = process.activation_checkpointing();
  if (!options.enabled) return nullptr;
  TORCH_CHECK(module != nullptr,
              "options.activation_checkpointing: the blocks of a TorchScript model cannot be run "
              "again; leave it out, or write the model in C++");
  const std::set<std::string> names =
      options.block_types.empty() ? UnitModules(*module, process.sharding())
                                  : ModulesOfTypes(*module, options.block_types,
                                                   "options.activation_checkpointing.block_types");
  TORCH_CHECK(!names.empty(),
              "options.activation_checkpointing selects no module of the model, which has no list "
              "of blocks (torch::nn::ModuleList, torch::nn::Sequential): name the classes of its "
              "blocks in block_types");
  std::vector<ActivationPolicy::Block> blocks;
  for (const auto& item : module->named_modules("", /*include_self=*/false)) {
    if (names.count(item.key()) > 0) blocks.push_back({item.key(), item.value()});
  }
  ActivationPolicy::MakeStore store;
  if (options.offload == Offload::kDisk) {
    store = [path = options.offload_path] {
      return std::make_shared<ActivationStore>(std::make_unique<DiskParts>(MakeScratchFile(path)));
    };
  } else if (options.offload == Offload::kCpu && !process.device().is_cpu()) {
    store = [] { return std::make_shared<ActivationStore>(nullptr); };
  }
  if (process.device().is_cpu()) GiveBackFreedMemory();
  return std::make_unique<ActivationPolicy>(std::move(blocks), store);
}

bool HasNoValues(const at::Tensor& parameter) {
  return parameter.is_meta() && !HasDeferredValues(parameter);
}

// Gives the parameter memory on `device`, and its values if they are wanted and known.
void GiveMemory(const NamedParameter& parameter, const at::Device& device, bool with_values) {
  if (!HasNoValues(parameter.tensor)) {
    return Materialize(parameter.tensor, device, parameter.name, with_values);
  }
  const at::NoGradGuard no_grad;
  PlaceTensor(parameter.tensor,
              at::empty_like(parameter.tensor, parameter.tensor.options().device(device)));
}

// Operators of normalization take running statistics in the dtype of their weights.
bool IsRunningStatistic(const std::string& name) {
  const std::string last = name.substr(name.rfind('.') + 1);
  return last == "running_mean" || last == "running_var";
}

// (collective) Throws if only some ranks have parameters: these are about to exchange them, and a
// rank without any takes no part.
void CheckAllTrain(Comm& comm, size_t parameters) {
  const std::vector<std::string> all = comm.AllGatherBytes(std::to_string(parameters));
  for (size_t rank = 1; rank < all.size(); ++rank) {
    TORCH_CHECK((all[rank] == "0") == (all[0] == "0"),
                "the models of the ranks differ: rank 0 has ", all[0], " parameters and rank ",
                rank, " has ", all[rank], "; build the same model on every rank");
  }
}

}  // namespace

std::string FolderOfOffload(const ShardingOptions& sharding) {
  if (sharding.offload_parameters == Offload::kDisk) return sharding.offload_parameters_path;
  if (sharding.offload_optimizer == Offload::kDisk) return sharding.offload_optimizer_path;
  return sharding.offload_gradients == Offload::kDisk ? sharding.offload_gradients_path : "";
}

ModelSlot::ModelSlot(StepController* steps, std::unique_ptr<ModelSource> source, bool evaluation,
                     const ShardingGroups& groups)
    : controller_(steps), source_(std::move(source)), evaluation_(evaluation), groups_(groups) {
  MakeReady();
  // Last, because moving parameters also moves their gradients.
  if (!evaluation_) {
    watch_ = std::make_unique<BackwardWatch>(controller_->passes(), source_->parameters());
  }
}

void ModelSlot::MakeReady() {
  MakeParallel();
  if (evaluation_) return;
  ConvertBuffers();
  ConvertOutputs();
}

void ModelSlot::MakeParallel() {
  const bool evaluation = evaluation_;
  const Process& process = controller_->process();
  const at::Device device = process.options().device_placement ? process.device() : at::kCPU;
  // A single process has its parameters in units only if they come from elsewhere, their gradients
  // go elsewhere, or an optimizer updates one after the other.
  ShardingOptions sharding = process.sharding();
  const at::Device there = process.options().device_placement ? device : DeviceOf(*source_, device);
  // Neither memory that the program has freed, nor copies for saves and loads, may take the memory
  // that an offload to the disk saves.
  const std::string disk = FolderOfOffload(sharding);
  if (!disk.empty() && there.is_cpu()) GiveBackFreedMemory();
  const bool offloads = GoesElsewhere(sharding.offload_parameters, there);
  const bool offloads_gradients = GoesElsewhere(sharding.offload_gradients, there);
  // load_weights() or load_state() supplies the values of a model without weights later. A single
  // process then has units too, which know that the values are missing.
  std::vector<std::string> without_values;
  for (const auto& [name, parameter] : source_->parameters()) {
    if (HasNoValues(parameter)) without_values.push_back(name);
  }
  const bool shards = !evaluation && sharding.strategy != ShardingStrategy::kNone &&
                      (process.size() > 1 || offloads || offloads_gradients ||
                       sharding.optimizer_in_backward || !without_values.empty());
  // A single process that does not offload parameters has nothing to gather.
  if (process.size() == 1 && !offloads) sharding.strategy = ShardingStrategy::kGradients;
  std::vector<NamedParameter> parameters;
  std::vector<at::Tensor> buffers;
  std::vector<bool> sparse;
  // These steps may fail on this process alone, for example because memory is short.
  const auto begin = [&] {
    for (const auto& [name, parameter] : source_->parameters()) {
      TORCH_CHECK(!IsOffloadedWeight(parameter), "parameter '", name,
                  "' is offloaded (by disk_offload(), cpu_offload(), dispatch_model() or "
                  "load_checkpoint_and_dispatch()): do not prepare such a model, call it as it is; "
                  "to train one that is larger than memory, prepare it with options.sharding and "
                  "an offload of parameters");
      TORCH_CHECK(!IsPaged(parameter), "parameter '", name,
                  "' belongs to another sharded model, or to one of an Accelerator that is gone: "
                  "prepare one module that holds both models, or build the model again");
    }
    for (const auto& [name, parameter] : source_->parameters()) {
      TORCH_CHECK(shards || !HasNoValues(parameter), "parameter '", name,
                  "' is on the meta device and has no values: construct the module with "
                  "muster::deferred_init(), or load its weights before prepare(); with "
                  "options.sharding, accelerator.load_weights() loads them afterwards");
      // Units of a sharded model get their memory one after the other.
      if (!shards) Materialize(parameter, device, name);
    }
    for (const auto& [name, buffer] : source_->buffers()) {
      TORCH_CHECK(!shards || !buffer.is_meta(), "buffer '", name,
                  "' is on the meta device and has no values: construct the module without "
                  "{.include_buffers = true}, which computes them");
    }
    if (process.options().device_placement) source_->MoveTo(process.device());
    if (!evaluation) activation_policy_ = ActivationPolicyFor(process, source_->module());
    if (evaluation || (process.size() == 1 && !shards)) return;
    std::unordered_set<const void*> sparse_parameters;
    if (source_->module() != nullptr) {
      for (const auto& part : source_->module()->modules()) {
        if (auto* norm = part->as<SyncBatchNormImpl>()) norm->Bind(controller_->statistics_ranks());
      }
      for (const at::Tensor& parameter : SparseParametersOf(*source_->module())) {
        sparse_parameters.insert(parameter.unsafeGetTensorImpl());
      }
    }
    for (const auto& [name, parameter] : source_->parameters()) {
      parameters.push_back({name, parameter});
      sparse.push_back(sparse_parameters.count(parameter.unsafeGetTensorImpl()) > 0);
    }
    for (const auto& [name, buffer] : source_->buffers()) buffers.push_back(buffer);
    if (shards && !parameters.empty()) {
      const DataParallelOptions& exchange = process.options().data_parallel;
      TORCH_CHECK(exchange.comm_hook == CommHook::kNone &&
                      exchange.comm_wrapper == CommWrapper::kNone &&
                      exchange.gradient_hook == nullptr,
                  "options.data_parallel: comm_hook, comm_wrapper and gradient_hook belong to data "
                  "parallelism, and options.sharding reduces gradients by itself: remove them, or "
                  "set options.sharding->reduce_dtype to compress");
      const std::optional<at::ScalarType> low = process.sharding().parameter_dtype;
      const at::ScalarType autocast =
          process.precision() == MixedPrecision::kBf16 ? at::kBFloat16 : at::kHalf;
      TORCH_CHECK(!low.has_value() || (process.autocast_on() && *low == autocast),
                  "options.sharding.parameter_dtype is ", low.value_or(at::kFloat),
                  ", and mixed_precision is \"", process.mixed_precision(),
                  "\": the forward pass must run in the dtype of its parameters; set both to the "
                  "same type");
      for (size_t i = 0; i < parameters.size(); ++i) {
        TORCH_CHECK(!sparse[i], "parameter '", parameters[i].name,
                    "' has a sparse gradient, which cannot be sharded: make the embedding dense "
                    "(sparse(false)), or train without sharding");
      }
    }
  };
  if (evaluation || process.size() == 1) {
    begin();
  } else {
    OnAll(process.comm(), "prepare the model", begin);
    CheckAllTrain(process.comm(), parameters.size());
  }
  if (parameters.empty()) return;
  if (shards) {
    const int here = process.environment().local_world_size.value;
    std::optional<ScopedGiveBackFreedMemory> divides;
    if (there.is_cpu()) divides.emplace();
    sharded_ = std::make_unique<ShardedModel>(
        process.comm(), groups_.shard != nullptr ? *groups_.shard : process.comm(),
        groups_.replicas.get(), source_->module(), std::move(parameters), std::move(buffers),
        sharding, process.options().data_parallel.broadcast_buffers, process.comm_queue(),
        [device](const NamedParameter& parameter, bool with_values) {
          GiveMemory(parameter, device, with_values);
        },
        StoreAt(sharding.offload_parameters, sharding.offload_parameters_path, there, here,
                HostParts::Contents::kParameters),
        groups_.reshard.get(), StoreOfGradients(sharding, there, here));
    if (!disk.empty()) {
      sharded_->KeepCopiesBy([copies = std::make_shared<DiskCopies>(disk)](
                                 const at::Tensor& tensor) { return copies->Copy(tensor); });
    }
    if (controller_->updates() != nullptr) sharded_->UpdateInBackward(controller_->updates());
    // All ranks get the values of rank 0.
    if (process.size() > 1) {
      const std::vector<std::string> all = process.comm().AllGatherBytes(
          process.rank() == 0 ? absl::StrJoin(without_values, "\n") : "");
      without_values = absl::StrSplit(all[0], '\n', absl::SkipEmpty());
    }
    sharded_->SetWithoutValues(without_values);
    return;
  }
  std::vector<at::Tensor> tensors;
  std::vector<std::string> names;
  for (NamedParameter& parameter : parameters) {
    tensors.push_back(std::move(parameter.tensor));
    names.push_back(std::move(parameter.name));
  }
  ddp_ = std::make_unique<DataParallel>(
      controller_->process().comm(), std::move(tensors), std::move(names), std::move(buffers),
      controller_->process().options().data_parallel, std::move(sparse));
}

void ModelSlot::ConvertBuffers() {
  const Process& process = controller_->process();
  const std::optional<at::ScalarType> dtype = process.sharding().buffer_dtype;
  if (!dtype.has_value()) return;
  const auto convert = [&] {
    const at::NoGradGuard no_grad;
    const ModelSource::Named buffers = source_->buffers();
    std::vector<std::string> names;
    for (const auto& [name, buffer] : buffers) names.push_back(name);
    std::set<std::string> ignored;
    if (source_->module() != nullptr) {
      ignored = InIgnoredModules(*source_->module(), names, process.sharding());
    }
    // A tensor stays if it does under any of its names: it may have several, in other modules.
    std::unordered_set<const void*> stay;
    for (const auto& [name, parameter] : source_->parameters()) {
      stay.insert(parameter.unsafeGetTensorImpl());
    }
    for (const auto& [name, buffer] : buffers) {
      if (ignored.count(name) > 0 || IsRunningStatistic(name)) {
        stay.insert(buffer.unsafeGetTensorImpl());
      }
    }
    for (const auto& [name, buffer] : buffers) {
      if (!buffer.is_floating_point() || buffer.scalar_type() == *dtype ||
          stay.count(buffer.unsafeGetTensorImpl()) > 0) {
        continue;
      }
      at::Tensor(buffer).set_data(buffer.detach().to(*dtype));
    }
  };
  if (process.size() == 1) return convert();
  OnAll(process.comm(), "convert the buffers of the model", convert);
}

void ModelSlot::ConvertOutputs() {
  const Process& process = controller_->process();
  const ShardingOptions& sharding = process.sharding();
  output_dtype_ = sharding.output_dtype;
  if (!output_dtype_.has_value() || !process.autocast_on() || source_->module() == nullptr ||
      sharding.strategy == ShardingStrategy::kNone) {
    return;
  }
  // A single process has no units, but computes the same as several do.
  const std::set<std::string> names = UnitModules(*source_->module(), sharding);
  std::vector<std::shared_ptr<torch::nn::Module>> units;
  for (const auto& item : source_->module()->named_modules("", /*include_self=*/false)) {
    if (names.count(item.key()) > 0) units.push_back(item.value());
  }
  unit_outputs_ = std::make_unique<OutputDtypes>(std::move(units), *output_dtype_);
}

ModelSlot::~ModelSlot() = default;

void ModelSlot::BeforeForward() {
  if (sharded_ != nullptr) {
    sharded_->BeginForward(controller_->communicate(), controller_->sync_gradients());
  }
  if (!at::GradMode::is_enabled()) {
    if (ddp_ != nullptr) ddp_->BeforeForward(controller_->communicate());
    return;
  }
  ++forwards_;
  if (watch_ != nullptr) watch_->Refresh();
  if (ddp_ == nullptr) return;
  TORCH_CHECK(!controller_->joining() || controller_->in_micro_step(),
              "inside join_uneven_inputs() every training step needs accelerator.accumulate(): it "
              "announces the step to the processes that have run out of batches");
  // Check before the exchanges of the pass, which the other ranks may not reach.
  controller_->CheckNoStepFailed("a forward pass");
  armed_ = controller_->communicate() ? Armed::kYes : Armed::kNo;
  ddp_->BeforeForward(controller_->communicate());
}

void ModelSlot::AfterForward() {
  if (sharded_ != nullptr) sharded_->EndForward();
}

std::vector<at::Tensor> ModelSlot::PassOutputs(std::vector<at::Tensor> outputs) {
  return ddp_->PassOutputs(std::move(outputs));
}

void ModelSlot::PassNoOutputs() {
  const DataParallelOptions& options = ddp_->options();
  TORCH_CHECK(
      !at::GradMode::is_enabled() || !(options.find_unused_parameters || options.static_graph),
      "model.call() of a function that returns nothing, with data_parallel.",
      options.static_graph ? "static_graph" : "find_unused_parameters",
      ": the exchange looks for parameters in the graph of what the function returns; return the "
      "loss or the outputs from it");
  PassOutputs({});
}

void ModelSlot::SyncInBackward() {
  if (ddp_ != nullptr) ddp_->ArmBackward();
  if (sharded_ != nullptr) sharded_->Communicate();
}

bool ModelSlot::on_main_process() const { return controller_->process().rank() == 0; }

bool ModelSlot::autocast_on() const { return controller_->process().autocast_on(); }
AutocastGuard ModelSlot::Autocast() const {
  AutocastOptions options = controller_->process().options().autocast;
  // The cache would keep a copy of every weight until the end of the forward pass.
  if (sharded_ != nullptr) options.cache_enabled = false;
  return controller_->process().Autocast(options);
}

void OptimizerSlot::Step() { controller_->Step(*this); }
at::Tensor OptimizerSlot::StepWithClosure(const std::function<at::Tensor()>& closure) {
  return controller_->StepWithClosure(*this, closure);
}
void OptimizerSlot::ZeroGrad(bool set_to_none) { controller_->ZeroGrad(*this, set_to_none); }

void SchedulerSlot::Bind(std::shared_ptr<OptimizerSlot> optimizer) {
  optimizer_ = std::move(optimizer);
  if (make_plateau_ != nullptr) {
    plateau_ = make_plateau_(optimizer_->handle());
    return;
  }
  scheduler_ = make_(optimizer_->handle());
  gate_ = std::make_unique<PreparedScheduler>(
      *scheduler_,
      PreparedSchedulerOptions{
          .step_with_optimizer = controller_->process().options().step_scheduler_with_optimizer,
          .units = controller_->process().options().scheduler_units,
          .num_processes = controller_->process().size(),
          .split_batches = controller_->process().options().data_loader.split_batches,
          .adjust_scheduler = controller_->process().options().accumulation.adjust_scheduler});
}

void SchedulerSlot::CheckBound() const {
  TORCH_CHECK(optimizer_ != nullptr,
              "this schedule has no optimizer: pass both to one prepare() call");
}

void SchedulerSlot::Step() {
  CheckBound();
  MicroStep step = controller_->micro_step();
  step.sync = controller_->sync_gradients();
  if (step.sync && !warned_ && scheduler_->step_count() == 0 && optimizer_->steps() == 0 &&
      !optimizer_->step_was_skipped()) {
    Warn(
        "step() of a schedule comes before the first optimizer.step(), so the optimizer never has "
        "the schedule's first learning rate: call it after optimizer.step()");
  }
  gate_->Step(step, optimizer_->step_was_skipped());
  stepped_ = true;
}

void SchedulerSlot::Warn(const char* text) {
  warned_ = true;
  if (controller_->process().rank() == 0) MUSTER_LOG(Warning) << text;
}

void SchedulerSlot::WarnIfLeftOut(bool at_end) {
  // A single step may be only a trial.
  if (warned_ || stepped_ || optimizer_ == nullptr || optimizer_->steps_here() < 2) return;
  // At the end, a scheduler or an optimizer of LibTorch may be gone already: this slot borrows it.
  if (at_end) {
    return Warn(
        "training has ended, and a prepared schedule has never stepped: call its step() "
        "after optimizer.step() (a schedule that steps once an epoch: the first one has not "
        "ended)");
  }
  stepped_ = step_count() > 0;
  if (stepped_) return;
  for (const double rate : last_lrs()) {
    if (rate != 0) return;
  }
  Warn(
      "the learning rate is 0, since the optimizer's schedule begins with it and has not stepped: "
      "call the schedule's step() after optimizer.step()");
}

void SchedulerSlot::StepMetric(double metric) {
  CheckBound();
  controller_->CheckAllTakePart("step(metric) of a schedule");
  stepped_ = true;
  plateau_->Step(
      controller_->process().MeanOfAll(at::full({1}, metric, at::kDouble)).item<double>());
}

double SchedulerSlot::last_lr() const {
  CheckBound();
  return optimizer_->handle().lr(0);
}
std::vector<double> SchedulerSlot::last_lrs() const {
  CheckBound();
  std::vector<double> rates;
  for (int64_t g = 0; g < optimizer_->handle().num_groups(); ++g) {
    rates.push_back(optimizer_->handle().lr(g));
  }
  return rates;
}
int64_t SchedulerSlot::step_count() const {
  CheckBound();
  return plateau_ != nullptr ? plateau_->step_count() : scheduler_->step_count();
}
PlainState SchedulerSlot::SaveState() const {
  CheckBound();
  return plateau_ != nullptr ? plateau_->SaveState() : scheduler_->SaveState();
}
void SchedulerSlot::CheckState(const PlainState& state) const {
  CheckBound();
  if (plateau_ != nullptr) {
    plateau_->CheckState(state);
  } else {
    scheduler_->CheckState(state);
  }
}
void SchedulerSlot::LoadState(const PlainState& state) {
  CheckBound();
  if (plateau_ != nullptr) {
    plateau_->LoadState(state);
  } else {
    scheduler_->LoadState(state);
  }
  stepped_ = stepped_ || step_count() > 0;
}

}  // namespace muster::internal
