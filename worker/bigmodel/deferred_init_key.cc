#include "worker/bigmodel/deferred_init_key.h"

#include <atomic>

#include "ATen/core/dispatch/Dispatcher.h"
#include "c10/core/impl/LocalDispatchKeySet.h"
#include "torch/library.h"

namespace muster {
namespace {

std::atomic<BoxedFallback> of_threads = nullptr;
std::atomic<BoxedFallback> of_tensors = nullptr;

void Fallback(const c10::OperatorHandle& op, c10::DispatchKeySet keys, torch::jit::Stack* stack) {
  const bool is_included = c10::impl::tls_is_dispatch_key_included(kDeferredInitKey);
  const BoxedFallback fallback = is_included ? of_threads : of_tensors;
  if (fallback != nullptr) return fallback(op, keys, stack);
  op.redispatchBoxed(keys & c10::DispatchKeySet(c10::DispatchKeySet::FULL_AFTER, kDeferredInitKey),
                     stack);
}

void Register() {
  // Lives as long as the process, like the operators.
  static auto& library = *[] {
    auto* const all =
        new torch::Library(torch::Library::IMPL, "_", kDeferredInitKey, __FILE__, __LINE__);
    all->fallback(torch::CppFunction::makeFromBoxedFunction<&Fallback>());
    return all;
  }();
  (void)library;
}

}  // namespace

void SetFallbackOfThreads(BoxedFallback fallback) {
  of_threads = fallback;
  Register();
}

void SetFallbackOfTensors(BoxedFallback fallback) {
  of_tensors = fallback;
  Register();
}

}  // namespace muster
