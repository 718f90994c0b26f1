#ifndef MUSTER_WORKER_BIGMODEL_DEFERRED_INIT_KEY_H_
#define MUSTER_WORKER_BIGMODEL_DEFERRED_INIT_KEY_H_

#include "ATen/core/stack.h"
#include "c10/core/DispatchKey.h"
#include "c10/core/DispatchKeySet.h"

namespace c10 {
class OperatorHandle;
}

namespace muster {

// A key of the dispatcher above autograd and autocast that LibTorch keeps for external code. It has
// one fallback in a process, and two uses here: a thread that constructs a module without weights
// includes it (empty_weights.h), and tensors of a model that is divided among devices carry it
// (divided_model.h).
constexpr c10::DispatchKey kDeferredInitKey = c10::DispatchKey::DeferredInit;

using BoxedFallback = void (*)(const c10::OperatorHandle&, c10::DispatchKeySet, torch::jit::Stack*);

// Sets the fallback for operators in threads that include the key. Permanent, like the next one;
// thread-safe.
void SetFallbackOfThreads(BoxedFallback fallback);
// Sets the fallback for operators in other threads that take a tensor with the key.
void SetFallbackOfTensors(BoxedFallback fallback);

}  // namespace muster

#endif  // MUSTER_WORKER_BIGMODEL_DEFERRED_INIT_KEY_H_
