#ifndef MUSTER_WORKER_PARALLEL_DATA_PARALLEL_OPTIONS_H_
#define MUSTER_WORKER_PARALLEL_DATA_PARALLEL_OPTIONS_H_

#include "worker/parallel/comm_hooks.h"

namespace muster {

// Names and defaults as torch's DistributedDataParallel.
struct DataParallelOptions {
  double bucket_cap_mb = 25;
  // At the end of every backward pass that communicates, rank 0's buffers replace those of all
  // ranks, so buffers are equal, even in evaluation, whenever no accumulation window is open.
  bool broadcast_buffers = true;
  bool find_unused_parameters = false;
  // The set of used parameters and the order of their gradients never change.
  bool static_graph = false;
  // Gradients are views of the reduction buckets, which saves memory and a copy. A gradient tensor
  // that the program keeps has the next step's values after the next backward pass.
  bool gradient_as_bucket_view = false;
  // Parameters and buffers start with rank 0's values. If false, they must already be equal.
  bool init_sync = true;
  CommHook comm_hook = CommHook::kNone;
  CommWrapper comm_wrapper = CommWrapper::kNone;
  PowerSgdOptions power_sgd = {};
  // Replaces comm_hook and comm_wrapper; refused together with them, and without a process group.
  GradientHook gradient_hook = nullptr;
};

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_DATA_PARALLEL_OPTIONS_H_
