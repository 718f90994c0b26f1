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

// The blocks of a model whose calls by muster::call() are checkpointed while this object lives.
// Thread-safe, except for BeginBackward() and EndBackward().
class ActivationPolicy {
 public:
  struct Block {
    std::string name;  // in the model
    std::shared_ptr<torch::nn::Module> module;
  };
  // Makes the place where the inputs of blocks are between the passes; null: they stay where they
  // are. A block that another policy has selected, too, keeps that policy's store; if all are such
  // blocks, no store is made.
  using MakeStore = std::function<std::shared_ptr<ActivationStore>()>;
  ActivationPolicy(std::vector<Block> blocks, const MakeStore& make_store);
  ~ActivationPolicy();
  ActivationPolicy(const ActivationPolicy&) = delete;
  ActivationPolicy& operator=(const ActivationPolicy&) = delete;

  // Call it before a backward pass: records which blocks have calls by muster::call() that the pass
  // can go back through.
  void BeginBackward();
  // Call it after the pass, with the parameters to whose gradients it has added. Throws c10::Error,
  // naming one, if some belong to blocks that have never been called by muster::call() with
  // gradients on: these have kept their activations. If such a block was called that way before,
  // but not in this pass, it logs one warning, because a penalty on the weights of a block that the
  // step leaves out looks the same. If nothing is wrong, the cost is proportional to the number of
  // blocks. Blocks inside other blocks count as part of those.
  using HasGradient = std::function<bool(const at::Tensor& parameter)>;
  void EndBackward(const HasGradient& has_gradient);
  // The same without BeginBackward(): throws, but never warns.
  void CheckCalled(const HasGradient& has_gradient) const;

 private:
  struct Entry;
  // Whether a gradient of `parameter` proves that this entry's block has run: that of a tied weight
  // does not.
  bool IsOwn(const Entry& entry, const at::Tensor& parameter) const;
  bool Ran(const Entry& entry, const HasGradient& has_gradient) const;

  std::vector<Entry> entries_;
};

namespace activation_internal {

// What policies know about a module.
struct Selection {
  std::atomic<bool> called = false;
  // The number of its calls whose graphs exist.
  std::atomic<int> live = 0;
  // Whether a call has kept nothing, because it had no graph, or was part of another block's call.
  std::atomic<bool> leaves_no_trace = false;
  std::shared_ptr<ActivationStore> store;
};

// Returns null unless a policy has selected `module`, which may be null.
std::shared_ptr<Selection> SelectionOf(const torch::nn::Module* module);

}  // namespace activation_internal
}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_ACTIVATION_POLICY_H_
