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
// Thread-safe but for CheckCalled().
class ActivationPolicy {
 public:
  struct Block {
    std::string name;  // in the model
    std::shared_ptr<torch::nn::Module> module;
  };
  // `store`: where inputs of blocks are between the passes; null: where they were made. A block
  // that another policy has selected too keeps the store of that one.
  ActivationPolicy(std::vector<Block> blocks, std::shared_ptr<ActivationStore> store);
  ~ActivationPolicy();
  ActivationPolicy(const ActivationPolicy&) = delete;
  ActivationPolicy& operator=(const ActivationPolicy&) = delete;

  // Throws c10::Error, naming one, if the graph of `root` leads to parameters of blocks that have
  // never been called by muster::call() with gradients on: they have kept their activations. Once
  // all have been, it costs nothing. Blocks inside of other blocks count as those.
  void CheckCalled(const at::Tensor& root);
  // The same after a backward pass, by the parameters that have got gradients.
  void CheckCalled(const std::function<bool(const at::Tensor& parameter)>& has_gradient);

 private:
  struct Entry;
  std::vector<Entry> entries_;
  bool all_called_ = false;
};

namespace activation_internal {

// What a policy says of a module.
struct Selection {
  std::atomic<bool> called = false;
  std::shared_ptr<ActivationStore> store;
};

// Null unless a policy has selected `module`, which may be null.
std::shared_ptr<Selection> SelectionOf(const torch::nn::Module* module);

}  // namespace activation_internal
}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_ACTIVATION_POLICY_H_
