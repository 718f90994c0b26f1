#include "worker/train/autograd_engine.h"

#include <atomic>
#include <iterator>
#include <typeinfo>

#include "base/mutex.h"
#include "c10/core/impl/DeviceGuardImplInterface.h"
#include "c10/util/Exception.h"
#include "torch/csrc/autograd/engine.h"

namespace muster {
namespace {

std::atomic<SavedTensorHooks> saved_tensor_hooks{nullptr};

// Whether there are devices other than those whose operators the thread of backward() runs itself.
bool HasDevices() {
  for (size_t type = 0; type < std::size(c10::impl::device_guard_impl_registry); ++type) {
    const auto* const devices = c10::impl::device_guard_impl_registry[type].load();
    if (devices == nullptr) continue;
    const c10::DeviceType kind = devices->type();
    if (kind == c10::kCPU || kind == c10::kMeta || kind == c10::kLazy) continue;
    if (devices->deviceCount() > 0) return true;
  }
  return false;
}

class OwnEngine : public torch::autograd::Engine {
 public:
  OwnEngine() = default;
  ~OwnEngine() override { stop(); }

  // Only Python's engine has default hooks in LibTorch.
  std::unique_ptr<torch::autograd::SavedVariableHooks> get_default_saved_variable_hooks() override {
    const SavedTensorHooks hooks = saved_tensor_hooks.load(std::memory_order_acquire);
    return hooks == nullptr ? nullptr : hooks();
  }

  torch::autograd::variable_list execute(const torch::autograd::edge_list& roots,
                                         const torch::autograd::variable_list& inputs,
                                         bool keep_graph, bool create_graph, bool accumulate_grad,
                                         const torch::autograd::edge_list& outputs) override {
    StartThreads();
    return Engine::execute(roots, inputs, keep_graph, create_graph, accumulate_grad, outputs);
  }

  static Engine& Get() {
    static OwnEngine engine;
    return engine;
  }

 private:
  // Starts threads once, with the pool for nested passes, and once more when there are devices. Not
  // in between, because passes under way would lose their pool.
  void StartThreads() {
    const MutexLock lock(&mu_);
    const auto complete = [&] {
      return thread_pool_shared_ != nullptr && (!device_ready_queues_.empty() || !HasDevices());
    };
    if (complete()) return;
    initialize_device_threads_pool();  // otherwise a backward pass would start them a second time
    if (!complete()) start_device_threads();
  }

  Mutex mu_;
};

bool Install() {
  torch::autograd::Engine& present = torch::autograd::Engine::get_default_engine();
  if (typeid(present) != typeid(torch::autograd::Engine)) return false;
  TORCH_CHECK(
      torch::autograd::get_current_graph_task_id() == -1,
      "the first Accelerator or activation_checkpoint() of this process comes in a backward "
      "pass: make it, or call it, before one");
  torch::autograd::set_default_engine_stub(&OwnEngine::Get);
  return true;
}

}  // namespace

bool InstallAutogradEngine(SavedTensorHooks hooks) {
  static const bool installed = Install();
  if (installed && hooks != nullptr) saved_tensor_hooks.store(hooks, std::memory_order_release);
  return installed;
}

}  // namespace muster
