#ifndef MUSTER_NN_H_
#define MUSTER_NN_H_

#include <utility>

// Modules in addition to LibTorch's: SyncBatchNorm, which prepare() binds to the processes of the
// job; activation_checkpoint(), which runs a module without keeping its activations; and
// deferred_init(), which constructs a module without allocating its parameters.
#include "worker/bigmodel/empty_weights.h"
#include "worker/parallel/sync_batch_norm.h"
#include "worker/train/activation_checkpoint.h"

namespace muster {

// Constructs a module for training whose parameters take no memory yet. prepare() gives them the
// values that they would have had, to the last bit, and later random numbers are also the same.
// With options.sharding one unit at a time gets memory and each process keeps its part, so a model
// may be larger than a process's memory:
//
//   auto net = muster::deferred_init([&] { return Net(config); });
//   auto [model, optimizer] = accelerator.prepare(net, adamw);
//
// Initialize parameters inside `make`: a later change would be lost, so it is refused. prepare()
// also needs memory for the largest parameter.
template <class Make>
auto deferred_init(Make&& make) {
  return DeferredInit(std::forward<Make>(make));
}

}  // namespace muster

#endif  // MUSTER_NN_H_
