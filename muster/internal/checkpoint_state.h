#ifndef MUSTER_INTERNAL_CHECKPOINT_STATE_H_
#define MUSTER_INTERNAL_CHECKPOINT_STATE_H_

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>

#include "absl/functional/function_ref.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "muster/internal/loop_tracker.h"
#include "muster/internal/model_slot.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "muster/internal/save_writer.h"
#include "muster/internal/state_loader.h"
#include "muster/internal/state_objects.h"
#include "muster/internal/step_controller.h"
#include "muster/state.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/state.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/collective/comm.h"

namespace muster {
class AsyncSaver;
class CheckpointRegistrar;
class MemoryTier;
struct PublishOptions;
}  // namespace muster

namespace muster::internal {

// Writes the state of a training to checkpoints and loads it (docs/checkpoint_format.md): the
// objects of the registry, the places of loops, the step, and what the program has registered. Not
// thread-safe. Methods marked (collective) block.
class CheckpointState {
 public:
  // All are borrowed.
  // `stopping`: whether the job has been asked to stop.
  CheckpointState(Process& process, Registry& registry, LoopTracker& loops, StepController& steps,
                  std::function<bool()> stopping);
  ~CheckpointState();
  CheckpointState(const CheckpointState&) = delete;
  CheckpointState& operator=(const CheckpointState&) = delete;

  // Sets the group of processes among which models are divided, if it is only a part of the job.
  void SetShardComm(const std::shared_ptr<Comm>& comm) { shard_comm_ = comm; }

  // (collective) See Accelerator. `may_be_missing`: if there is no checkpoint, nothing happens.
  absl::Status Save(const std::string& directory);
  absl::Status Load(const std::string& directory, bool may_be_missing);
  absl::StatusOr<LoadedState> LoadWeights(const std::string& directory,
                                          const LoadWeightsOptions& options);
  absl::Status SaveModel(ModelSlot& model, const std::string& directory,
                         const std::string& max_shard_size) const;
  // Waits for asynchronous saves, and until everything that a save had to delete is deleted.
  // Returns the error of the first one that failed and was not reported yet.
  absl::Status Wait();
  // (collective, with memory) Does the same, and also waits for the last save to memory.
  absl::Status WaitForAll();
  // Like Wait(), once a peer is lost: data that is not written yet is dropped.
  absl::Status Abandon();

  // The objects that the program registers.
  StateObjects& objects() { return objects_; }

  // The directory of this process's last Save() or Load(). If a checkpoint was loaded before it was
  // renamed, this is its old path as long as that exists, then its final name.
  const std::string& last_checkpoint();
  // The number of the next Save() without a directory, as far as this process has seen.
  int64_t save_iteration() const { return save_iteration_; }

  SaveWriter::PlanCounts plan_counts() const { return writer_.plan_counts(); }

  // (collective) Checks once, before hours of training end in a save that fails. `always`: also if
  // no folder was named.
  void CheckProjectWritable(bool always = false);

 private:
  std::string Root() const;
  // Whether this process may save now, with these options.
  absl::Status CheckSavable();
  // Whether load_weights() accepts these options here, and would leave no gradients of the old
  // weights for the next step.
  absl::Status CheckWeightsLoadable(const LoadWeightsOptions& options) const;
  // (collective) The number of the next checkpoint.
  int64_t AgreeOnNumber(const CheckpointFolder& folder, int64_t number) const;
  // (collective) Copies the state and returns the error of an earlier save, if one failed.
  absl::Status SaveBesideTraining(const std::string& directory, const CheckpointInfo& info,
                                  absl::FunctionRef<absl::Status(StateWriter&)> write);
  PublishOptions Publishing() const;
  // The error of the first asynchronous save that failed and was not reported yet.
  absl::Status WaitForSaver();
  absl::Status CheckOptions() const;
  // (collective) Opens the memory at the first call; without it memory_ stays null. With
  // `has_to_answer`, as for a load, it throws if an agent does not answer; the next such call asks
  // again.
  void OpenMemory(bool has_to_answer);
  // (collective) Whether this save goes to the disk.
  bool GoesToDisk(const std::string& directory);
  // (collective) See MemoryTier::Save(). It is no error if a save is lost because memory or an
  // answer is missing.
  absl::Status SaveToMemory(const CheckpointInfo& info, int64_t since_disk,
                            absl::FunctionRef<absl::Status(StateWriter&)> write,
                            absl::Status* earlier);
  // (collective) The newest step of any checkpoint on the disk (of rank 0, or of all nodes), whole
  // or not; -1: there is none. Throws if the number cannot be told for certain.
  int64_t NewestStepOnDisk(const CheckpointFolder& folder) const;
  // (collective) Loads from memory if that has a state of step `on_disk` or later, and returns
  // whether it did.
  bool LoadFromMemory(int64_t on_disk);
  // (collective) Opens a checkpoint and calls `read`, also collective, which reads what it needs
  // and changes nothing. See OpenAndReadCheckpoint. Errors are the same on every rank; NOT_FOUND:
  // there is none.
  absl::StatusOr<StateReader> OpenAndRead(const std::string& directory,
                                          const std::function<void(StateReader&)>& read);
  // Call it after StateLoader::Apply().
  void NoteLoaded(const StateReader& reader);
  // Frees what a load has read: during training, if there is memory enough.
  void LetGo(StateReader reader, LoadedFiles loaded);

  Process& process_;
  Registry& registry_;
  LoopTracker& loops_;
  StepController& steps_;
  StateObjects objects_;
  SaveWriter writer_;
  StateLoader loader_;
  std::string last_checkpoint_;
  std::optional<Manifest> loaded_without_name_;  // of last_checkpoint_, if it was loaded before it
                                                 // was renamed
  int64_t save_iteration_ = 0;
  bool project_checked_ = false;
  const std::function<bool()> stopping_;
  const std::unique_ptr<CheckpointRegistrar> registrar_;  // null in a job without a coordinator
  std::unique_ptr<AsyncSaver> saver_;                     // from the first asynchronous save on
  std::unique_ptr<MemoryTier> memory_;                    // null without memory
  bool memory_opened_ = false;
  bool memory_unreachable_ = false;  // an agent did not answer
  bool saves_to_memory_ = true;      // false: the memory was too small once
  int64_t since_disk_ = 0;           // saves since the last one to the disk
  bool disk_failed_ = false;         // the last save to the disk, an asynchronous one, has failed
  int64_t next_numbered_ = 0;        // after the last numbered asynchronous save
  std::weak_ptr<Comm> shard_comm_;   // of SetShardComm()
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_CHECKPOINT_STATE_H_
