#include "worker/parallel/weight_changes.h"

#include <unordered_set>

#include "ATen/autocast_mode.h"
#include "base/mutex.h"
#include "torch/csrc/autograd/variable.h"

namespace muster {
namespace {

struct Watches {
  Mutex mu;
  std::unordered_set<WeightWatch*> all ABSL_GUARDED_BY(mu);
};

// Never destroyed: weights may change while the process exits.
Watches& TheWatches() {
  static Watches& watches = *new Watches;
  return watches;
}

// Other tensors may be views of a weight's memory.
const void* MemoryOf(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

}  // namespace

WeightWatch::WeightWatch(const std::vector<at::Tensor>& weights) {
  for (const at::Tensor& weight : weights) {
    if (weight.has_storage()) changes_[MemoryOf(weight)] = 0;
  }
  Watches& watches = TheWatches();
  const MutexLock lock(&watches.mu);
  watches.all.insert(this);
}

WeightWatch::~WeightWatch() {
  Watches& watches = TheWatches();
  const MutexLock lock(&watches.mu);
  watches.all.erase(this);
}

uint64_t WeightWatch::changes(const at::Tensor& weight) const {
  const auto found = changes_.find(MemoryOf(weight));
  return found == changes_.end() ? 0 : found->second.load();
}

void NoteWeightChange() {
  {
    Watches& watches = TheWatches();
    const MutexLock lock(&watches.mu);
    for (WeightWatch* const watch : watches.all) {
      for (auto& [memory, changes] : watch->changes_) ++changes;
    }
  }
  at::autocast::clear_cache();
}

void NoteWeightChange(const std::vector<at::Tensor>& weights) {
  {
    Watches& watches = TheWatches();
    const MutexLock lock(&watches.mu);
    std::unordered_set<const void*> changed;
    for (const at::Tensor& weight : weights) changed.insert(MemoryOf(weight));
    for (WeightWatch* const watch : watches.all) {
      for (const void* const memory : changed) {
        const auto mine = watch->changes_.find(memory);
        if (mine != watch->changes_.end()) ++mine->second;
      }
    }
  }
  at::autocast::clear_cache();
}

void NoteStep(const std::vector<at::Tensor>& weights) {
  for (const at::Tensor& weight : weights) {
    // Inference tensors have no version, and no graph.
    if (!weight.is_inference()) torch::autograd::impl::bump_version(weight);
  }
  NoteWeightChange(weights);
}

}  // namespace muster
