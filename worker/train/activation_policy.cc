#include "worker/train/activation_policy.h"

#include <cstddef>
#include <unordered_map>
#include <utility>

#include "absl/base/thread_annotations.h"
#include "base/log.h"
#include "base/mutex.h"
#include "c10/util/Exception.h"
#include "torch/nn/module.h"

namespace muster {
namespace activation_internal {
namespace {

// One for the process, because a block is called without knowing its model.
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

// Returns the existing selection, if another policy has selected the module.
std::shared_ptr<Selection> Select(const torch::nn::Module* module,
                                  const ActivationPolicy::MakeStore& make_store,
                                  std::shared_ptr<ActivationStore>* store) {
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mu);
  std::weak_ptr<Selection>& known = registry.selections[module];
  std::shared_ptr<Selection> selection = known.lock();
  if (selection == nullptr) {
    selection = std::make_shared<Selection>();
    if (*store == nullptr && make_store != nullptr) *store = make_store();
    selection->store = *store;
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
  size_t outer;       // the entry of the enclosing block, or its own index
  bool live = false;  // before the backward pass
  bool warned = false;
};

ActivationPolicy::ActivationPolicy(std::vector<Block> blocks, const MakeStore& make_store) {
  std::shared_ptr<ActivationStore> store;
  for (size_t i = 0; i < blocks.size(); ++i) {
    entries_.push_back({.block = std::move(blocks[i]), .selection = nullptr, .outer = i});
    Entry& entry = entries_.back();
    entry.selection = activation_internal::Select(entry.block.module.get(), make_store, &store);
  }
  for (size_t i = 0; i < entries_.size(); ++i) {
    for (size_t k = 0; k < entries_.size(); ++k) {
      const std::string prefix = entries_[k].block.name + ".";
      if (entries_[i].block.name.compare(0, prefix.size(), prefix) != 0) continue;
      // Choose the outermost.
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

bool ActivationPolicy::IsOwn(const Entry& entry, const at::Tensor& parameter) const {
  for (const Entry& other : entries_) {
    if (&other == &entry || !other.selection->called) continue;
    for (const at::Tensor& its : other.block.module->parameters()) {
      if (its.is_same(parameter)) return false;
    }
  }
  return true;
}

bool ActivationPolicy::Ran(const Entry& entry, const HasGradient& has_gradient) const {
  for (const at::Tensor& parameter : entry.block.module->parameters()) {
    if (has_gradient(parameter) && IsOwn(entry, parameter)) return true;
  }
  return false;
}

void ActivationPolicy::CheckCalled(const HasGradient& has_gradient) const {
  size_t missed = 0;
  const Entry* first = nullptr;
  for (const Entry& entry : entries_) {
    if (entry.selection->called || entries_[entry.outer].selection->called) continue;
    if (!Ran(entry, has_gradient)) continue;
    ++missed;
    if (first == nullptr) first = &entry;
  }
  TORCH_CHECK(missed == 0, "activation checkpointing was asked for, and ", missed,
              " block(s) of the model ran without it, '", first == nullptr ? "" : first->block.name,
              "' first: call them by muster::call(block, inputs...) where the model calls "
              "block(inputs...), or name the classes of the blocks that it calls so in "
              "options.activation_checkpointing->block_types");
}

void ActivationPolicy::BeginBackward() {
  for (Entry& entry : entries_) entry.live = entry.selection->live > 0;
}

void ActivationPolicy::EndBackward(const HasGradient& has_gradient) {
  CheckCalled(has_gradient);
  for (Entry& entry : entries_) {
    const Entry& outer = entries_[entry.outer];
    if (entry.warned || entry.live || outer.live || entry.selection->leaves_no_trace ||
        outer.selection->leaves_no_trace || !Ran(entry, has_gradient)) {
      continue;
    }
    entry.warned = true;
    MUSTER_LOG(Warning) << "activation checkpointing was asked for, and block '" << entry.block.name
                        << "' of the model has gradients of a backward pass for which it was not "
                           "called by muster::call(block, inputs...), as it was before: if the "
                           "model called block(inputs...) there, its activations were kept";
  }
}

}  // namespace muster
