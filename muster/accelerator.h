#ifndef MUSTER_ACCELERATOR_H_
#define MUSTER_ACCELERATOR_H_

#include <cstdarg>
#include <cstdint>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <tuple>
#include <type_traits>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muster/data.h"
#include "muster/handles.h"
#include "muster/internal/divided_object.h"
#include "muster/internal/scopes.h"
#include "muster/optim.h"
#include "muster/options.h"
#include "muster/state.h"
#include "muster/subgroup.h"
#include "torch/optim/optimizer.h"
#include "worker/collective/nested_collectives.h"
#include "worker/data/gather_for_metrics.h"
#include "worker/job/environment.h"
#include "worker/job/trigger.h"
#include "worker/track/profile.h"
#include "worker/track/progress.h"
#include "worker/track/tracker.h"
#include "worker/train/autocast.h"

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace muster {

namespace internal {

// Returns parameters and buffers by name: those for which wanted(name) is true, or all if `wanted`
// is null.
std::map<std::string, at::Tensor> StateDictOf(
    ModelSlot& model, const std::function<bool(const std::string& name)>& wanted);

}  // namespace internal

// A progress bar over one pass of a loader: see Accelerator::tqdm().
template <class T>
class LoaderProgress : public Progress {
 public:
  class Iterator {
   public:
    Iterator(LoaderIterator<T> batches, Progress* bar, int64_t skipped)
        : batches_(std::move(batches)), bar_(bar) {
      // The pass may continue from a loaded state, and it may not be the first over this range.
      bar_->Restart(batches_ == std::default_sentinel ? 0 : (*batches_).info().index - skipped);
    }
    Batch<T>& operator*() const { return *batches_; }
    Batch<T>* operator->() const { return &*batches_; }
    Iterator& operator++() {
      ++batches_;
      bar_->Advance();
      return *this;
    }
    friend bool operator==(const Iterator& it, std::default_sentinel_t end) {
      return it.batches_ == end;
    }

   private:
    LoaderIterator<T> batches_;
    Progress* bar_;
  };

  // A copy of a loader shares its position.
  LoaderProgress(PreparedLoader<T> loader, ProgressOptions options)
      : Progress(std::move(options)), loader_(std::move(loader)) {}

  // Begins a pass over the loader.
  Iterator begin() { return Iterator(loader_.begin(), this, loader_.skipped()); }
  std::default_sentinel_t end() const { return {}; }

 private:
  const PreparedLoader<T> loader_;
};

// Runs your training loop on one process or on a cluster, in any precision: Accelerate's
// Accelerator for LibTorch.
//
//   muster::Accelerator accelerator;
//   auto [model, optimizer, loader] =
//       accelerator.prepare(net, adamw, muster::batches(data, 32).shuffle(true));
//   for (auto& [x, y] : loader) {
//     auto scope = accelerator.accumulate();
//     accelerator.backward(torch::nll_loss(model(x), y));
//     optimizer.step();
//     optimizer.zero_grad();
//   }
//
// It reads rank and world size from the environment (docs/environment.md); if they are absent, the
// job has one process. There is no global state: two Accelerators in one process are independent.
// Not thread-safe: use it from one training thread. Every process must call the methods marked
// (collective), in the same order; they block. Tensor code throws c10::Error; methods that use
// files or the coordinator return absl::Status.
class Accelerator {
 public:
  using Options = AcceleratorOptions;

  // Joins the job (collective): blocks until all processes have joined, at most Options::timeout.
  // Throws a one-line c10::Error that names the error in the environment or the missing processes.
  Accelerator();
  explicit Accelerator(const Options& options);
  // For programs that build the process group themselves, such as tests.
  explicit Accelerator(std::shared_ptr<internal::Core> core);
  ~Accelerator();
  Accelerator(const Accelerator&) = delete;
  Accelerator& operator=(const Accelerator&) = delete;

  // The place of this process in the job.
  at::Device device() const;
  int num_processes() const;
  int process_index() const;
  int local_process_index() const;
  bool is_main_process() const { return process_index() == 0; }
  bool is_local_main_process() const { return local_process_index() == 0; }
  bool is_last_process() const { return process_index() == num_processes() - 1; }
  bool use_distributed() const { return num_processes() > 1; }
  // Whether there are several processes, each with a GPU.
  bool multi_device() const { return use_distributed() && device().is_cuda(); }
  // "NO", "MULTI_CPU" or "MULTI_GPU".
  const char* distributed_type() const {
    return !use_distributed() ? "NO" : multi_device() ? "MULTI_GPU" : "MULTI_CPU";
  }
  const std::string& mixed_precision() const;
  const Environment& environment() const;
  bool split_batches() const { return options().data_loader.split_batches; }
  std::optional<bool> dispatch_batches() const { return options().data_loader.dispatch_batches; }
  bool even_batches() const { return options().data_loader.even_batches; }
  bool use_seedable_sampler() const { return options().data_loader.use_seedable_sampler; }
  bool non_blocking() const { return options().data_loader.non_blocking; }
  std::string project_dir() const;
  std::string logging_dir() const;
  const Options& options() const;

  // prepare.
  // (collective) Makes models, optimizers, loaders and schedules ready for this job and returns
  // them in the same order:
  //   model                -> AcceleratedModel       on device(), with process 0's parameters
  //   optimizer            -> AcceleratedOptimizer
  //   batches(dataset, n)  -> a loader of this process's batches
  //   schedule             -> AcceleratedScheduler   of the optimizer in the same call
  //   plateau schedule     -> AcceleratedPlateau     likewise
  //
  // - A model is a module holder (TORCH_MODULE, Sequential), a std::shared_ptr to a class derived
  //   from torch::nn::Module, an AnyModule or a jit::Module.
  // - An optimizer is torch::optim's or Muster's, by std::shared_ptr or by reference; the program
  //   keeps a referenced one alive.
  // - A schedule is an LrSchedulePtr, a std::vector of them with one per parameter group, or a
  //   torch::optim::LRScheduler by std::shared_ptr or reference.
  // - A plateau schedule is a PlateauSchedule or torch::optim's ReduceLROnPlateauScheduler.
  //
  // Prepared objects are returned unchanged; other types do not compile. One argument returns one
  // object, several return a tuple. The Accelerator forgets an object once the program holds
  // neither it nor what prepare() returned for it, so a loop over folds can prepare new ones each
  // time. Throws c10::Error: parameters differ between processes (named), a schedule without an
  // optimizer, a project folder that cannot be written.
  template <class... Objects>
  [[nodiscard]] auto prepare(Objects&&... objects);

  // Like prepare(), for one object. `evaluation_mode`: the model is not trained, and its gradients
  // are not exchanged.
  template <class M>
  [[nodiscard]] auto prepare_model(M module, bool evaluation_mode = false) {
    static_assert(
        internal::ModelTraits<M>::kIsModel,
        "prepare_model() takes a module holder, a std::shared_ptr to a class derived from "
        "torch::nn::Module, a torch::nn::AnyModule or a torch::jit::Module");
    if constexpr (internal::ModelTraits<M>::kIsModel) {
      auto slot = PrepareSlot(internal::ModelTraits<M>::Source(module), evaluation_mode);
      return AcceleratedModel<M>(std::move(module), std::move(slot));
    }
  }
  template <class O>
  [[nodiscard]] auto prepare_optimizer(O&& optimizer) {
    return prepare(std::forward<O>(optimizer));
  }
  template <class R>
  [[nodiscard]] auto prepare_data_loader(const R& recipe) {
    static_assert(IsBatchRecipe<R>::value, "prepare_data_loader() takes what batches() gives");
    return prepare(recipe);
  }
  // Prepares a schedule for an optimizer that is already prepared: an LrSchedulePtr, a list of
  // them, a PlateauSchedule, or a torch::optim schedule by reference.
  template <class S>
  [[nodiscard]] auto prepare_scheduler(const AcceleratedOptimizer& optimizer, S&& schedule) {
    return PrepareSchedule(std::forward<S>(schedule), optimizer.slot());
  }

  // Create what the sections "optimizer" and "scheduler" of a DeepSpeed configuration describe, for
  // prepare():
  //
  //   auto adamw = accelerator.make_optimizer(net->parameters(), {.lr = 1e-4});
  //   auto warmup = accelerator.make_scheduler(*adamw, {.total_num_steps = 9000});
  //   auto [model, optimizer, scheduler] = accelerator.prepare(net, adamw, warmup);
  //
  // They correspond to Accelerate's DummyOptim and DummyScheduler. Numbers in the configuration
  // take precedence; the arguments supply what is "auto" there. With such a section in the
  // configuration, optimizers and schedules made any other way are refused. Types: AdamW, Adam, SGD
  // and Adagrad; WarmupLR, WarmupDecayLR and WarmupCosineLR (worker/train/warmup_schedules.h). Both
  // throw c10::Error if the section is missing.
  std::shared_ptr<OptimizerHandle> make_optimizer(std::vector<at::Tensor> parameters,
                                                  const OptimizerArguments& arguments = {});
  std::shared_ptr<OptimizerHandle> make_optimizer(std::vector<ConfiguredGroup> groups,
                                                  const OptimizerArguments& arguments = {});
  // If warmup_max_lr is "auto", it is the rate of `optimizer`.
  LrSchedulePtr make_scheduler(const OptimizerHandle& optimizer,
                               const SchedulerArguments& arguments = {});

  // The step.
  // Begins a micro-step, which ends with the result's scope. Decides whether gradients are
  // exchanged and the optimizer steps: every gradient_accumulation_steps, and at the last batch of
  // a loader. Uses the batch of the innermost loop over a prepared loader of this Accelerator, or
  // `batch`.
  [[nodiscard]] internal::AccumulateScope accumulate();
  template <class T>
  [[nodiscard]] internal::AccumulateScope accumulate(const Batch<T>& batch) {
    return Accumulate(batch.info());
  }
  bool sync_gradients() const;
  int64_t gradient_accumulation_steps() const;
  void set_gradient_accumulation_steps(int64_t steps);

  // Backward pass of `loss` (0-d or one element), divided for the accumulation window and scaled
  // for fp16.
  void backward(const at::Tensor& loss);
  // The same with LibTorch's options: keeps the graph, builds higher-order derivatives, or
  // restricts the inputs. For example backward(loss, {.retain_graph = true}).
  void backward(const at::Tensor& loss, const BackwardOptions& how);
  // For a loss that is a mean over `weight` items, such as tokens: the update is then the mean over
  // all items of the window and of all processes. Use it once in all micro-steps of a window, or in
  // none; it throws if another loss of the window has no weight, because that would also be divided
  // by the items: add such a loss to `loss`. A loss of weight 0 adds nothing to gradients, even if
  // it is NaN, as the mean over no items is.
  void backward(const at::Tensor& loss, double weight);

  // Clips the gradients of `parameters` to the total norm; returns the norm before clipping (0-d).
  // Unscales first. Call it only if sync_gradients(); otherwise gradients are partial and it
  // throws.
  at::Tensor clip_grad_norm_(const std::vector<at::Tensor>& parameters, double max_norm,
                             double norm_type = 2.0);
  void clip_grad_value_(const std::vector<at::Tensor>& parameters, double clip_value);
  // Divides the gradients by the fp16 loss scale now instead of in step(). Does nothing without a
  // scaler.
  void unscale_gradients();
  // The same for one optimizer only.
  void unscale_gradients(AcceleratedOptimizer& optimizer);
  // Whether any optimizer skipped its last step because of inf or NaN.
  bool optimizer_step_was_skipped() const;

  // Backward passes in this scope do not exchange gradients.
  [[nodiscard]] internal::NoSyncScope no_sync() { return internal::NoSyncScope(core_.get()); }
  // Makes the next backward pass exchange gradients after forward passes under no_sync().
  template <class M>
  void trigger_sync_in_backward(AcceleratedModel<M>& model) {
    model.slot()->SyncInBackward();
  }
  // Applies the configured precision to code outside the model's forward, such as a loss.
  [[nodiscard]] AutocastGuard autocast();
  [[nodiscard]] AutocastGuard autocast(const AutocastOptions& autocast_options);
  // In this scope processes may have different numbers of batches: a process that has run out takes
  // part in the others' exchanges. `even_batches` applies to passes over prepared loaders that
  // begin in the scope. Each training step in the scope needs accumulate(), which announces the
  // step to the processes that have run out, and makes one backward() that exchanges gradients.
  // Throws c10::Error with more than one prepared model that is trained (that has parameters which
  // require a gradient), a sharded one, or SyncBatchNorm; backward() throws at the second of a
  // step. (collective) on entry.
  [[nodiscard]] internal::JoinScope join_uneven_inputs(bool even_batches = false) {
    return internal::JoinScope(core_.get(), even_batches);
  }

  // Collectives, over tensors and nested structures of them.

  // (collective) Concatenates along the first dimension in process order; a 0-d tensor gives one
  // value per process. Plain values in a structure with tensors (numbers, strings, lists of them)
  // keep this process's values; a value without a tensor does not compile: see gather_object().
  template <class T>
  [[nodiscard]] T gather(const T& value,
                         std::source_location where = std::source_location::current()) {
    Comm& comm = CommFor("gather()");
    return Gather(comm, value, where);
  }
  // (collective) Like gather, but drops the samples that only pad the last batch: a tensor whose
  // first dimension is the batch size is cut to the real samples of each process; other tensors are
  // gathered whole. Lists without tensors, even in a structure with tensors, are gathered as by
  // gather_object, and a list with one object per sample is cut in the same way. Any other value
  // without tensors is also gathered as by gather_object. A number or string in a structure with
  // tensors does not compile. `rows` overrides the inference from the first dimension:
  // MetricRows::kPerSample (any other length is an error) or MetricRows::kPerProcess (never cut).
  // Applies inside a loop over a prepared loader of this Accelerator; outside of one nothing is
  // cut. Refused inside join_uneven_inputs(). Throws c10::Error on all processes if batches differ
  // in length (even_batches = false) and a value has a row for each sample on some processes only.
  template <class T>
  [[nodiscard]] auto gather_for_metrics(
      const T& value, MetricRows rows = MetricRows::kAuto,
      std::source_location where = std::source_location::current()) {
    Comm& comm = CommFor("gather_for_metrics()");
    const BatchInfo* batch = nullptr;
    // With loaders side by side, BatchOfMetrics() throws if the batch is ambiguous, so it is called
    // only if there may be rows to cut.
    if constexpr (nested_internal::HoldsTensor<T>() || nested_internal::IsVector<T>) {
      batch = BatchOfMetrics();
    }
    return GatherValueForMetrics(comm, value, batch, rows, where);
  }
  template <class T, class U, class... Rest>
  requires(!std::is_same_v<U, MetricRows>) auto gather_for_metrics(const T& first, const U& second,
                                                                   const Rest&... rest) {
    static_assert(!(std::is_same_v<Rest, MetricRows> || ... || false),
                  "gather_for_metrics() of several values takes no MetricRows: gather each in a "
                  "call of its own");
    // Braces, because they are evaluated in order; collectives must be.
    return std::tuple{gather_for_metrics(first), gather_for_metrics(second),
                      gather_for_metrics(rest)...};
  }
  // (collective) The same as gather_for_metrics() for a given batch.
  template <class Data, class T>
  [[nodiscard]] auto gather_for_metrics_of(
      const Batch<Data>& batch, const T& value, MetricRows rows = MetricRows::kAuto,
      std::source_location where = std::source_location::current()) {
    Comm& comm = CommFor("gather_for_metrics_of()");
    return GatherValueForMetrics(comm, value, &batch.info(), rows, where);
  }
  // (collective) Returns the objects of all processes in process order: lists are joined, anything
  // else becomes an element. Tensors in them arrive on the CPU, also this process's own.
  template <class T>
  [[nodiscard]] auto gather_object(const T& object,
                                   std::source_location where = std::source_location::current()) {
    Comm& comm = CommFor("gather_object()");
    return GatherObject(comm, object, where);
  }
  // (collective) Gathers lists with one object per sample, without the samples that only pad the
  // last batch.
  template <class E>
  [[nodiscard]] std::vector<E> gather_object_for_metrics(
      const std::vector<E>& objects, MetricRows rows = MetricRows::kAuto,
      std::source_location where = std::source_location::current()) {
    Comm& comm = CommFor("gather_object_for_metrics()");
    return GatherValueForMetrics(comm, objects, BatchOfMetrics(), rows, where);
  }
  // (collective) Returns the "sum", "mean", "max" or "min" over all processes, times `scale`, of a
  // tensor, a structure of tensors or a number. Does not change the input. A number in a structure
  // with tensors does not compile.
  template <class T>
  [[nodiscard("reduce() returns the result and leaves its argument as it is")]] T reduce(
      const T& value, const std::string& reduction = "sum", double scale = 1.0,
      std::source_location where = std::source_location::current()) {
    Comm& comm = CommFor("reduce()");
    return Reduce(comm, value, reduction, scale, where);
  }
  // (collective) Pads dimension `dim` with `pad_index` to the largest size on any process.
  template <class T>
  [[nodiscard]] T pad_across_processes(
      const T& value, int64_t dim = 0, const at::Scalar& pad_index = 0, bool pad_first = false,
      std::source_location where = std::source_location::current()) {
    Comm& comm = CommFor("pad_across_processes()");
    return PadAcrossProcesses(comm, value, dim, pad_index, pad_first, where);
  }
  // (collective) Returns process `from_process`'s value, with tensors on this process's device.
  // Takes tensors and everything that gather_object() takes, also together. Does not change the
  // input, unlike the broadcasts of Accelerate and LibTorch: `t = accelerator.broadcast(t)`.
  template <class T>
  [[nodiscard("broadcast() returns the result and leaves its argument as it is")]] T broadcast(
      const T& value, int from_process = 0,
      std::source_location where = std::source_location::current()) {
    Comm& comm = CommFor("broadcast()");
    return Broadcast(
        comm, MapTensors(value, [](const at::Tensor& t) { return t.defined() ? t.clone() : t; }),
        from_process, where);
  }
  // (collective) Overwrites `list` with that of process `from_process`. Tensors in it arrive on the
  // CPU, also on that process.
  template <class E>
  void broadcast_object_list(std::vector<E>& list, int from_process = 0) {
    Comm& comm = CommFor("broadcast_object_list()");
    BroadcastObjectList(comm, list, from_process);
  }
  // Returns this process's part of a vector, map or tensor. Does not change the input. No
  // communication.
  template <class T>
  [[nodiscard]] T split_between_processes(const T& inputs, bool apply_padding = false) {
    return SplitBetweenProcesses(num_processes(), process_index(), inputs, apply_padding);
  }

  // (collective) Creates a group of some processes for collectives among them. Every process of the
  // job passes the same indices, in any order. Throws c10::Error for an index that is out of range
  // or repeated, and if processes pass different indices.
  Subgroup new_group(const std::vector<int>& process_indices);

  // Process control.
  // Calls printf on one process of each host.
  void print(const char* format, ...) __attribute__((format(printf, 2, 3)));
  // (collective) Returns when every process has arrived. With a coordinator, all processes throw
  // c10::Error at the deadline (zero: Options::timeout) if one is missing: the error names its
  // host, pid, state, last step and last collective, and one process prints its stack. Processes
  // that wait under different names at the same time fail at once.
  void wait_for_everyone(absl::Duration timeout = absl::ZeroDuration(),
                         const std::string& name = "wait_for_everyone",
                         std::source_location where = std::source_location::current());

  // Wraps `function` so that it runs on the named process(es) only; elsewhere the call does
  // nothing. The wrapper returns the result as std::optional, empty elsewhere; for a function
  // without a result it returns whether the function ran.
  template <class F>
  auto on_main_process(F function) const {
    return Only(is_main_process(), std::move(function));
  }
  template <class F>
  auto on_local_main_process(F function) const {
    return Only(is_local_main_process(), std::move(function));
  }
  template <class F>
  auto on_last_process(F function) const {
    return Only(is_last_process(), std::move(function));
  }
  template <class F>
  auto on_process(int process_index, F function) const {
    return Only(this->process_index() == process_index, std::move(function));
  }
  template <class F>
  auto on_local_process(int local_process_index, F function) const {
    return Only(this->local_process_index() == local_process_index, std::move(function));
  }

  // (collective) Process 0 (of the job, of each host) runs the scope before the others. The scope
  // also ends when an exception leaves it, so the others never wait forever.
  [[nodiscard]] internal::FirstScope main_process_first() {
    return internal::FirstScope(core_.get(), false);
  }
  [[nodiscard]] internal::FirstScope local_main_process_first() {
    return internal::FirstScope(core_.get(), true);
  }

  // A flag that any process can set and all see: check_trigger() (collective) is true on every
  // process if set_trigger() was called on any since the last check that was true.
  void set_trigger();
  bool check_trigger();

  // Named triggers: any process, or an operator (`muster trigger`), requests an action of all
  // processes at the same step. should_stop() acts on "stop"; every other name means what the
  // program does when its check is true. Check on all processes, once per step:
  //
  //   optimizer.step();
  //   if (accelerator.check_trigger("checkpoint")) accelerator.save_state();
  //   if (accelerator.should_stop()) { accelerator.save_state(); return absl::OkStatus(); }
  //
  // Not a collective: a check reads memory (tens of nanoseconds), and the coordinator ensures that
  // all processes act after the same global_step(). A trigger takes effect only once all processes
  // have begun to check. Without a coordinator (torchrun) a check is a collective, and refused
  // inside join_uneven_inputs().
  //
  // Returns each trigger once. Throws c10::Error once the generation has ended.
  std::optional<Trigger> check_trigger(const std::string& name);
  // Returns without waiting for the processes to act. `payload`: at most 64 KiB. Errors:
  // INVALID_ARGUMENT, UNAVAILABLE, RESOURCE_EXHAUSTED.
  absl::Status set_trigger(const std::string& name, const std::string& payload = "");
  // Whether the trigger "stop" has taken effect; true from then on. SIGTERM at any process (a
  // preempted node, `muster launch` stopped) raises it, see AcceleratorOptions::stop_on_sigterm:
  // save and return within the grace period.
  bool should_stop();

  // State.
  // (collective) Writes models, optimizers, schedules, loader positions, scaler, random states and
  // registered objects to `directory` or, if that is empty, to the next numbered folder under the
  // project directory. When it returns on any process, the checkpoint is complete; with
  // AcceleratorOptions::checkpoint.asynchronous or .memory only the copy is complete, and the error
  // may be that of an earlier save (this one continues). No other thread may change the saved state
  // until it returns. Layout: docs/checkpoint_format.md. Errors: RESOURCE_EXHAUSTED,
  // PERMISSION_DENIED, FAILED_PRECONDITION (in the middle of an accumulation window, if a thread
  // changed a tensor during the save, or if processes that do not train apart have made different
  // steps of an optimizer or given it other hyper-parameters), ALREADY_EXISTS. Between backward()
  // under no_sync() and the step that uses its gradients it warns that a checkpoint does not hold
  // them.
  absl::Status save_state(const std::string& directory = "");
  // Blocks until asynchronous saves are on disk, the last save in memory has ended and the
  // checkpoints that they displace are deleted; save_state() does not wait for that deletion.
  // Returns the error of a failed save that has not been reported yet. Call it on all processes or
  // on none, because each waits for the others' parts.
  absl::Status wait_for_checkpoint();
  // Returns the progress of the save that is being written now, for this process's files; nothing
  // if none is. Does not block, so it may be called at each step. The coordinator's reports
  // (`muster status`) add up all processes.
  std::optional<RunningSave> save_progress() const;
  // (collective) Restores the state that save_state() wrote, also on another number of processes.
  // Loaders continue at the exact next sample, epochs() at the saved epoch. An empty `directory`
  // means the newest complete checkpoint of the project directory. First checks that every prepared
  // object can take its part; then loads registered objects, then the rest, and drops gradients. An
  // error says what has changed, if anything has. Errors: NOT_FOUND, DATA_LOSS,
  // FAILED_PRECONDITION, and those of the disk: if a newer checkpoint cannot be read at the moment,
  // it does not fall back to an older one.
  absl::Status load_state(const std::string& directory = "");
  // Like load_state, but returns OK if there is no checkpoint yet. FAILED_PRECONDITION if there is
  // something else: a state that Accelerate has saved, or a `directory` that is not empty.
  absl::Status load_state_if_present(const std::string& directory = "");
  // (collective) Loads only the weights of the prepared models from such a state, or those of one
  // model from files that muster::load_model reads: by prefix, under other names, or only those
  // present (`strict` false), as there. For a sharded model each process reads only the ranges of
  // its parts. `options` apply to each model, except `dtype`, which is refused. Optimizers,
  // schedules, loaders, random states and counters stay as they are. Either all models change, on
  // all processes, or none; if the disk fails in the middle of a model's files, any use of the
  // model is refused until load_state(). Returns what was loaded and what was not. Errors: as
  // load_state; INVALID_ARGUMENT for weights that do not fit.
  absl::StatusOr<LoadedState> load_weights(const std::string& directory = "",
                                           const LoadWeightsOptions& options = {});
  // The directory of this process's last save_state or load_state; an asynchronous save may still
  // be writing it. A load may use a checkpoint whose process ended before renaming it from
  // DIR.tmp-...: then this is that folder, and DIR once the checkpoint has been renamed.
  const std::string& last_checkpoint() const;
  // The number of the next save_state() without a directory, judging by this process's saves and
  // loads.
  int64_t save_iteration() const;
  // Adds objects to the state: saving calls `StateDict state_dict() const` on process 0, loading
  // calls `load_state_dict(const StateDict&)` on all processes, before prepared objects are loaded.
  // Keep them alive, or call remove() of the result before one of them is destroyed (an Ema does so
  // itself). (All processes save and load an Ema of a sharded model, each its part.)
  template <Checkpointable... Objects>
  HookHandle register_for_checkpointing(Objects&... objects) {
    return HandleOf(
        {Register([&objects] { return StateDict(objects.state_dict()); },
                  [&objects](const StateDict& state) { objects.load_state_dict(state); },
                  internal::DividedIn(objects), internal::LifetimeOf(objects))...});
  }
  // Adds an object given by its save and load functions.
  HookHandle register_for_checkpointing(std::function<PlainState()> save,
                                        std::function<void(const PlainState&)> load);
  // Register hooks that run before models are written or loaded: see muster/state.h.
  HookHandle register_save_state_pre_hook(SaveStateHook hook);
  HookHandle register_load_state_pre_hook(LoadStateHook hook);

  // (collective) Writes only the model's tensors, on process 0, in the format that other libraries
  // read: to model.safetensors in `directory` or, above `max_shard_size` ("500MB", "10GB"), to
  // shards with an index. All processes return the same status: INVALID_ARGUMENT for a malformed
  // size, FAILED_PRECONDITION if `directory` is a file, ALREADY_EXISTS if it is a checkpoint (whose
  // model load_model() reads as it is), RESOURCE_EXHAUSTED, PERMISSION_DENIED.
  template <class M>
  absl::Status save_model(const AcceleratedModel<M>& model, const std::string& directory,
                          const std::string& max_shard_size = "10GB") {
    return SaveModel(*model.slot(), directory, max_shard_size);
  }
  // Returns the model's parameters and buffers by name, as before prepare(). They are not copies,
  // unless the model is sharded: then the call is a collective that returns copies on the CPU to
  // process 0 and nothing to the others.
  template <class M>
  std::map<std::string, at::Tensor> get_state_dict(const AcceleratedModel<M>& model) const {
    return internal::StateDictOf(*model.slot(), nullptr);
  }
  // The same for only the parameters and buffers for which wanted(name) is true, such as adapters.
  // For a sharded model, processes exchange only these. `wanted` must return the same on every
  // process; otherwise the call throws on all of them.
  template <class M>
  std::map<std::string, at::Tensor> get_state_dict(
      const AcceleratedModel<M>& model,
      const std::function<bool(const std::string& name)>& wanted) const {
    TORCH_CHECK_VALUE(wanted != nullptr, "get_state_dict(): the filter is empty");
    return internal::StateDictOf(*model.slot(), wanted);
  }
  // Writes the tensors to a safetensors file on process 0 or, with
  // options.project.save_on_each_node, on the first process of each node; does nothing elsewhere.
  // Errors: those of SaveTensors().
  absl::Status save(const std::map<std::string, at::Tensor>& tensors, const std::string& path);
  // The number of optimizer steps of the first prepared optimizer, over all runs.
  int64_t global_step() const;

  // `for (int64_t epoch : accelerator.epochs(3))` gives 0, 1, 2; after load_state(), those that
  // remain.
  internal::EpochRange epochs(int64_t count) { return internal::EpochRange(core_.get(), count); }
  // Returns `loader` without its epoch's first `num_batches` batches, for one pass. After
  // load_state() the loader continues where it was without this call; skipping batches that it has
  // already delivered skips nothing more.
  template <class Loader>
  auto skip_first_batches(Loader& loader, int64_t num_batches) {
    return SkipFirstBatches(loader, num_batches);
  }

  // (collective) Runs `body` with all parameters of a sharded model gathered: `body` can read them,
  // and write them if every process writes the same values. The parameters of a model that is not
  // sharded are always accessible.
  template <class M>
  void summon_full_params(const AcceleratedModel<M>& model, const std::function<void()>& body) {
    Summon(*model.slot(), body);
  }

  // Releases the models, optimizers, schedules and loaders that this object keeps for save_state,
  // and forgets accumulation. To continue training with one of them, pass the object itself, not
  // its handle, to prepare() again: step() of a forgotten optimizer throws.
  void free_memory();
  void clear() { free_memory(); }
  // Returns the model as it was before prepare().
  template <class M>
  M& unwrap_model(AcceleratedModel<M>& model) {
    return model.unwrap();
  }
  // Ends the job for this process: flushes trackers, waits for asynchronous saves and leaves the
  // rendezvous. Throws if a save has failed and the error has not been reported yet.
  void end_training();

  // Logs and trackers.
  // Opens trackers ("tensorboard", "jsonl", "csv", a class registered with RegisterTrackerClass, or
  // your own objects) under the logging directory and passes them `config`. Processes other than
  // the main one open only trackers that request it. If called again, for example for the next
  // fold, it first finishes the open trackers, whose pointers become invalid. Errors: NOT_FOUND for
  // an unknown kind, FAILED_PRECONDITION after end_training(), INVALID_ARGUMENT for two trackers of
  // one name and for null, and those of opening files.
  absl::Status init_trackers(const std::string& project_name, const TrackerValues& config = {},
                             const std::vector<std::string>& kinds = {"tensorboard"},
                             std::vector<std::unique_ptr<GeneralTracker>> own = {});
  // Queues values for the trackers: `accelerator.log({{"loss", 0.5}}, step)`. Without a step, it is
  // the one after that of the previous entry; the first entry continues from what is in the
  // trackers' files. Does not wait for a disk unless 4,096 entries are queued already: then it
  // blocks until one has been taken. After a minute without that it returns, drops entries while
  // there is no room, and warns which tracker is too slow. After end_training(), values are lost,
  // with one warning. Throws c10::Error before init_trackers().
  void log(TrackerValues values, std::optional<int64_t> step = std::nullopt);
  // Returns the tracker of that name, so that you can call its own methods; on a process without
  // it, a tracker that does nothing. Blocks until everything logged so far has been written. After
  // the next log() a thread of Muster uses the tracker too, so call get_tracker() again before each
  // use. Errors: NOT_FOUND; FAILED_PRECONDITION before init_trackers().
  absl::StatusOr<GeneralTracker*> get_tracker(const std::string& name);
  // Returns a progress bar on the local main process, silent if standard error is not a terminal.
  Progress progress(int64_t total, const std::string& description = "");
  template <class T>
  Progress progress(const PreparedLoader<T>& loader, const std::string& description = "") {
    return progress(loader.has_size() ? loader.size() : 0, description);
  }
  // Returns the loader's batches as a range with such a bar, which counts the finished ones. Each
  // pass begins the bar again at its first batch, so that batches before a resume count neither for
  // the rate nor for the time.
  //
  //   for (auto& [x, y] : accelerator.tqdm(loader, "epoch 1")) { ... }
  template <class T>
  LoaderProgress<T> tqdm(const PreparedLoader<T>& loader, const std::string& description = "") {
    return LoaderProgress<T>(loader,
                             OptionsOfBar(loader.has_size() ? loader.size() : 0, description));
  }
  // Profiles LibTorch for the lifetime of the result, and writes
  // OUTPUT_DIR/profile_{process_index}.json.
  [[nodiscard]] Profile profile(const std::string& output_dir);
  // The same with options: a schedule (call step() on the result at the end of each training step),
  // shapes, memory. Sets `rank` and `cuda` for this process.
  [[nodiscard]] Profile profile(ProfileOptions options);

  // The process group, for code outside the loop: trackers, samplers, your own collectives.
  Comm& comm();
  internal::Core& core() { return *core_; }

 private:
  ProgressOptions OptionsOfBar(int64_t total, const std::string& description) const;

  // Returns the handle of the hooks or registered objects with these numbers.
  HookHandle HandleOf(std::vector<int64_t> numbers);

  // Access to the Core for the templates. CommFor throws if processes that have run out of batches
  // would not take part in `call`.
  Comm& CommFor(const char* call);
  const BatchInfo* BatchOfMetrics() const;
  internal::AccumulateScope Accumulate(const BatchInfo& info);
  int64_t Register(std::function<StateDict()> save, std::function<void(const StateDict&)> load,
                   std::shared_ptr<internal::DividedObject> divided,
                   std::optional<std::weak_ptr<const void>> lifetime);
  void Summon(internal::ModelSlot& model, const std::function<void()>& body);
  absl::Status SaveModel(internal::ModelSlot& model, const std::string& directory,
                         const std::string& max_shard_size);

  // Makes a slot keep alive the Core that it refers to. `keep`: an object that must outlive the
  // slot.
  template <class Slot>
  std::shared_ptr<Slot> Keep(std::shared_ptr<Slot> slot) const;
  std::shared_ptr<internal::ModelSlot> PrepareSlot(std::unique_ptr<internal::ModelSource> model,
                                                   bool evaluation);
  using OptimizerSlotPtr = std::shared_ptr<internal::OptimizerSlot>;
  OptimizerSlotPtr PrepareSlot(torch::optim::Optimizer& optimizer,
                               std::shared_ptr<void> keep = nullptr);
  OptimizerSlotPtr PrepareSlot(OptimizerHandle& optimizer, std::shared_ptr<void> keep = nullptr);
  // Prepare a schedule for `optimizer` or, if that is null, for the one optimizer of this prepare()
  // call.
  using SchedulerSlotPtr = std::shared_ptr<internal::SchedulerSlot>;
  SchedulerSlotPtr PrepareSlot(LrSchedulePtr schedule, const OptimizerSlotPtr& optimizer);
  SchedulerSlotPtr PrepareSlot(std::vector<LrSchedulePtr> schedules,
                               const OptimizerSlotPtr& optimizer);
  SchedulerSlotPtr PrepareSlot(const PlateauSchedule& schedule, const OptimizerSlotPtr& optimizer);
  SchedulerSlotPtr PrepareSlot(torch::optim::LRScheduler& schedule, std::shared_ptr<void> keep,
                               const OptimizerSlotPtr& optimizer);
  SchedulerSlotPtr PrepareSlot(torch::optim::ReduceLROnPlateauScheduler& schedule,
                               std::shared_ptr<void> keep, const OptimizerSlotPtr& optimizer);
  LoaderOptions loader_options() const;
  std::shared_ptr<LoaderObserver> loader_observer() const;
  void RegisterLoader(std::shared_ptr<LoaderStateHandle> loader);

  template <class F>
  static auto Only(bool here, F function);

  template <class T>
  auto PrepareOne(T&& object);
  template <class S>
  auto PrepareSchedule(S&& schedule, const OptimizerSlotPtr& optimizer);

  std::shared_ptr<internal::Core> core_;
};

// The program's arguments without its name, passed to the function of run().
using Arguments = std::vector<std::string>;

// Makes the Accelerator, calls `train(accelerator)` or `train(accelerator, arguments)`, which
// return absl::Status or nothing, and converts the result to the exit code of main(): 0, or 1 after
// one line on standard error that names the process and the error. Catches exceptions of every
// kind.
template <class F>
int run(int argc, char** argv, const AcceleratorOptions& options, F train);
template <class F>
int run(int argc, char** argv, F train) {
  return run(argc, argv, AcceleratorOptions(), std::move(train));
}

// Like run(), but when the job loses another process (killed, crashed, its machine gone), this one
// continues: `train` ends with the error of its collective and is called again in this process,
// with the Accelerator of the next generation, as soon as the lost process has restarted. It begins
// as in a new process, with the same random state: it creates models, optimizers and loaders again,
// and load_state_if_present() restores the newest checkpoint. Objects created outside `train` (data
// sets, tokenizers, caches) stay; do not keep anything there that an Accelerator prepared.
//
//   int main(int argc, char** argv) { return muster::run_elastic(argc, argv, Train); }
//
// It needs `muster launch` or `muster-agent` with max_restarts; each loss counts as a restart. Any
// other error of `train` ends the process as in run(). So does the loss of a process without such
// an agent or on GPUs: then all processes restart.
template <class F>
int run_elastic(int argc, char** argv, const AcceleratorOptions& options, F train);
template <class F>
int run_elastic(int argc, char** argv, F train) {
  return run_elastic(argc, argv, AcceleratorOptions(), std::move(train));
}

// Below: templates.

namespace internal {

template <class T>
struct IsPrepared : std::false_type {};
template <class M>
struct IsPrepared<AcceleratedModel<M>> : std::true_type {};
template <>
struct IsPrepared<AcceleratedOptimizer> : std::true_type {};
template <>
struct IsPrepared<AcceleratedScheduler> : std::true_type {};
template <>
struct IsPrepared<AcceleratedPlateau> : std::true_type {};
template <class T>
struct IsPrepared<PreparedLoader<T>> : std::true_type {};

// std::shared_ptr<D> or std::unique_ptr<D>: D; anything else: void.
template <class P>
struct PointeeOf {
  using type = void;
};
template <class D>
struct PointeeOf<std::shared_ptr<D>> {
  using type = D;
};
template <class D, class Deleter>
struct PointeeOf<std::unique_ptr<D, Deleter>> {
  using type = D;
};
template <class P>
inline constexpr bool kIsSharedPtr = false;
template <class D>
inline constexpr bool kIsSharedPtr<std::shared_ptr<D>> = true;

// These types are only declared here; code that has an object of one has included its header.
template <class D>
inline constexpr bool kIsTorchSchedule = std::is_base_of_v<torch::optim::LRScheduler, D>;
template <class D>
inline constexpr bool kIsTorchPlateau =
    std::is_base_of_v<torch::optim::ReduceLROnPlateauScheduler, D>;
template <class D>
inline constexpr bool kIsOptimizer =
    std::is_base_of_v<torch::optim::Optimizer, D> || std::is_base_of_v<OptimizerHandle, D>;

template <class D>
concept IsTorchLoader = requires(D& loader) {
  loader.begin();
  loader.join();
  loader.options();
};
template <class D>
constexpr bool IsDataset() {
  if constexpr (std::is_class_v<D>) {
    return dataset_internal::IsMapStyle<D> || dataset_internal::IsStream<D>;
  } else {
    return false;
  }
}

// The compiler message for a D that prepare() does not take, from the most specific to the most
// general.
template <class D>
constexpr auto Refuse() {
  using Pointee = std::remove_pointer_t<
      std::conditional_t<std::is_pointer_v<D>, D, typename PointeeOf<D>::type*>>;
  static_assert(
      !std::is_base_of_v<torch::nn::Module, D>,
      "prepare() cannot hold a module by value or reference: make it a std::shared_ptr "
      "(auto net = std::make_shared<Net>(...)) or a TORCH_MODULE holder, and prepare that");
  static_assert(std::is_void_v<Pointee> || !std::is_base_of_v<torch::nn::Module, Pointee>,
                "prepare() cannot hold a module by a raw or unique pointer: make it a "
                "std::shared_ptr and prepare that");
  static_assert(
      std::is_void_v<Pointee> || !kIsOptimizer<Pointee>,
      "prepare() takes an optimizer by reference or std::shared_ptr: pass *optimizer, and "
      "keep the pointer alive");
  static_assert(std::is_void_v<Pointee> || !(kIsTorchSchedule<Pointee> || kIsTorchPlateau<Pointee>),
                "prepare() takes a schedule of LibTorch's by reference or std::shared_ptr: pass "
                "*schedule, and keep the pointer alive");
  static_assert(!IsTorchLoader<D> && !IsTorchLoader<Pointee>,
                "prepare() cannot shard a data loader of LibTorch's: pass the data set instead, as "
                "muster::batches(dataset, batch_size)");
  static_assert(
      !std::is_same_v<D, at::Tensor>,
      "prepare() does not take tensors: a tensor of data goes in as muster::batches(tensor, "
      "batch_size), a parameter as a member of a module");
  static_assert(
      !IsDataset<D>() && !IsDataset<Pointee>(),
      "prepare() does not take a bare data set: wrap it as muster::batches(dataset, batch_size)");
  static_assert(kNever<D>,
                "prepare() does not know this type: it takes models, optimizers, "
                "muster::batches(dataset, batch_size), and learning-rate schedules");
}

// The part of run() and run_elastic() that does not depend on the function.
int Run(int argc, char** argv, const AcceleratorOptions& options, bool elastic,
        const std::function<absl::Status(Accelerator&, const Arguments&)>& train);

template <class F>
int RunOf(int argc, char** argv, const AcceleratorOptions& options, bool elastic, F train) {
  constexpr bool kWithArguments = std::is_invocable_v<F&, Accelerator&, const Arguments&>;
  static_assert(kWithArguments || std::is_invocable_v<F&, Accelerator&>,
                "muster::run() calls train(accelerator) or train(accelerator, arguments): make its "
                "parameters muster::Accelerator& and, perhaps, const muster::Arguments&");
  const auto call = [&](Accelerator& accelerator, const Arguments& arguments) {
    if constexpr (kWithArguments) {
      return train(accelerator, arguments);
    } else {
      return train(accelerator);
    }
  };
  using Result = std::invoke_result_t<decltype(call), Accelerator&, const Arguments&>;
  static_assert(std::is_void_v<Result> || std::is_convertible_v<Result, absl::Status>,
                "the function given to muster::run() must return absl::Status or nothing");
  const std::function<absl::Status(Accelerator&, const Arguments&)> with_status =
      [&](Accelerator& accelerator, const Arguments& arguments) -> absl::Status {
    if constexpr (std::is_void_v<Result>) {
      call(accelerator, arguments);
      return absl::OkStatus();
    } else {
      return call(accelerator, arguments);
    }
  };
  return Run(argc, argv, options, elastic, with_status);
}

}  // namespace internal

template <class F>
int run(int argc, char** argv, const AcceleratorOptions& options, F train) {
  return internal::RunOf(argc, argv, options, /*elastic=*/false, std::move(train));
}
template <class F>
int run_elastic(int argc, char** argv, const AcceleratorOptions& options, F train) {
  return internal::RunOf(argc, argv, options, /*elastic=*/true, std::move(train));
}

template <class S>
auto Accelerator::PrepareSchedule(S&& schedule, const OptimizerSlotPtr& optimizer) {
  using D = std::decay_t<S>;
  using Pointee = typename internal::PointeeOf<D>::type;
  if constexpr (std::is_convertible_v<D, LrSchedulePtr>) {
    return AcceleratedScheduler(PrepareSlot(LrSchedulePtr(schedule), optimizer));
  } else if constexpr (std::is_same_v<D, std::vector<LrSchedulePtr>>) {
    return AcceleratedScheduler(PrepareSlot(schedule, optimizer));
  } else if constexpr (std::is_same_v<D, PlateauSchedule>) {
    return AcceleratedPlateau(PrepareSlot(schedule, optimizer));
  } else if constexpr (internal::kIsSharedPtr<D>) {
    TORCH_CHECK(schedule != nullptr, "prepare() got an empty pointer to a schedule");
    using Handle = std::conditional_t<internal::kIsTorchPlateau<Pointee>, AcceleratedPlateau,
                                      AcceleratedScheduler>;
    return Handle(PrepareSlot(*schedule, schedule, optimizer));
  } else {
    static_assert(
        internal::kIsTorchSchedule<D> || internal::kIsTorchPlateau<D>,
        "prepare_scheduler() takes a muster schedule (muster::StepLR(10), ...), a list of "
        "them, PlateauSchedule, or a schedule of torch::optim's");
    static_assert(
        std::is_lvalue_reference_v<S>,
        "prepare() borrows a schedule of torch::optim's: give it a name and keep it alive");
    using Handle =
        std::conditional_t<internal::kIsTorchPlateau<D>, AcceleratedPlateau, AcceleratedScheduler>;
    return Handle(PrepareSlot(schedule, nullptr, optimizer));
  }
}

template <class T>
auto Accelerator::PrepareOne(T&& object) {
  using D = std::decay_t<T>;
  using Pointee = typename internal::PointeeOf<D>::type;
  if constexpr (internal::IsPrepared<D>::value) {
    return object;
  } else if constexpr (internal::ModelTraits<D>::kIsModel) {
    return prepare_model(D(object));
  } else if constexpr (internal::kIsOptimizer<D>) {
    static_assert(std::is_lvalue_reference_v<T>,
                  "prepare() borrows the optimizer: give it a name and keep it alive");
    static_assert(!std::is_const_v<std::remove_reference_t<T>>,
                  "prepare() got a const optimizer, which cannot step");
    return AcceleratedOptimizer(PrepareSlot(object));
  } else if constexpr (internal::kIsSharedPtr<D> && internal::kIsOptimizer<Pointee>) {
    TORCH_CHECK(object != nullptr, "prepare() got an empty pointer to an optimizer");
    return AcceleratedOptimizer(PrepareSlot(*object, object));
  } else if constexpr (IsBatchRecipe<D>::value) {
    auto loader = PrepareLoader(object, loader_options(), &comm(), loader_observer());
    RegisterLoader(loader.state_handle());
    return loader;
  } else if constexpr (std::is_convertible_v<D, LrSchedulePtr> ||
                       std::is_same_v<D, std::vector<LrSchedulePtr>> ||
                       std::is_same_v<D, PlateauSchedule> || internal::kIsTorchSchedule<D> ||
                       internal::kIsTorchPlateau<D> ||
                       (internal::kIsSharedPtr<D> && (internal::kIsTorchSchedule<Pointee> ||
                                                      internal::kIsTorchPlateau<Pointee>))) {
    return PrepareSchedule(std::forward<T>(object), nullptr);
  } else {
    internal::Refuse<D>();
  }
}

template <class... Objects>
auto Accelerator::prepare(Objects&&... objects) {
  const internal::PrepareCall call(core_.get());
  if constexpr (sizeof...(Objects) == 1) {
    return PrepareOne(std::forward<Objects>(objects)...);
  } else {
    // A braced list is evaluated in order, which the collectives inside depend on.
    return std::tuple{PrepareOne(std::forward<Objects>(objects))...};
  }
}

template <class F>
auto Accelerator::Only(bool here, F function) {
  return [here, function = std::move(function)](auto&&... args) mutable {
    using Result = std::invoke_result_t<F&, decltype(args)...>;
    if constexpr (std::is_void_v<Result>) {
      if (!here) return false;
      function(std::forward<decltype(args)>(args)...);
      return true;
    } else {
      if (!here) return std::optional<Result>();
      return std::optional<Result>(function(std::forward<decltype(args)>(args)...));
    }
  };
}

}  // namespace muster

#endif  // MUSTER_ACCELERATOR_H_
