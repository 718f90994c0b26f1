#include "worker/train/output_dtypes.h"

#include <atomic>
#include <unordered_map>

#include "ATen/autocast_mode.h"
#include "absl/base/thread_annotations.h"
#include "base/mutex.h"
#include "torch/nn/module.h"

namespace muster {
namespace {

struct Registry {
  // Most processes have no lists, and look no further.
  std::atomic<int> lists = 0;
  Mutex mu;
  std::unordered_map<const torch::nn::Module*,
                     std::vector<std::pair<const OutputDtypes*, c10::ScalarType>>>
      dtypes ABSL_GUARDED_BY(mu);
};

Registry& TheRegistry() {
  static Registry& registry = *new Registry;
  return registry;
}

// As in a pass of a prepared model. In a pass of the bare module, the next module would refuse a
// dtype that its weights do not have.
bool RunsUnderAutocast() {
  return at::autocast::is_autocast_enabled(c10::kCPU) ||
         at::autocast::is_autocast_enabled(c10::kCUDA);
}

}  // namespace

OutputDtypes::OutputDtypes(std::vector<std::shared_ptr<torch::nn::Module>> modules,
                           c10::ScalarType dtype)
    : modules_(std::move(modules)) {
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mu);
  for (const auto& module : modules_) registry.dtypes[module.get()].emplace_back(this, dtype);
  registry.lists.fetch_add(1, std::memory_order_release);
}

OutputDtypes::~OutputDtypes() {
  Registry& registry = TheRegistry();
  MutexLock lock(&registry.mu);
  for (const auto& module : modules_) {
    const auto found = registry.dtypes.find(module.get());
    if (found == registry.dtypes.end()) continue;
    std::erase_if(found->second, [this](const auto& known) { return known.first == this; });
    if (found->second.empty()) registry.dtypes.erase(found);
  }
  registry.lists.fetch_sub(1, std::memory_order_release);
}

std::optional<c10::ScalarType> OutputDtypeOf(const torch::nn::Module* module) {
  Registry& registry = TheRegistry();
  if (module == nullptr || registry.lists.load(std::memory_order_acquire) == 0 ||
      !RunsUnderAutocast()) {
    return std::nullopt;
  }
  MutexLock lock(&registry.mu);
  const auto found = registry.dtypes.find(module);
  if (found == registry.dtypes.end()) return std::nullopt;
  return found->second.back().second;
}

}  // namespace muster
