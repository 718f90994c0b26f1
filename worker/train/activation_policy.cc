#include "worker/train/activation_policy.h"

#include <cstddef>
#include <functional>
#include <optional>
#include <unordered_map>
#include <unordered_set>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/function.h"
#include "torch/csrc/autograd/functions/accumulate_grad.h"
#include "torch/nn/module.h"

namespace muster {
namespace activation_internal {
namespace {

// Of the process: a block is called without knowing whose it is.
struct Registry {
  std::atomic<int> policies = 0;
  Mutex mu;
  std::unordered_map<const torch::nn::Module*, std::weak_ptr<Selection>> selections
      ABSL_GUARDED_BY(mu);
};

Registry& TheRegistry() {
  static Registry& registry = *new Registry;
  return registry;
}

// Of the one that is there already, if another policy has selected the module.
std::shared_ptr<Selection> Select(const torch::nn::Module* module,
                                  const std::shared_ptr<ActivationStore>& store) {
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mu);
  std::weak_ptr<Selection>& known = registry.selections[module];
  std::shared_ptr<Selection> selection = known.lock();
  if (selection == nullptr) {
    selection = std::make_shared<Selection>();
    selection->store = store;
    known = selection;
  }
  return selection;
}

}  // namespace

std::shared_ptr<Selection> SelectionOf(const torch::nn::Module* module) {
  Registry& registry = TheRegistry();
  if (module == nullptr || registry.policies.load(std::memory_order_acquire) == 0) return nullptr;
  MutexLock lock(&registry.mu);
  const auto found = registry.selections.find(module);
  return found == registry.selections.end() ? nullptr : found->second.lock();
}

}  // namespace activation_internal

using activation_internal::Selection;

struct ActivationPolicy::Entry {
  Block block;
  std::shared_ptr<Selection> selection;
  size_t outer;  // the entry around it, or its own index
};

ActivationPolicy::ActivationPolicy(std::vector<Block> blocks,
                                   std::shared_ptr<ActivationStore> store) {
  for (size_t i = 0; i < blocks.size(); ++i) {
    entries_.push_back({.block = std::move(blocks[i]), .selection = nullptr, .outer = i});
    Entry& entry = entries_.back();
    entry.selection = activation_internal::Select(entry.block.module.get(), store);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    for (size_t k = 0; k < entries_.size(); ++k) {
      const std::string prefix = entries_[k].block.name + ".";
      if (entries_[i].block.name.compare(0, prefix.size(), prefix) != 0) continue;
      // The outermost.
      if (entries_[k].block.name.size() < entries_[entries_[i].outer].block.name.size()) {
        entries_[i].outer = k;
      }
    }
  }
  activation_internal::TheRegistry().policies.fetch_add(1, std::memory_order_release);
}

ActivationPolicy::~ActivationPolicy() {
  activation_internal::Registry& registry = activation_internal::TheRegistry();
  registry.policies.fetch_sub(1);
  MutexLock lock(&registry.mu);
  for (Entry& entry : entries_) {
    entry.selection.reset();
    const auto found = registry.selections.find(entry.block.module.get());
    if (found != registry.selections.end() && found->second.expired()) {
      registry.selections.erase(found);
    }
  }
}

namespace {

// The leaves that the graph of `root` leads to.
std::unordered_set<const void*> LeavesOf(const at::Tensor& root) {
  std::unordered_set<const void*> leaves;
  std::unordered_set<const torch::autograd::Node*> seen;
  std::vector<const torch::autograd::Node*> stack;
  const auto visit = [&](const torch::autograd::Node* node) {
    if (node != nullptr && seen.insert(node).second) stack.push_back(node);
  };
  visit(root.grad_fn().get());
  while (!stack.empty()) {
    const torch::autograd::Node* const node = stack.back();
    stack.pop_back();
    if (const auto* leaf = dynamic_cast<const torch::autograd::AccumulateGrad*>(node)) {
      leaves.insert(leaf->variable.unsafeGetTensorImpl());
    }
    for (const torch::autograd::Edge& edge : node->next_edges()) visit(edge.function.get());
  }
  return leaves;
}

}  // namespace

void ActivationPolicy::CheckCalled(const at::Tensor& root) {
  std::optional<std::unordered_set<const void*>> leaves;
  CheckCalled([&](const at::Tensor& parameter) {
    if (!leaves.has_value()) leaves = LeavesOf(root);
    return leaves->count(parameter.unsafeGetTensorImpl()) > 0;
  });
}

void ActivationPolicy::CheckCalled(
    const std::function<bool(const at::Tensor& parameter)>& has_gradient) {
  if (all_called_) return;
  std::vector<const Entry*> open;
  std::unordered_set<const void*> elsewhere;  // parameters of blocks that were called
  for (const Entry& entry : entries_) {
    if (!entry.selection->called && !entries_[entry.outer].selection->called) {
      open.push_back(&entry);
      continue;
    }
    for (const at::Tensor& parameter : entry.block.module->parameters()) {
      elsewhere.insert(parameter.unsafeGetTensorImpl());
    }
  }
  if (open.empty()) {
    all_called_ = true;
    return;
  }
  size_t missed = 0;
  const Entry* first = nullptr;
  for (const Entry* entry : open) {
    for (const at::Tensor& parameter : entry->block.module->parameters()) {
      const void* const impl = parameter.unsafeGetTensorImpl();
      // Tied weights tell nothing.
      if (elsewhere.count(impl) > 0 || !has_gradient(parameter)) continue;
      ++missed;
      if (first == nullptr) first = entry;
      break;
    }
  }
  TORCH_CHECK(missed == 0, "activation checkpointing was asked for, and ", missed,
              " block(s) of the model ran without it, '", first == nullptr ? "" : first->block.name,
              "' first: call them by muster::call(block, inputs...) where the model calls "
              "block(inputs...), or name the classes of the blocks that it calls so in "
              "options.activation_checkpointing->block_types");
}

}  // namespace muster
