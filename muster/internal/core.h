#ifndef MUSTER_INTERNAL_CORE_H_
#define MUSTER_INTERNAL_CORE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <type_traits>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "muster/internal/model_slot.h"
#include "muster/internal/model_source.h"
#include "muster/internal/scopes.h"
#include "muster/internal/slots.h"
#include "muster/options.h"
#include "muster/state.h"
#include "torch/optim/optimizer.h"
#include "worker/collective/comm.h"
#include "worker/collective/progress_board.h"
#include "worker/data/batch.h"
#include "worker/data/loader.h"
#include "worker/job/environment.h"
#include "worker/job/job_triggers.h"
#include "worker/job/join_job.h"
#include "worker/nested/nested.h"
#include "worker/parallel/ddp.h"
#include "worker/parallel/uneven_inputs.h"
#include "worker/track/tracker_set.h"
#include "worker/train/accumulation.h"
#include "worker/train/autocast.h"
#include "worker/train/grad_scaler.h"
#include "worker/train/lr_scheduler.h"
#include "worker/train/optimizer_handle.h"
#include "worker/train/plain_state.h"
#include "worker/train/prepared_scheduler.h"

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

namespace muster {
class AsyncSaver;
}  // namespace muster

// What stands behind Accelerator and the handles it gives out. Not part of what users include.
namespace muster::internal {

// The state of an Accelerator. Not thread-safe.
class Core {
 public:
  explicit Core(const AcceleratorOptions& options);
  // In a process that has joined its job already.
  Core(const AcceleratorOptions& options, JoinedProcess process);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const Environment& environment() const { return process_.environment; }
  const AcceleratorOptions& options() const { return options_; }
  at::Device device() const { return device_; }
  int rank() const { return process_.comm->rank(); }
  int size() const { return process_.comm->size(); }
  int local_rank() const { return process_.environment.local_rank.value; }
  Comm& comm() { return *process_.comm; }
  const std::string& mixed_precision() const { return process_.environment.mixed_precision.value; }

  std::shared_ptr<ModelSlot> PrepareModel(std::unique_ptr<ModelSource> source, bool evaluation);
  // `keep`: what must live as long as the slot.
  std::shared_ptr<OptimizerSlot> PrepareOptimizer(torch::optim::Optimizer& optimizer,
                                                  std::shared_ptr<void> keep = nullptr);
  std::shared_ptr<OptimizerSlot> PrepareOptimizer(OptimizerHandle& optimizer,
                                                  std::shared_ptr<void> keep = nullptr);
  // For the one optimizer of this prepare() call or, if given, for `optimizer`.
  std::shared_ptr<SchedulerSlot> PrepareSchedule(
      LrSchedulePtr schedule, const std::shared_ptr<OptimizerSlot>& optimizer = nullptr);
  // One for each parameter group.
  std::shared_ptr<SchedulerSlot> PrepareSchedule(
      std::vector<LrSchedulePtr> schedules,
      const std::shared_ptr<OptimizerSlot>& optimizer = nullptr);
  std::shared_ptr<SchedulerSlot> PrepareSchedule(
      const PlateauSchedule& schedule, const std::shared_ptr<OptimizerSlot>& optimizer = nullptr);
  std::shared_ptr<SchedulerSlot> PrepareSchedule(
      torch::optim::LRScheduler& schedule, std::shared_ptr<void> keep,
      const std::shared_ptr<OptimizerSlot>& optimizer = nullptr);
  std::shared_ptr<SchedulerSlot> PrepareSchedule(
      torch::optim::ReduceLROnPlateauScheduler& schedule, std::shared_ptr<void> keep,
      const std::shared_ptr<OptimizerSlot>& optimizer = nullptr);
  LoaderOptions loader_options() const;
  std::shared_ptr<LoaderObserver> loader_observer();
  // A loader with the settings of one that is gone goes on where that one was.
  void RegisterLoader(std::shared_ptr<LoaderStateHandle> loader);

  AccumulateScope Accumulate();
  AccumulateScope Accumulate(const std::optional<BatchFacts>& facts);
  AccumulateScope Accumulate(const BatchInfo& info);
  void EndMicroStep();
  bool sync_gradients() const { return no_sync_depth_ == 0 && accumulation_.sync_gradients(); }
  bool communicate() const {
    return no_sync_depth_ == 0 && local_depth_ == 0 &&
           (!in_micro_step_ || accumulation_.current().communicate);
  }
  int64_t gradient_accumulation_steps() const { return accumulation_.options().num_steps; }
  void set_gradient_accumulation_steps(int64_t steps) { accumulation_.set_num_steps(steps); }
  void ChangeNoSync(int by) { no_sync_depth_ += by; }
  void ChangeLocal(int by) { local_depth_ += by; }
  // The model's weights are, for a time, not those that are trained.
  void ChangeAveraged(int by) { averaged_depth_ += by; }
  void BeginJoin(bool even_batches);
  bool joining() const { return join_ != nullptr; }
  bool in_micro_step() const { return in_micro_step_; }
  // `finish`: wait for the processes that still have batches.
  void EndJoin(bool finish);

  void Backward(const at::Tensor& loss, std::optional<double> weight = std::nullopt,
                const BackwardOptions& how = {});
  // Makes the gradients of this window final: unscaled, and corrected for a short or weighted
  // window. Once per window and optimizer; of all optimizers if `only` is null.
  void FinishGradients(OptimizerSlot* only = nullptr);
  // Of the optimizers that own some of `parameters`.
  void FinishGradientsOf(const std::vector<at::Tensor>& parameters);
  // Throws, naming one, if `optimizer` is about to step on a gradient that is not what training
  // needs: not exchanged, of a pass around the prepared model, or emptied within its window.
  void CheckGradients(OptimizerSlot& optimizer);
  // An optimizer has stepped: the loss scale is updated once all have, or when the next window
  // begins.
  void EndScalerStep();
  at::Tensor ClipGradNorm(const std::vector<at::Tensor>& parameters, double max_norm,
                          double norm_type);
  void ClipGradValue(const std::vector<at::Tensor>& parameters, double clip_value);
  bool optimizer_step_was_skipped() const;
  AutocastGuard Autocast(const AutocastOptions& options) const {
    return AutocastGuard(precision_, device_.type(), options);
  }
  bool autocast_on() const {
    return precision_ != MixedPrecision::kNo && options_.autocast.enabled;
  }
  GradScaler* scaler() { return scaler_.get(); }
  const MicroStep& micro_step() const { return accumulation_.current(); }

  // The facts of the innermost live loop; null outside of any.
  const BatchInfo* current_batch() const { return live_.empty() ? nullptr : &live_.back().info; }
  // As current_batch(), where two loops side by side do not disagree about it.
  const BatchInfo* BatchOfMetrics() const;
  // (collective) The mean over all processes of a tensor of one number; double, where there are
  // several.
  at::Tensor MeanOfAll(const at::Tensor& number);
  // Throws where processes that have run out of batches would not take part in `call`.
  void CheckAllTakePart(const char* call) const;

  // (collective) A Comm over `ranks`; null where this one is not among them.
  std::shared_ptr<Comm> NewGroup(std::vector<int> ranks);
  void WaitForEveryone(absl::Duration timeout, const std::string& name, std::source_location where);
  void SetTrigger() { trigger_ = true; }
  bool CheckTrigger();
  ProgressBoard& progress() { return *process_.progress; }
  JobTriggers& triggers() { return *triggers_; }
  // What triggers count: optimizer steps, or batches in a program without a prepared optimizer.
  int64_t trigger_step() const { return optimizers_.empty() ? batches_ : global_step(); }

  absl::Status SaveState(const std::string& directory);
  absl::Status LoadState(const std::string& directory, bool may_be_missing);
  // Waits for asynchronous saves; the error of the first that failed and was not reported yet.
  absl::Status WaitForCheckpoint();
  const std::string& last_checkpoint() const { return last_checkpoint_; }
  // The number that the next save_state() without a directory is going to have, as far as this
  // process has seen.
  int64_t save_iteration() const { return save_iteration_; }
  void RegisterForCheckpointing(std::function<StateDict()> save,
                                std::function<void(const StateDict&)> load);
  void RegisterForCheckpointing(std::function<PlainState()> save,
                                std::function<void(const PlainState&)> load);
  int64_t AddSaveHook(SaveStateHook hook);
  int64_t AddLoadHook(LoadStateHook hook);
  void RemoveHook(int64_t id);
  absl::Status SaveModel(const ModelSource& model, const std::string& directory,
                         const std::string& max_shard_size);
  int64_t global_step() const;

  int64_t epoch() const { return epoch_; }
  // `open`: its body begins; else it is over.
  void SetEpoch(int64_t epoch, bool open);
  // The first of `count` epochs to run. Says so where a loaded state left some out.
  int64_t FirstEpoch(int64_t count);
  void FreeMemory();
  // Finishes the trackers, and tells the coordinator that this process leaves on purpose.
  void EndTraining();
  void FinishTrackers();
  // `error`, or, if it only says that a connection to another process is gone, which process that
  // was and how it ended, as far as the coordinator knows. May wait some seconds to learn it.
  absl::Status NameCulprit(const absl::Status& error);

  absl::Status InitTrackers(const std::string& project, const TrackerValues& config,
                            const std::vector<std::string>& kinds,
                            std::vector<std::unique_ptr<GeneralTracker>> own);
  void Log(TrackerValues values, std::optional<int64_t> step);
  TrackerSet* trackers() { return trackers_.get(); }
  std::string ProjectDirectory() const;
  std::string LoggingDirectory() const;

 private:
  friend class ModelSlot;
  friend class PrepareCall;
  friend class OptimizerSlot;
  class Observer;

  double WindowFactor();
  void SynchronizeRngTypes();
  void BeginWindow();
  // Forgets what nobody but this object holds: it can be neither trained nor asked for.
  void ForgetUnheld();
  void ForgetOptimizer(const OptimizerSlot* slot);
  // The slot of the optimizer at `source`, or null. What was there before is forgotten.
  std::shared_ptr<OptimizerSlot> Find(const void* source,
                                      absl::FunctionRef<bool(const OptimizerSlot&)> is_same);
  std::shared_ptr<OptimizerSlot> AddOptimizer(std::shared_ptr<OptimizerSlot> slot);
  std::shared_ptr<SchedulerSlot> AddSchedule(std::shared_ptr<SchedulerSlot> slot,
                                             const std::shared_ptr<OptimizerSlot>& optimizer);
  // (collective) Before hours of training end in a save that fails. `always`: also where no folder
  // was named.
  void CheckProjectWritable(bool always = false);
  void CheckLoss(const at::Tensor& loss, const std::optional<double>& weight) const;
  void CheckFinite(const at::Tensor& loss);
  // Arms the exchange of models whose graph a backward pass has been through before.
  void ArmAgain(const BackwardOptions& how);
  void CheckWitnesses() const;
  // The facts of the loop that micro-steps belong to; refuses loops that run side by side and
  // disagree about the end of the window.
  const BatchInfo* BatchOfMicroStep() const;
  // Whether the epoch's training is over, as far as can be known.
  bool EpochIsDone() const;
  absl::Status CheckComplete() const;
  LoaderState PlaceToSave(const LoaderStateHandle& loader) const;
  struct LiveLoop;
  static bool TrainedToTheEnd(const LiveLoop& loop);
  // As finished_passes_, with those whose last batch has been trained on while the loop still
  // lives.
  std::vector<int64_t> FinishedPasses() const;
  std::string CheckpointRoot() const;
  // (collective) The number of the next checkpoint under CheckpointRoot().
  int64_t NextIteration();
  // (collective) Copies the state and returns the error of an earlier save, if one failed.
  absl::Status SaveBesideTraining(const std::string& directory, const CheckpointInfo& info,
                                  absl::FunctionRef<absl::Status(StateWriter&)> write);
  // Parts of LoadState.
  struct Loaded;
  void CheckPrepared(const StateReader& reader) const;
  Loaded Read(const StateReader& reader) const;
  void Apply(const StateReader& reader, const Loaded& loaded);
  // (collective) Throws on every process if one of them has failed, naming it.
  void ThrowIfAnyFailed(const absl::Status& mine);

  // Constant after construction.
  const AcceleratorOptions options_;
  JoinedProcess process_;
  at::Device device_;
  MixedPrecision precision_;
  std::unique_ptr<GradScaler> scaler_;
  std::shared_ptr<Observer> observer_;
  std::unique_ptr<JobTriggers> triggers_;  // until EndTraining; uses process_

  // What prepare() has seen.
  std::vector<std::shared_ptr<ModelSlot>> models_;
  std::vector<std::shared_ptr<OptimizerSlot>> optimizers_;
  std::vector<std::shared_ptr<SchedulerSlot>> schedulers_;
  std::vector<std::shared_ptr<LoaderStateHandle>> loaders_;
  // Of a loaded state, by place in loaders_: for loaders that are prepared later.
  struct LoaderPlace {
    LoaderState state;
    std::map<std::string, at::Tensor> tensors;
  };
  std::map<size_t, LoaderPlace> pending_loaders_;
  struct Registered {
    std::function<StateDict()> save;
    std::function<void(const StateDict&)> load;
  };
  std::vector<Registered> registered_;
  std::map<int64_t, SaveStateHook> save_hooks_;  // by number, which is their order
  std::map<int64_t, LoadStateHook> load_hooks_;
  int64_t next_hook_ = 0;
  std::vector<std::shared_ptr<OptimizerSlot>> call_optimizers_;
  std::vector<std::shared_ptr<SchedulerSlot>> call_schedulers_;
  int prepare_depth_ = 0;
  uint64_t models_version_ = 0;  // changes with models_
  bool project_checked_ = false;
  int64_t total_steps_ = 0;  // of all optimizers, also forgotten ones

  // The training step.
  Accumulation accumulation_;
  int no_sync_depth_ = 0;
  int local_depth_ = 0;
  int averaged_depth_ = 0;
  bool in_micro_step_ = false;
  bool in_closure_ = false;             // of an optimizer's step
  int64_t window_backwards_ = 0;        // backward passes in this window
  std::unique_ptr<UnevenInputs> join_;  // while a JoinScope lives
  double join_factor_ = 1;
  // What FinishGradients multiplies by; nothing before it is known.
  std::optional<double> window_factor_;
  size_t scaler_steps_ = 0;  // optimizers stepped since the last update of the loss scale

  // Live loops of prepared loaders, outermost first.
  struct LiveLoop {
    uint64_t id;
    BatchInfo info;
    std::optional<size_t> loader = std::nullopt;  // place in loaders_
    int64_t trained = -1;                         // index of the last batch with a micro-step
    bool beside_another = false;  // this one or an inner one moved on while both were under way
  };
  std::vector<LiveLoop> live_;
  void MarkTrained();
  const LiveLoop* FindLoop(uint64_t pass) const;
  // The innermost loop's batch; throws `why` if another loop goes on beside that one and `same`
  // does not hold for the two batches.
  const BatchInfo* BatchBesideOthers(
      absl::FunctionRef<bool(const BatchInfo&, const BatchInfo&)> same,
      absl::FunctionRef<std::string(const BatchInfo&, const BatchInfo&)> why) const;

  std::unique_ptr<TrackerSet> trackers_;
  bool trigger_ = false;
  int64_t batches_ = 0;  // that prepared loaders have yielded here
  int64_t epoch_ = 0;
  int64_t first_epoch_ = 0;
  bool epoch_open_ = false;   // inside the body of a loop over epochs()
  bool interrupted_ = false;  // a training loop of this epoch was left before its last batch
  // By the loader's place in loaders_: training passes that this epoch has finished, how many an
  // epoch has as far as seen, and how many are left out of the epoch that a loaded state is in.
  std::vector<int64_t> finished_passes_, passes_per_epoch_, passes_to_skip_;
  bool trained_in_epoch_ = false;  // a training loop over a prepared loader has ended in this epoch
  bool trained_outside_ = false;   // a micro-step was made in this epoch outside of such loops
  bool resumed_ = false;           // a state was loaded
  bool resume_told_ = false;
  std::string claimed_done_;  // the state that was saved in this epoch and takes it for finished
  std::string last_checkpoint_;
  int64_t save_iteration_ = 0;
  std::unique_ptr<AsyncSaver> saver_;  // from the first asynchronous save on
  int64_t next_numbered_ = 0;          // after the last numbered asynchronous save
  bool ended_ = false;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_CORE_H_
