#ifndef MUSTER_WORKER_PARALLEL_SAME_PLAN_H_
#define MUSTER_WORKER_PARALLEL_SAME_PLAN_H_

#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/collective/comm.h"
#include "worker/parallel/shard_plan.h"
#include "worker/parallel/shard_unit.h"
#include "worker/parallel/sharding_options.h"

namespace muster {

// Throws c10::Error, naming both, if two of the tensors overlap in memory and one of them is a
// parameter: sharding would give each its own memory.
void CheckSeparateStorage(const std::vector<NamedParameter>& parameters,
                          const std::vector<at::Tensor>& buffers);

// Where the parts of a plan are kept.
struct Placing {
  int ranks = 1;  // that divide one copy of the model
  // Whether they are in stores, and not beside the other parts.
  bool stores_parts = false, stores_gradients = false;
};

// (collective) Throws the same c10::Error on every rank, with the first difference, if ranks would
// shard their models differently.
void VerifySamePlan(Comm& world, const std::vector<PlannedUnit>& plan,
                    const ShardingOptions& options, const Placing& placing);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SAME_PLAN_H_
