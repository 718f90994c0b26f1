#ifndef MUSTER_INTERNAL_CHECKPOINT_STATE_H_
#define MUSTER_INTERNAL_CHECKPOINT_STATE_H_

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muster/internal/divided_object.h"
#include "muster/internal/incoming_weights.h"
#include "muster/internal/loop_tracker.h"
#include "muster/internal/model_source.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "muster/internal/step_controller.h"
#include "muster/state.h"
#include "worker/checkpoint/file_plans.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/state.h"
#include "worker/train/plain_state.h"

namespace muster {
class AsyncSaver;
class CheckpointRegistrar;
class DeviceUploads;
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

  // The processes that this one divides models with, where they are a part of all.
  void SetShardComm(const std::shared_ptr<Comm>& comm) { shard_comm_ = comm; }

  // (collective) See Accelerator. `may_be_missing`: without a checkpoint nothing happens.
  absl::Status Save(const std::string& directory);
  absl::Status Load(const std::string& directory, bool may_be_missing);
  absl::StatusOr<LoadedState> LoadWeights(const std::string& directory,
                                          const LoadWeightsOptions& options);
  absl::Status SaveModel(ModelSlot& model, const std::string& directory,
                         const std::string& max_shard_size) const;
  // Waits for asynchronous saves, and until what had to go for a save is gone; the error of the
  // first that failed and was not reported yet.
  absl::Status Wait();
  // (collective, with memory) The same, and of the last save to memory.
  absl::Status WaitForAll();
  // The same once a peer is lost: what has not been written is not written any more.
  absl::Status Abandon();

  // `divided`: as what it is saved and loaded; null: by `save` and `load`. `lifetime`: expires with
  // the object, which is then left out; nothing: it lives until it is removed. Returns its number,
  // for RemoveHook().
  int64_t Register(std::function<StateDict()> save, std::function<void(const StateDict&)> load,
                   std::shared_ptr<DividedObject> divided = nullptr,
                   std::optional<std::weak_ptr<const void>> lifetime = std::nullopt);
  int64_t Register(std::function<PlainState()> save, std::function<void(const PlainState&)> load);
  // Returns the hook's number, for RemoveHook().
  int64_t AddSaveHook(SaveStateHook hook);
  int64_t AddLoadHook(LoadStateHook hook);
  void RemoveHook(int64_t id);
  // Numbers of hooks and objects grow: removes those that have come since next_number() was this.
  int64_t next_number() const { return next_hook_; }
  void RemoveSince(int64_t number);

  // The directory of this process's last Save() or Load(). If a checkpoint was loaded before it was
  // renamed, this is its old path as long as that exists, then its final name.
  const std::string& last_checkpoint();
  // The number that the next Save() without a directory is going to have, as far as this process
  // has seen.
  int64_t save_iteration() const { return save_iteration_; }

  // Who writes which tensor of a save, and how its files are laid out, is planned once for what is
  // registered and its tensors, and again when that changes on any process. How often, by this
  // process: saves and files that were planned, and those that took the plan of an earlier one.
  struct PlanCounts {
    int64_t saves_planned = 0, saves_reused = 0;
    int64_t files_planned = 0, files_reused = 0;
  };
  PlanCounts plan_counts() const;

  // (collective) Once, before hours of training end in a save that fails. `always`: also where no
  // folder was named.
  void CheckProjectWritable(bool always = false);

 private:
  struct Registered {
    int64_t number = 0;
    std::function<StateDict()> save;
    std::function<void(const StateDict&)> load;
    std::shared_ptr<DividedObject> divided;  // may be null
    std::optional<std::weak_ptr<const void>> lifetime;
  };
  struct Loaded;
  struct Forgotten;
  struct Division;
  struct Plan;
  // Digests of what is saved, without its values.
  struct Layout {
    uint64_t here = 0;    // of everything that a plan is made of, on this process
    uint64_t shared = 0;  // of the models that processes write together: alike on all
    friend bool operator==(const Layout&, const Layout&) = default;
  };
  // What the processes have agreed on before a save.
  struct Agreed {
    bool hooks = false;      // one has hooks
    bool apart = false;      // one has trained apart
    bool same_plan = false;  // the last plan fits on all of them
  };

  std::string Root() const;
  // The number that the processes of this node have in common, if nodes keep files of their own.
  std::optional<int> OwnNode() const;
  // Whether everything that is trained would be written.
  absl::Status CheckComplete(const Layout& layout);
  Layout LookAtLayout() const;
  // Whether this process may save now, with these options.
  absl::Status CheckSavable();
  // (collective) OK if it is on every rank and sharded models are no mixture; else this rank's
  // error, or another's with its rank. Fills in agreed_. The only exchange about a plan.
  absl::Status AgreeToSave(const absl::Status& mine);
  // What each rank has added to that exchange. (collective where a rank has failed)
  void CompareShardedModels(const std::vector<std::string>& changes);
  Plan MakePlan() const;
  // Tells the writer what only optimizers change.
  void CopyParametersLater(StateWriter& writer) const;
  // This process's files.
  absl::Status Write(StateWriter& writer);
  // Whether all ranks may write a part of this model, which has these parameters, each.
  bool IsDivisible(ModelSlot& model, const NamedTensors& parameters) const;
  // Parts of Write().
  absl::Status WriteModels(StateWriter& writer, const std::vector<NamedTensors>& weights) const;
  absl::Status WriteOptimizer(StateWriter& writer, size_t index, OptimizerState state) const;
  void ExpectBytes(StateWriter& writer, const std::vector<NamedTensors>& weights,
                   const std::vector<std::optional<OptimizerState>>& optimizers) const;
  absl::Status WriteShared(StateWriter& writer) const;
  // `index` and `collected` are of a divided object.
  absl::Status WriteRegistered(StateWriter& writer, const Division& division, size_t index,
                               const StateDict& collected) const;
  // Where among the prepared models that of registered object `index` is; nothing unless it is
  // divided.
  std::optional<size_t> DividedModelOf(size_t index) const;
  // (collective) The number of the next checkpoint.
  int64_t AgreeOnNumber(const CheckpointFolder& folder, int64_t number) const;
  // (collective) Copies the state and returns the error of an earlier save, if one failed.
  absl::Status SaveBesideTraining(const std::string& directory, const CheckpointInfo& info,
                                  absl::FunctionRef<absl::Status(StateWriter&)> write);
  PublishOptions Publishing() const;
  // The error of the first asynchronous save that failed and was not reported yet.
  absl::Status WaitForSaver();
  absl::Status CheckOptions() const;
  // (collective) Opens the memory at the first call; without it memory_ stays null. Throws if an
  // agent does not answer that has to, as for a load; the next one that has to is asked again.
  void OpenMemory(bool has_to_answer);
  // (collective) Whether this save goes to the disk.
  bool GoesToDisk(const std::string& directory);
  // (collective) See MemoryTier::Save(). A save that is lost for lack of memory or of an answer is
  // no error.
  absl::Status SaveToMemory(const CheckpointInfo& info, int64_t since_disk,
                            absl::FunctionRef<absl::Status(StateWriter&)> write,
                            absl::Status* earlier);
  // (collective) Of what is on the disk, of rank 0 or of all nodes, whole or not; -1: there is
  // none. Throws what may be another number later.
  int64_t NewestStepOnDisk(const CheckpointFolder& folder) const;
  // (collective) Loads from memory if that has a state of step `on_disk` or later. False: it has
  // not.
  bool LoadFromMemory(int64_t on_disk);
  // (collective) Part of Load().
  Loaded CheckAndReadAll(StateReader& reader) const;
  // (collective) Opens a checkpoint and calls `read`, collective too, which reads what it needs of
  // it and changes nothing. See OpenAndReadCheckpoint. Errors, the same on every rank; NOT_FOUND:
  // there is none.
  absl::StatusOr<StateReader> OpenAndRead(const std::string& directory,
                                          const std::function<void(StateReader&)>& read);
  // Parts of Load() and LoadWeights(). `without`: models whose weights are read elsewhere.
  // `uploads`: null, or what takes large tensors to the device.
  std::vector<NamedTensors> ReadWeights(const StateReader& reader, size_t models,
                                        const std::vector<bool>& without,
                                        DeviceUploads* uploads) const;
  // (collective) What LoadWeights() takes from a checkpoint, for the first models; puts the names
  // of its files into `read`.
  std::vector<std::unique_ptr<IncomingWeights>> ReadWeightsAlone(
      StateReader& reader, const LoadWeightsOptions& options,
      std::unordered_set<std::string>* read) const;
  // For these files, if they go to this process's device while they are read; null: they do not.
  std::unique_ptr<DeviceUploads> UploadsFor(const StateReader& reader,
                                            const std::vector<std::string>& files) const;
  // Warns of damage. Nothing is read from the indexes of models, since the manifest has what they
  // say; others read them.
  void CheckIndexes(const StateReader& reader, size_t models) const;
  void TakeOptimizerFile(const StateReader& reader, size_t index, const std::string& name,
                         DeviceUploads* uploads, Loaded* loaded) const;
  void ReadOthers(const StateReader& reader, Loaded* loaded) const;
  // What that reads here.
  std::vector<std::string> OthersIn(const StateReader& reader, const Loaded& loaded) const;
  void CheckPrepared(const StateReader& reader) const;
  // (collective) Whether such files of a checkpoint must not be copied into memory to load them.
  bool HasNoRoomFor(const StateReader& reader, const std::vector<std::string>& files) const;
  // (collective) Whether ranks read parts of files: of sharded models, unless hooks want whole
  // ones.
  bool ReadsByFile() const;
  // (collective) As StateReader::ReadTogether, in place where there is no room. Throws its errors.
  void ReadTogether(StateReader& reader, const std::vector<std::string>& files) const;
  // (collective)
  Loaded ReadAll(StateReader& reader) const;
  // Parts of Load(): what sharded models have failed with keeps nobody from their weights while it
  // runs, and is there again after it, unless Apply() has begun to replace them. A hook of a load
  // may load by itself.
  std::vector<Forgotten> ForgetFailures();
  void RestoreFailures(const std::vector<Forgotten>& forgotten);
  // (collective) Everything is checked already. Throws the same on every process, with what has
  // changed until then.
  void Apply(const StateReader& reader, const Loaded& loaded);
  // Leaves out registered objects that live no more.
  void ForgetExpired();
  std::vector<int64_t> NumbersOfRegistered() const;
  // Throws if a hook has changed them.
  void CheckStillRegistered(const std::vector<int64_t>& numbers, const char* call) const;
  void ApplyRegistered(const Loaded& loaded);
  void ApplyOptimizers(const Loaded& loaded);
  void ApplyModels(const StateReader& reader, const Loaded& loaded);
  void ApplyPlaces(const StateReader& reader, const Loaded& loaded);
  void ApplyRandom(const StateReader& reader, const Loaded& loaded) const;
  // Frees what a load has read, beside training where there is memory for both.
  void LetGo(StateReader reader, Loaded loaded);
  // (collective) Throws the same on every process if one of them has failed, naming it.
  void ThrowIfAnyFailed(const absl::Status& mine) const;

  Process& process_;
  Registry& registry_;
  LoopTracker& loops_;
  StepController& steps_;
  std::vector<Registered> registered_;
  // By number, which is their order.
  std::map<int64_t, std::shared_ptr<const SaveStateHook>> save_hooks_;
  std::map<int64_t, std::shared_ptr<const LoadStateHook>> load_hooks_;
  int64_t next_hook_ = 0;  // the number of what is registered next
  std::string last_checkpoint_;
  std::optional<Manifest> loaded_without_name_;  // last_checkpoint_ was, when it was loaded
  int64_t save_iteration_ = 0;
  bool project_checked_ = false;
  const std::function<bool()> stopping_;
  const std::unique_ptr<CheckpointRegistrar> registrar_;  // null in a job without a coordinator
  std::unique_ptr<AsyncSaver> saver_;                     // from the first asynchronous save on
  std::unique_ptr<MemoryTier> memory_;                    // null without memory
  bool memory_opened_ = false;
  bool memory_unreachable_ = false;  // an agent did not answer
  bool saves_to_memory_ = true;      // false: it was too small once
  int64_t since_disk_ = 0;           // saves since the last one to the disk
  int64_t next_numbered_ = 0;        // after the last numbered asynchronous save
  Layout layout_;                    // of the save that is made, or was last
  std::optional<Layout> complete_;   // nothing that is trained is left out of it
  Agreed agreed_;
  std::unique_ptr<Plan> plan_;  // of the last save; null before
  int64_t saves_planned_ = 0, saves_reused_ = 0;
  FilePlans file_plans_;
  int loads_ = 0;                   // under way, each in a hook of the one before
  uint64_t replaced_ = 0;           // times that Apply() has begun to replace the models
  std::weak_ptr<Comm> shard_comm_;  // of SetShardComm()
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_CHECKPOINT_STATE_H_
