#ifndef MUSTER_INTERNAL_CORE_H_
#define MUSTER_INTERNAL_CORE_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <source_location>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "c10/core/TensorImpl.h"
#include "c10/core/UndefinedTensorImpl.h"
#include "c10/util/intrusive_ptr.h"
#include "muster/internal/checkpoint_state.h"
#include "muster/internal/loop_tracker.h"
#include "muster/internal/model_source.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "muster/internal/step_controller.h"
#include "muster/options.h"
#include "torch/optim/optimizer.h"
#include "worker/collective/comm.h"
#include "worker/data/loader.h"
#include "worker/job/job_triggers.h"
#include "worker/job/join_job.h"
#include "worker/track/tracker_set.h"
#include "worker/train/lr_scheduler.h"
#include "worker/train/optimizer_handle.h"

namespace torch::optim {
class LRScheduler;
class ReduceLROnPlateauScheduler;
}  // namespace torch::optim

// The implementation behind Accelerator and its handles. Not part of what users include.
namespace muster::internal {

// Objects that a Core has returned to the program or created for its objects, without keeping them
// alive.
struct Handed {
  using Parameter = c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>;
  std::vector<std::weak_ptr<void>> objects;  // prepared loaders, groups of processes
  std::vector<Parameter> parameters;         // of prepared models
};

// The implementation of Accelerator: the parts below, and what concerns only this process (control,
// triggers, trackers). Not thread-safe.
class Core : public std::enable_shared_from_this<Core> {
 public:
  explicit Core(const AcceleratorOptions& options);
  // Joins the job as the environment says, with the further options in `join`. Errors: as
  // ReadEnvironment and JoinJob.
  static absl::StatusOr<JoinedProcess> Join(const AcceleratorOptions& options,
                                            const JoinJobOptions& join);
  // For a process that has already joined its job.
  Core(const AcceleratorOptions& options, JoinedProcess process);
  ~Core();
  Core(const Core&) = delete;
  Core& operator=(const Core&) = delete;

  const Process& process() const { return process_; }
  Registry& registry() { return registry_; }
  LoopTracker& loops() { return loops_; }
  StepController& steps() { return steps_; }
  const StepController& steps() const { return steps_; }
  CheckpointState& checkpoints() { return checkpoints_; }
  TrackerSet* trackers() { return trackers_.get(); }
  JobTriggers& triggers() { return *triggers_; }
  // Returns the triggers for `call`, which is a collective if there is no coordinator: then it
  // throws inside join_uneven_inputs().
  JobTriggers& triggers(const char* call);

  // prepare(): see Accelerator.
  std::shared_ptr<ModelSlot> PrepareModel(std::unique_ptr<ModelSource> source, bool evaluation);
  // `keep`: an object that must outlive the slot.
  std::shared_ptr<OptimizerSlot> PrepareOptimizer(torch::optim::Optimizer& optimizer,
                                                  std::shared_ptr<void> keep = nullptr);
  std::shared_ptr<OptimizerSlot> PrepareOptimizer(OptimizerHandle& optimizer,
                                                  std::shared_ptr<void> keep = nullptr);
  // Prepares a schedule for `optimizer` or, if that is null, for the one optimizer of this
  // prepare() call.
  std::shared_ptr<SchedulerSlot> PrepareSchedule(
      LrSchedulePtr schedule, const std::shared_ptr<OptimizerSlot>& optimizer = nullptr);
  // Prepares one schedule for each parameter group.
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
  // See Accelerator.
  std::shared_ptr<OptimizerHandle> MakeOptimizer(std::vector<ConfiguredGroup> groups,
                                                 const OptimizerArguments& arguments);
  LrSchedulePtr MakeScheduler(const OptimizerHandle& optimizer,
                              const SchedulerArguments& arguments);
  LoaderOptions loader_options() const;
  // A loader with the settings of a dropped one continues where that one stopped.
  void RegisterLoader(std::shared_ptr<LoaderStateHandle> loader);

  // Forgets the objects that only this Core still holds, unless a window is open.
  void ForgetUnheld();
  void FreeMemory();

  // (collective) Returns a Comm over `ranks`; null if this rank is not among them.
  std::shared_ptr<Comm> NewGroup(std::vector<int> ranks);
  // Returns the batch that gather_for_metrics() cuts by; null outside of loops.
  const BatchInfo* BatchOfMetrics() const;
  void WaitForEveryone(absl::Duration timeout, const std::string& name, std::source_location where);
  void SetTrigger() { trigger_ = true; }
  // (collective) Whether any process has set the trigger.
  bool CheckTrigger();
  // The step by which triggers count, the same on all processes: optimizer steps (inside LocalSGD
  // also those that fp16 skips), or batches in a program without a prepared optimizer.
  int64_t trigger_step() const;
  // Returns the first of `count` epochs to run.
  int64_t FirstEpoch(int64_t count);

  // Finishes the trackers, and reports to the coordinator that this process leaves on purpose.
  void EndTraining();
  void FinishTrackers();
  // Ends everything that belongs to a generation that has ended without this process, including
  // saves that are under way, which are lost. Only the destructor may be called afterwards. Returns
  // the objects that the program must have released before it joins the next generation.
  Handed Abandon();
  // Returns `error` or, if that only says that a connection to another process is gone, an error
  // that says which process it was and how it ended, as far as the coordinator knows. May wait some
  // seconds to learn it.
  absl::Status NameCulprit(const absl::Status& error);

  absl::Status InitTrackers(const std::string& project, const TrackerValues& config,
                            const std::vector<std::string>& kinds,
                            std::vector<std::unique_ptr<GeneralTracker>> own);
  void Log(TrackerValues values, std::optional<int64_t> step);

 private:
  void SynchronizeRngTypes();
  std::shared_ptr<OptimizerSlot> AddOptimizer(std::shared_ptr<OptimizerSlot> slot);
  // (collective on the first call) Makes the groups that options().sharding describes, once.
  const ShardingGroups& MakeShardingGroups();
  // (collective, if there is something to offload) Offloads the state as options().sharding says.
  void OffloadStateOf(OptimizerHandle& optimizer);
  // (collective, if there is something to offload) Throws unless the host has room for the states
  // of the prepared optimizers and of `added`, which is null or about to be prepared.
  void CheckRoomForStates(const OptimizerHandle* added) const;
  // Throw if a configuration describes the optimizers or schedules and these were made in another
  // way.
  void CheckMade(const OptimizerHandle* optimizer) const;
  void CheckMade(const std::vector<LrSchedulePtr>& schedules) const;
  // Has the optimizer update this process's shards of the parameters of sharded models.
  void GiveShards(OptimizerSlot& optimizer);

  Process process_;
  ShardingGroups sharding_groups_;
  bool sharding_groups_made_ = false;
  // What MakeOptimizer() and MakeScheduler() have made.
  std::vector<uint64_t> made_optimizers_;
  std::vector<std::weak_ptr<const LrSchedule>> made_schedules_;
  Registry registry_;
  LoopTracker loops_;
  StepController steps_;
  CheckpointState checkpoints_;
  std::unique_ptr<JobTriggers> triggers_;  // until EndTraining; uses process_
  std::unique_ptr<TrackerSet> trackers_;
  std::vector<std::weak_ptr<void>> groups_;  // from NewGroup()
  bool trigger_ = false;
  bool ended_ = false;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_CORE_H_
