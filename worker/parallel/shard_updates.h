#ifndef MUSTER_WORKER_PARALLEL_SHARD_UPDATES_H_
#define MUSTER_WORKER_PARALLEL_SHARD_UPDATES_H_

#include <vector>

#include "ATen/core/Tensor.h"

namespace muster {

class ShardedModel;

// Updates the shards of a model inside its backward passes, on the thread of the backward pass.
// Errors are c10::Error. See docs/decisions/0064.
class ShardUpdates {
 public:
  virtual ~ShardUpdates() = default;

  // The first gradient of a pass that reduces has come. Returns whether this pass updates; the same
  // on every rank.
  virtual bool Begin(ShardedModel& model) = 0;
  // From here on some ranks update in this pass: if it throws, the model has changed in part on
  // all. Called by all ranks at one place of the pass, even if this rank has nothing to update.
  virtual void Touch() = 0;
  // Updates these shards, which have all of their gradients, and whose values this pass no longer
  // uses. May return before they are updated.
  virtual void Update(std::vector<at::Tensor> shards) = 0;
  // Returns when the updates begun by Update() are done, and throws the error of one that failed.
  virtual void Await() = 0;
  // The pass is over. `trained`: the shards of all parameters for which some rank had a gradient.
  // Returns when they are updated.
  virtual void End(ShardedModel& model, const std::vector<at::Tensor>& trained) = 0;
  // Call it after a pass that has thrown: returns when no update is under way.
  virtual void Settle() = 0;
  // The program is about to do `what`. Throws if the parameters of `model` have been updated and
  // their optimizers have not ended that step.
  virtual void CheckStepped(const ShardedModel& model, const char* what) const = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARD_UPDATES_H_
