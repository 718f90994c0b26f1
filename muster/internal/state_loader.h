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

// The contents of the files of a checkpoint.
struct LoadedFiles {
  struct Optimizer {
    OptimizerState state;  // what its handle takes on this rank
    int64_t steps = 0;
  };

  bool hooks = false;                 // have seen the weights, and may have left some out
  std::vector<NamedTensors> weights;  // empty for sharded models, unless hooks want them
  std::vector<std::optional<LoadedShards>> shards;
  std::vector<Optimizer> optimizers;
  // For divided objects only this process's parts, unless hooks need whole models.
  std::vector<StateDict> schedulers, loaders, registered;
  std::vector<bool> registered_in_parts;
  std::optional<StateDict> scaler, random;
};

// Call it before values are loaded into these models: tensors that share memory with tensors of the
// program, or lie in a mapped file, get memory of their own.
void GiveModelsOwnMemory(const Models& models);

// Reads the files of an open checkpoint, and loads them into the prepared objects. Everything is
// read and checked before anything changes. Not thread-safe. Methods throw; those marked
// (collective) throw the same on every process.
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

  // (collective) Reads every file, and checks its digest and that the prepared objects of every
  // process accept it. Nothing changes.
  LoadedFiles CheckAndReadAll(StateReader& reader) const;
  // (collective) Applies files that are checked already. An error names what has changed so far.
  void Apply(const StateReader& reader, const LoadedFiles& loaded);
  // (collective) Reads only the weights, for the first models; puts the names of their files into
  // `read`.
  std::vector<std::unique_ptr<IncomingWeights>> ReadWeightsAlone(
      StateReader& reader, const LoadWeightsOptions& options,
      std::unordered_set<std::string>* read) const;
  // (collective) Whether ranks read parts of files: for sharded models, unless hooks want whole
  // ones.
  bool ReadsByFile() const;

 private:
  // (collective) Part of CheckAndReadAll().
  LoadedFiles ReadAll(StateReader& reader) const;
  void CheckPrepared(const StateReader& reader) const;
  // (collective) Whether memory is too small to copy these files of a checkpoint in order to load
  // them.
  bool HasNoRoomFor(const StateReader& reader, const std::vector<std::string>& files) const;
  // (collective) As StateReader::ReadTogether, but reads in place if memory is too small.
  void ReadTogether(StateReader& reader, const std::vector<std::string>& files) const;
  // `without`: models whose weights are read elsewhere. `uploads`: takes large tensors to the
  // device; may be null.
  std::vector<NamedTensors> ReadWeights(const StateReader& reader, size_t models,
                                        const std::vector<bool>& without,
                                        DeviceUploads* uploads) const;
  // Returns the uploads of these files to this process's device while they are read; null: there
  // are none.
  std::unique_ptr<DeviceUploads> UploadsFor(const StateReader& reader,
                                            const std::vector<std::string>& files) const;
  // Warns of damaged indexes of models. Nothing is read from them, since the manifest has the same
  // facts; other programs read them.
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
  int loads_ = 0;          // under way, each in a hook of the previous one
  uint64_t replaced_ = 0;  // how often Apply() has begun to replace the models
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_STATE_LOADER_H_
