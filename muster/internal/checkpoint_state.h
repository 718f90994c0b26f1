#ifndef MUSTER_INTERNAL_CHECKPOINT_STATE_H_
#define MUSTER_INTERNAL_CHECKPOINT_STATE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muster/internal/divided_object.h"
#include "muster/internal/loop_tracker.h"
#include "muster/internal/model_source.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "muster/internal/step_controller.h"
#include "muster/state.h"
#include "worker/checkpoint/state.h"
#include "worker/train/plain_state.h"

namespace muster {
class AsyncSaver;
class CheckpointRegistrar;
class MemoryTier;
struct PublishOptions;
}  // namespace muster

namespace muster::internal {

// Writes the state of a training to checkpoints and takes it from there
// (docs/checkpoint_format.md): what the registry holds, where loops and the step are, and what the
// program has registered. Not thread-safe. Methods marked (collective) block.
class CheckpointState {
 public:
  // All are borrowed.
  // `stopping`: whether the job has been asked to stop.
  CheckpointState(Process& process, Registry& registry, LoopTracker& loops, StepController& steps,
                  std::function<bool()> stopping);
  ~CheckpointState();
  CheckpointState(const CheckpointState&) = delete;
  CheckpointState& operator=(const CheckpointState&) = delete;

  // (collective) See Accelerator. `may_be_missing`: without a checkpoint nothing happens.
  absl::Status Save(const std::string& directory);
  absl::Status Load(const std::string& directory, bool may_be_missing);
  absl::StatusOr<LoadedState> LoadWeights(const std::string& directory,
                                          const LoadWeightsOptions& options);
  absl::Status SaveModel(ModelSlot& model, const std::string& directory,
                         const std::string& max_shard_size) const;
  // Waits for asynchronous saves; the error of the first that failed and was not reported yet.
  absl::Status Wait();
  // The same once a peer is lost: what has not been written is not written any more.
  absl::Status Abandon();

  // `divided`: as what it is saved and loaded; null: by `save` and `load`.
  void Register(std::function<StateDict()> save, std::function<void(const StateDict&)> load,
                std::shared_ptr<DividedObject> divided = nullptr);
  void Register(std::function<PlainState()> save, std::function<void(const PlainState&)> load);
  // Returns the hook's number, for RemoveHook().
  int64_t AddSaveHook(SaveStateHook hook);
  int64_t AddLoadHook(LoadStateHook hook);
  void RemoveHook(int64_t id);

  // Of this process's last Save() or Load().
  const std::string& last_checkpoint() const { return last_checkpoint_; }
  // The number that the next Save() without a directory is going to have, as far as this process
  // has seen.
  int64_t save_iteration() const { return save_iteration_; }

  // (collective) Once, before hours of training end in a save that fails. `always`: also where no
  // folder was named.
  void CheckProjectWritable(bool always = false);

 private:
  struct Registered {
    std::function<StateDict()> save;
    std::function<void(const StateDict&)> load;
    std::shared_ptr<DividedObject> divided;  // may be null
  };
  struct Loaded;
  struct Division;

  std::string Root() const;
  // The number that the processes of this node have in common, if nodes keep files of their own.
  std::optional<int> OwnNode() const;
  // Whether everything that is trained would be written.
  absl::Status CheckComplete() const;
  // Whether this process may save now, with these options.
  absl::Status CheckSavable();
  // (collective) OK if it is on every rank; else this rank's error, or another's with its rank.
  absl::Status AgreeToSave(const absl::Status& mine);
  // Tells the writer what only optimizers change.
  void CopyParametersLater(StateWriter& writer) const;
  // This process's files.
  absl::Status Write(StateWriter& writer) const;
  // Whether all ranks may write a part of this model each.
  bool IsDivisible(ModelSlot& model) const;
  // (collective)
  bool OnAnyProcess(bool here) const;
  // Parts of Write().
  absl::Status WriteModels(StateWriter& writer, const Division& division,
                           const std::vector<NamedTensors>& weights) const;
  absl::Status WriteOptimizer(StateWriter& writer, const Division& division, size_t index,
                              OptimizerState state) const;
  absl::Status WriteShared(StateWriter& writer) const;
  // `collected`: of a divided object.
  absl::Status WriteRegistered(StateWriter& writer, const Division& division, size_t index,
                               const std::optional<StateDict>& collected) const;
  // Where among the prepared models that of registered object `index` is; nothing unless it is
  // divided.
  std::optional<size_t> DividedModelOf(size_t index) const;
  // (collective) The number of the next checkpoint.
  int64_t AgreeOnNumber(const CheckpointFolder& folder, int64_t number) const;
  // (collective) Copies the state and returns the error of an earlier save, if one failed.
  absl::Status SaveBesideTraining(const std::string& directory, const CheckpointInfo& info,
                                  absl::FunctionRef<absl::Status(StateWriter&)> write);
  PublishOptions Publishing() const;
  absl::Status CheckOptions() const;
  // (collective) Opens the memory at the first call; without it memory_ stays null.
  void OpenMemory();
  // (collective) Whether this save goes to the disk.
  bool GoesToDisk(const std::string& directory);
  // (collective) Returns the error of the save before, if it failed.
  absl::Status SaveToMemory(const CheckpointInfo& info, int64_t since_disk,
                            absl::FunctionRef<absl::Status(StateWriter&)> write);
  // (collective) Of what rank 0's disk has, whole or not; -1: it has none.
  int64_t NewestStepOnDisk(const CheckpointFolder& folder) const;
  // (collective) Loads from memory if that has a state of step `on_disk` or later. False: it has
  // not.
  bool LoadFromMemory(int64_t on_disk);
  // (collective) Part of Load().
  Loaded CheckAndReadAll(StateReader& reader) const;
  // (collective) The checkpoint to load. NOT_FOUND: there is none.
  // `on_nodes`: whether nodes have disks of their own, so that another one may have a copy.
  absl::StatusOr<StateReader> OpenToLoad(const std::string& directory,
                                         const std::vector<std::string>& damaged, bool* on_nodes);
  // (collective) Opens a checkpoint and calls `read`, collective too, which reads what it needs of
  // it and changes nothing. Without a directory damaged ones are passed over. Errors, the same on
  // every rank: NOT_FOUND; DATA_LOSS. Throws other errors of `read`.
  absl::StatusOr<StateReader> OpenAndRead(const std::string& directory,
                                          const std::function<void(StateReader&)>& read);
  // Parts of Load() and LoadWeights(). `without`: models whose weights are read elsewhere.
  std::vector<NamedTensors> ReadWeights(const StateReader& reader, size_t models,
                                        const std::vector<bool>& without) const;
  void TakeOptimizerFile(const StateReader& reader, size_t index, const std::string& name,
                         Loaded* loaded) const;
  void ReadOthers(const StateReader& reader, Loaded* loaded) const;
  void CheckPrepared(const StateReader& reader) const;
  // (collective)
  Loaded ReadAll(StateReader& reader) const;
  void Apply(const StateReader& reader, const Loaded& loaded);
  void ApplyObjects(const StateReader& reader, const Loaded& loaded);
  void ApplyRandom(const StateReader& reader, const Loaded& loaded) const;
  // (collective) Throws the same on every process if one of them has failed, naming it.
  void ThrowIfAnyFailed(const absl::Status& mine) const;

  Process& process_;
  Registry& registry_;
  LoopTracker& loops_;
  StepController& steps_;
  std::vector<Registered> registered_;
  std::map<int64_t, SaveStateHook> save_hooks_;  // by number, which is their order
  std::map<int64_t, LoadStateHook> load_hooks_;
  int64_t next_hook_ = 0;
  std::string last_checkpoint_;
  int64_t save_iteration_ = 0;
  bool project_checked_ = false;
  const std::function<bool()> stopping_;
  const std::unique_ptr<CheckpointRegistrar> registrar_;  // null in a job without a coordinator
  std::unique_ptr<AsyncSaver> saver_;                     // from the first asynchronous save on
  std::unique_ptr<MemoryTier> memory_;                    // null without memory
  bool memory_opened_ = false;
  bool saves_to_memory_ = true;  // false: it was too small once
  int64_t since_disk_ = 0;       // saves since the last one to the disk
  int64_t next_numbered_ = 0;    // after the last numbered asynchronous save
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_CHECKPOINT_STATE_H_
