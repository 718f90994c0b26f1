#ifndef MUSTER_WORKER_PARALLEL_SHARD_UPDATES_H_
#define MUSTER_WORKER_PARALLEL_SHARD_UPDATES_H_

#include <vector>

#include "ATen/core/Tensor.h"

namespace muster {

class ShardedModel;

// What updates the shards of a model inside of its backward passes. In the thread of the backward
// pass. Errors are c10::Error. See docs/decisions/0064.
class ShardUpdates {
 public:
  virtual ~ShardUpdates() = default;

  // The first gradient of a pass that reduces has come. Whether this pass updates; the same on
  // every rank.
  virtual bool Begin(ShardedModel& model) = 0;
  // From here on some ranks update in this pass: if it throws, the model has changed in part on
  // all. Called by all ranks at one place of the pass, also where this one has nothing to update.
  virtual void Touch() = 0;
  // These shards have all of their gradients, and nothing uses their values in this pass any more.
  // May return before they are updated.
  virtual void Update(std::vector<at::Tensor> shards) = 0;
  // Returns when what Update() has begun is done, and throws what one of them has thrown.
  virtual void Await() = 0;
  // The pass is over. `trained`: the shards of all parameters that some rank had a gradient for.
  // Returns when they are updated.
  virtual void End(ShardedModel& model, const std::vector<at::Tensor>& trained) = 0;
  // After a pass that has thrown: returns when nothing is under way.
  virtual void Settle() = 0;
  // The program is about to do `what`. Throws where the parameters of `model` have been updated and
  // their optimizers have not ended that step.
  virtual void CheckStepped(const ShardedModel& model, const char* what) const = 0;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARD_UPDATES_H_
