#ifndef MUSTER_WORKER_TRAIN_AUTOGRAD_ENGINE_H_
#define MUSTER_WORKER_TRAIN_AUTOGRAD_ENGINE_H_

#include <memory>

#include "torch/csrc/autograd/saved_variable_hooks.h"

namespace muster {

// Returns hooks for a tensor that autograd is saving in this thread; null: it is saved as it is.
using SavedTensorHooks = std::unique_ptr<torch::autograd::SavedVariableHooks> (*)();

// Makes Muster's engine that of this process. It is LibTorch's engine, with two differences:
//
// - each tensor that is saved gets hooks from `hooks`, once a call has provided some;
// - a backward pass finds threads for GPUs whenever they appear. LibTorch starts those of an engine
//   once, in the first backward pass, for the GPUs that it knows then. A backward pass on the CPU
//   before libtorch_cuda.so is loaded, or by an engine that is replaced later, starts none, and
//   every later one on a GPU fails with an internal assertion.
//
// Returns false, and does nothing, if the process has another engine than LibTorch's (it runs in
// Python). Idempotent, thread-safe; other threads may be in a backward pass. Throws c10::Error if
// the first call comes from within a backward pass.
bool InstallAutogradEngine(SavedTensorHooks hooks = nullptr);

}  // namespace muster

#endif  // MUSTER_WORKER_TRAIN_AUTOGRAD_ENGINE_H_
