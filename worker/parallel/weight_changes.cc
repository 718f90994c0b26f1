#include "worker/parallel/weight_changes.h"

#include <algorithm>

#include "ATen/autocast_mode.h"
#include "base/mutex.h"

namespace muster {
namespace {

struct Watches {
  Mutex mu;
  std::unordered_set<WeightWatch*> all ABSL_GUARDED_BY(mu);
};

// For good: weights may be noted while the process exits.
Watches& TheWatches() {
  static Watches& watches = *new Watches;
  return watches;
}

// Other tensors may be views of a weight's memory.
const void* MemoryOf(const at::Tensor& tensor) {
  return tensor.has_storage() ? tensor.storage().unsafeGetStorageImpl() : nullptr;
}

std::unordered_set<const void*> MemoryOf(const std::vector<at::Tensor>& weights) {
  std::unordered_set<const void*> memory;
  for (const at::Tensor& weight : weights) {
    if (weight.has_storage()) memory.insert(MemoryOf(weight));
  }
  return memory;
}

}  // namespace

WeightWatch::WeightWatch(const std::vector<at::Tensor>& weights) : memory_(MemoryOf(weights)) {
  Watches& watches = TheWatches();
  const MutexLock lock(&watches.mu);
  watches.all.insert(this);
}

WeightWatch::~WeightWatch() {
  Watches& watches = TheWatches();
  const MutexLock lock(&watches.mu);
  watches.all.erase(this);
}

void NoteWeightChange() {
  {
    Watches& watches = TheWatches();
    const MutexLock lock(&watches.mu);
    for (WeightWatch* const watch : watches.all) ++watch->changes_;
  }
  at::autocast::clear_cache();
}

void NoteWeightChange(const std::vector<at::Tensor>& weights) {
  {
    Watches& watches = TheWatches();
    const MutexLock lock(&watches.mu);
    for (WeightWatch* const watch : watches.all) {
      const bool mine = std::any_of(weights.begin(), weights.end(), [&](const at::Tensor& weight) {
        return watch->memory_.count(MemoryOf(weight)) > 0;
      });
      if (mine) ++watch->changes_;
    }
  }
  at::autocast::clear_cache();
}

}  // namespace muster
