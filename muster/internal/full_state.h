#ifndef MUSTER_INTERNAL_FULL_STATE_H_
#define MUSTER_INTERNAL_FULL_STATE_H_

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "ATen/core/Tensor.h"
#include "muster/internal/model_slot.h"
#include "worker/train/optimizer_handle.h"

// State of sharded models and their optimizers as that of unsharded ones, which is what checkpoints
// hold: they load under any strategy and number of processes.
namespace muster::internal {

// The parameters and buffers of a model by name, to be read or filled. Those of an unsharded model
// are the live ones; those of a sharded one are copies on the CPU.
class FullWeights {
 public:
  // (collective, for a sharded model) `keep` false: this process needs no tensors and gets none.
  FullWeights(ModelSlot& model, bool keep);

  const std::vector<std::pair<std::string, at::Tensor>>& tensors() const { return tensors_; }
  // The tensors have been filled: the model takes their values over.
  void Store() const;

 private:
  ModelSlot& model_;
  std::vector<std::pair<std::string, at::Tensor>> tensors_;
};

using Models = std::vector<std::shared_ptr<ModelSlot>>;

// Whether a sharded model has parameters of `optimizer`.
bool IsSharded(const OptimizerHandle& optimizer, const Models& models);

// (collective, if a model is sharded) optimizer.SaveState(), with the whole state of parameters
// whose shards it updates; without `keep` nothing of them.
OptimizerState FullState(const OptimizerHandle& optimizer, const Models& models, bool keep);
// The reverse: what optimizer.LoadState() takes on this process.
OptimizerState LocalState(OptimizerState full, const OptimizerHandle& optimizer,
                          const Models& models);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_FULL_STATE_H_
