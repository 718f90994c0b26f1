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

// Writes the files of this process in a save, by a plan that is made once for what is registered
// and its tensors, and again when that changes on any process. Not thread-safe.
class SaveWriter {
 public:
  // All are borrowed.
  SaveWriter(const Process& process, Registry& registry, LoopTracker& loops, StepController& steps,
             const StateObjects& objects);
  ~SaveWriter();

  // Before each save. Whether everything that is trained would be written; throws what the plan
  // cannot be made of.
  absl::Status Check();
  // (collective) OK if `mine` is on every rank, sharded models are no mixture, and unless ranks
  // train apart their optimizers have stepped alike; else this rank's error, or another's with its
  // rank. The only exchange about a plan. `directory`: what this rank was given, which all must be
  // or none.
  absl::Status Agree(const absl::Status& mine, const std::string& directory);
  // This process's files, after Agree(). Again, if the save has a second place. (collective)
  absl::Status Write(StateWriter& writer);

  // How often, by this process: saves and files that were planned, and those that took the plan of
  // an earlier one.
  struct PlanCounts {
    int64_t saves_planned = 0, saves_reused = 0;
    int64_t files_planned = 0, files_reused = 0;
  };
  PlanCounts plan_counts() const;

 private:
  // What the processes have agreed on before a save.
  struct Agreed {
    bool hooks = false;      // one has hooks
    bool apart = false;      // one has trained apart
    bool same_plan = false;  // the last plan fits on all of them
  };

  absl::Status CheckComplete();
  // Compares what each rank has told the others in Agree(). (collective where a rank has failed)
  void CompareShardedModels(const std::vector<std::string>& changes);
  // The optimizers of models that the ranks train together, as numbers in the registry.
  std::vector<size_t> SharedOptimizers() const;
  // Of each of these, the steps, and a digest of its groups' hyper-parameters.
  using StepsOnWire = std::vector<std::pair<int64_t, int64_t>>;
  StepsOnWire StepsHere() const;
  // Throws where ranks have made other steps. (collective where digests differ)
  void CompareSteps(const std::vector<StepsOnWire>& said) const;
  // Tells the writer what only optimizers change.
  void CopyParametersLater(StateWriter& writer) const;
  // Parts of Write().
  void ExpectBytes(StateWriter& writer, const std::vector<NamedTensors>& weights,
                   const std::vector<std::optional<OptimizerState>>& optimizers) const;
  absl::Status WriteModels(StateWriter& writer, const std::vector<NamedTensors>& weights) const;
  absl::Status WriteOptimizer(StateWriter& writer, size_t index, OptimizerState state) const;
  absl::Status WriteShared(StateWriter& writer) const;
  // `index` and `collected` are of a divided object.
  absl::Status WriteRegistered(StateWriter& writer, const SaveDivision& division, size_t index,
                               const StateDict& collected) const;

  const Process& process_;
  Registry& registry_;
  LoopTracker& loops_;
  StepController& steps_;
  const StateObjects& objects_;
  SaveLayout layout_;                   // of the save that is made, or was last
  std::optional<SaveLayout> complete_;  // nothing that is trained is left out of it
  StepsOnWire made_;                    // until then
  Agreed agreed_;
  std::unique_ptr<SavePlan> plan_;  // of the last save; null before
  int64_t saves_planned_ = 0, saves_reused_ = 0;
  FilePlans file_plans_;
};

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_SAVE_WRITER_H_
