#ifndef MUSTER_INTERNAL_SAVE_WRITER_H_
#define MUSTER_INTERNAL_SAVE_WRITER_H_

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "muster/internal/loop_tracker.h"
#include "muster/internal/process.h"
#include "muster/internal/registry.h"
#include "muster/internal/save_plan.h"
#include "muster/internal/state_objects.h"
#include "muster/internal/step_controller.h"
#include "worker/checkpoint/file_plans.h"
#include "worker/checkpoint/safetensors.h"
#include "worker/checkpoint/state.h"
#include "worker/checkpoint/state_dict.h"
#include "worker/train/optimizer_handle.h"

namespace muster::internal {

// Writes the files of this process in a save. It reuses one plan until the registered objects or
// their tensors change on any process. Not thread-safe.
class SaveWriter {
 public:
  // Borrows all arguments.
  SaveWriter(const Process& process, Registry& registry, LoopTracker& loops, StepController& steps,
             const StateObjects& objects);
  ~SaveWriter();

  // Must be called before each save. Returns an error if something that is trained would not be
  // written, or if no plan can be made.
  absl::Status Check();
  // (collective) Returns OK if `mine` is OK on every rank, all ranks were given the same
  // `directory` or none, sharded models hold no mixture of weights, and, unless ranks train apart,
  // their optimizers have made the same steps. Otherwise returns this rank's error, or that of
  // another rank, which it names. The only exchange about a plan.
  absl::Status Agree(const absl::Status& mine, const std::string& directory);
  // (collective) Writes this process's files, after Agree(). Called again if the save has a second
  // place.
  absl::Status Write(StateWriter& writer);

  // How many saves and files this process has planned, and for how many it has reused an earlier
  // plan.
  struct PlanCounts {
    int64_t saves_planned = 0, saves_reused = 0;
    int64_t files_planned = 0, files_reused = 0;
  };
  PlanCounts plan_counts() const;

 private:
  // What the processes have agreed on before a save.
  struct Agreed {
    bool hooks = false;      // some process has hooks
    bool apart = false;      // some process has trained apart
    bool same_plan = false;  // the last plan fits on all processes
  };

  absl::Status CheckComplete();
  // Compares what the ranks have told each other in Agree(). (collective if a rank has failed)
  void CompareShardedModels(const std::vector<std::string>& changes);
  // Returns the optimizers of models that the ranks train together, as numbers in the registry.
  std::vector<size_t> SharedOptimizers() const;
  // For each of these optimizers, its steps and a digest of its groups' hyper-parameters.
  using StepsOnWire = std::vector<std::pair<int64_t, int64_t>>;
  StepsOnWire StepsHere() const;
  // Throws if ranks have made different steps or use different hyper-parameters. (collective if
  // digests differ)
  void CompareSteps(const std::vector<StepsOnWire>& said) const;
  // Tells the writer which tensors only optimizers change.
  void CopyParametersLater(StateWriter& writer) const;
  // Parts of Write().
  void ExpectBytes(StateWriter& writer, const std::vector<NamedTensors>& weights,
                   const std::vector<std::optional<OptimizerState>>& optimizers) const;
  absl::Status WriteModels(StateWriter& writer, const std::vector<NamedTensors>& weights) const;
  absl::Status WriteOptimizer(StateWriter& writer, size_t index, OptimizerState state) const;
  absl::Status WriteShared(StateWriter& writer) const;
  // `index` and `collected` belong to a divided object.
  absl::Status WriteRegistered(StateWriter& writer, const SaveDivision& division, size_t index,
                               const StateDict& collected) const;

  const Process& process_;
  Registry& registry_;
  LoopTracker& loops_;
  StepController& steps_;
  const StateObjects& objects_;
  SaveLayout layout_;                   // of the current or the last save
  std::optional<SaveLayout> complete_;  // the last layout that leaves out nothing trained
  StepsOnWire made_;                    // the steps at the last Check()
  Agreed agreed_;
  std::unique_ptr<SavePlan> plan_;  // of the last save; null before the first
  int64_t saves_planned_ = 0, saves_reused_ = 0;
  FilePlans file_plans_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_SAVE_WRITER_H_
