#ifndef MUSTER_WORKER_TRAIN_ACTIVATION_POLICY_H_
#define MUSTER_WORKER_TRAIN_ACTIVATION_POLICY_H_

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"

namespace torch::nn {
class Module;
}

namespace muster {

class ActivationStore;

// Blocks of a model whose calls by muster::call() are checkpointed, as long as this object lives.
// Thread-safe but for what belongs to backward passes.
class ActivationPolicy {
 public:
  struct Block {
    std::string name;  // in the model
    std::shared_ptr<torch::nn::Module> module;
  };
  // `make_store`: makes the place where inputs of blocks are between the passes; null: they stay
  // where they were made. A block that another policy has selected too keeps the store of that
  // one; if all are such, nothing is made.
  using MakeStore = std::function<std::shared_ptr<ActivationStore>()>;
  ActivationPolicy(std::vector<Block> blocks, const MakeStore& make_store);
  ~ActivationPolicy();
  ActivationPolicy(const ActivationPolicy&) = delete;
  ActivationPolicy& operator=(const ActivationPolicy&) = delete;

  // Before a backward pass: remembers which blocks have a call by muster::call() to go back
  // through.
  void BeginBackward();
  // After it, with the parameters to whose gradients it has added. Throws c10::Error, naming one,
  // if they are of blocks that have never been called by muster::call() with gradients on: these
  // have kept their activations. If such a block was called that way before, but not in this pass,
  // it logs one warning, because a penalty on the weights of a block that the step leaves out looks
  // the same. Costs the number of blocks where nothing is wrong. Blocks inside of other blocks
  // count as those.
  using HasGradient = std::function<bool(const at::Tensor& parameter)>;
  void EndBackward(const HasGradient& has_gradient);
  // The same without BeginBackward(): throws, and warns of nothing.
  void CheckCalled(const HasGradient& has_gradient) const;

 private:
  struct Entry;
  // Whether the gradient of `parameter` tells that this entry's block has run: no tied weight does.
  bool IsOwn(const Entry& entry, const at::Tensor& parameter) const;
  bool Ran(const Entry& entry, const HasGradient& has_gradient) const;

  std::vector<Entry> entries_;
};

namespace activation_internal {

// What a policy says of a module.
struct Selection {
  std::atomic<bool> called = false;
  // Calls whose graphs are there.
  std::atomic<int> live = 0;
  // A call has kept nothing, as without its graph, or was part of another block's.
  std::atomic<bool> leaves_no_trace = false;
  std::shared_ptr<ActivationStore> store;
};

// Null unless a policy has selected `module`, which may be null.
std::shared_ptr<Selection> SelectionOf(const torch::nn::Module* module);

}  // namespace activation_internal
}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_ACTIVATION_POLICY_H_
