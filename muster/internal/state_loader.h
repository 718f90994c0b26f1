#ifndef MUSTER_INTERNAL_STATE_LOADER_H_
#define MUSTER_INTERNAL_STATE_LOADER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <unordered_set>
#include <vector>

#include "muster/internal/full_state.h"
#include "muster/internal/incoming_weights.h"
#include "muster/internal/loop_tracker.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "muster/internal/state_objects.h"
#include "muster/internal/step_controller.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/state.h"
#include "worker/checkpoint/state_dict.h"
#include "worker/checkpoint/weight_loader.h"
#include "worker/parallel/sharded_model.h"
#include "worker/train/optimizer_handle.h"

namespace muster {
class DeviceUploads;
}  // namespace muster

namespace muster::internal {

// What the files of a checkpoint hold.
struct LoadedFiles {
  struct Optimizer {
    OptimizerState state;  // what its handle takes on this rank
    int64_t steps = 0;
  };

  bool hooks = false;                 // have had the weights, and may have left some out
  std::vector<NamedTensors> weights;  // of sharded models empty, unless hooks want them
  std::vector<std::optional<LoadedShards>> shards;
  std::vector<Optimizer> optimizers;
  // For divided objects only this process's parts, unless hooks need whole models.
  std::vector<StateDict> schedulers, loaders, registered;
  std::vector<bool> registered_in_parts;
  std::optional<StateDict> scaler, random;
};

// Before values are loaded into them: what shares its memory with tensors of the program, or lies
// in a mapped file, gets memory of its own.
void GiveModelsOwnMemory(const Models& models);

// Reads the files of an open checkpoint, and loads them into the prepared objects. Everything is
// read and checked before anything changes. Not thread-safe. Methods throw; those marked
// (collective) the same on every process.
class StateLoader {
 public:
  // All are borrowed.
  StateLoader(const Process& process, Registry& registry, LoopTracker& loops, StepController& steps,
              const StateObjects& objects);

  // Begins a load. While this object lives, earlier failures of sharded models do not keep code
  // from their weights; they are restored by the destructor, unless Apply() has begun to replace
  // the weights. Loads may nest (in a hook).
  class Scope {
   public:
    explicit Scope(StateLoader& loader);
    ~Scope();
    Scope(const Scope&) = delete;
    Scope& operator=(const Scope&) = delete;

   private:
    struct Forgotten {
      std::shared_ptr<ModelSlot> model;
      ShardedModel::Failures failures;
    };
    StateLoader& loader_;
    const uint64_t replaced_;
    std::vector<Forgotten> forgotten_;
  };

  // (collective) Reads every file and checks its digest and that what is prepared, on any process,
  // takes it. Nothing changes.
  LoadedFiles CheckAndReadAll(StateReader& reader) const;
  // (collective) Everything is checked already. An error says what has changed until then.
  void Apply(const StateReader& reader, const LoadedFiles& loaded);
  // (collective) The weights alone, for the first models; puts the names of their files into
  // `read`.
  std::vector<std::unique_ptr<IncomingWeights>> ReadWeightsAlone(
      StateReader& reader, const LoadWeightsOptions& options,
      std::unordered_set<std::string>* read) const;
  // (collective) Whether ranks read parts of files: of sharded models, unless hooks want whole
  // ones.
  bool ReadsByFile() const;

 private:
  // (collective) Part of CheckAndReadAll().
  LoadedFiles ReadAll(StateReader& reader) const;
  void CheckPrepared(const StateReader& reader) const;
  // (collective) Whether such files of a checkpoint must not be copied into memory to load them.
  bool HasNoRoomFor(const StateReader& reader, const std::vector<std::string>& files) const;
  // (collective) As StateReader::ReadTogether, in place where there is no room.
  void ReadTogether(StateReader& reader, const std::vector<std::string>& files) const;
  // `without`: models whose weights are read elsewhere. `uploads`: null, or what takes large
  // tensors to the device.
  std::vector<NamedTensors> ReadWeights(const StateReader& reader, size_t models,
                                        const std::vector<bool>& without,
                                        DeviceUploads* uploads) const;
  // For these files, if they go to this process's device while they are read; null: they do not.
  std::unique_ptr<DeviceUploads> UploadsFor(const StateReader& reader,
                                            const std::vector<std::string>& files) const;
  // Warns of damage. Nothing is read from the indexes of models, since the manifest has what they
  // say; others read them.
  void CheckIndexes(const StateReader& reader, size_t models) const;
  void TakeOptimizerFile(const StateReader& reader, size_t index, const std::string& name,
                         DeviceUploads* uploads, LoadedFiles* loaded) const;
  void ReadOthers(const StateReader& reader, LoadedFiles* loaded) const;
  // The files that ReadOthers() reads on this process.
  std::vector<std::string> OthersIn(const StateReader& reader, const LoadedFiles& loaded) const;
  // Parts of Apply().
  void ApplyRegistered(const LoadedFiles& loaded);
  void ApplyOptimizers(const LoadedFiles& loaded);
  void ApplyModels(const StateReader& reader, const LoadedFiles& loaded);
  void ApplyPlaces(const StateReader& reader, const LoadedFiles& loaded);
  void ApplyRandom(const StateReader& reader, const LoadedFiles& loaded) const;

  const Process& process_;
  Registry& registry_;
  LoopTracker& loops_;
  StepController& steps_;
  const StateObjects& objects_;
  int loads_ = 0;          // under way, each in a hook of the one before
  uint64_t replaced_ = 0;  // times that Apply() has begun to replace the models
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_STATE_LOADER_H_
