#ifndef MUSTER_CLIENT_CHECKPOINTS_MEMORY_ESTIMATE_H_
#define MUSTER_CLIENT_CHECKPOINTS_MEMORY_ESTIMATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::client {

// How much memory a model takes, from the names and sizes of its tensors. Activations, and what
// libraries need for themselves, are not in it. Pure.

struct EstimatedTensor {
  std::string name;
  int64_t elements = 0;
  int64_t bytes = 0;  // as they are stored
  bool floating = true;
};

struct ModelSize {
  int64_t tensors = 0;
  int64_t elements = 0;     // of floating tensors
  int64_t other_bytes = 0;  // of the others, whose type stays
  // The largest part that is kept together: an entry of a module list ("layers.3"), with all that
  // is in it, a module like BERT's embeddings, or one outside of lists that has tensors of its own.
  std::string largest;
  int64_t largest_elements = 0;
  int64_t largest_tensor = 0;  // elements
};
ModelSize SizeOf(const std::vector<EstimatedTensor>& tensors);

// One row of Accelerate's table.
struct DtypeEstimate {
  std::string dtype;
  int64_t largest = 0;
  int64_t total = 0;
  // Parameters, gradients and two states of Adam of this type; below 0: nobody trains in it.
  int64_t training = 0;
};
// `dtype`: float32, float16, bfloat16, int8 or int4. Errors: INVALID_ARGUMENT for another.
absl::StatusOr<DtypeEstimate> EstimateDtype(const ModelSize& size, absl::string_view dtype);

// Of each process, in bytes, for training in fp32 (with mixed precision, too: it casts as it goes).
struct StrategyEstimate {
  std::string strategy;  // as of muster launch --sharding
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t states = 0;
  int64_t gathered = 0;  // more at the highest point of a step: whole units, or whole gradients
  // Not in the memory that trains, and not in total(): of EstimatedOffload.
  int64_t offloaded = 0;
  int64_t total() const { return parameters + gradients + states + gathered; }
};
// What is elsewhere between its uses, as options.sharding.offload_optimizer, offload_gradients and
// offload_parameters say.
struct EstimatedOffload {
  enum class Place { kNone, kCpu, kDisk };
  // Windows of 64 MiB, or of the largest state, are in memory in a step: three of a disk, one of
  // the CPU's.
  Place optimizer = Place::kNone;
  // Reduced gradients of three units are in memory, or on the GPU. Not of "no_shard"; one process
  // then has "zero2" as well.
  Place gradients = Place::kNone;
  // With the gradients; parts of two units, and gradients of three, are in memory, or on the GPU.
  // Of strategies that divide parameters.
  Place parameters = Place::kNone;
  // options.sharding.optimizer_in_backward: gradients of a unit and parts of three at a time. Not
  // of "no_shard"; one process then has "zero2" as well.
  bool optimizer_in_backward = false;
};
// `processes` >= 1 divide one copy, for hybrid `group_size` of them (1 <= group_size <= processes).
// `state_bytes`: of the optimizer for each element: 8 for Adam, 4 for momentum, 0. One process has
// "zero3" only where its parameters are offloaded.
std::vector<StrategyEstimate> EstimateStrategies(const ModelSize& size, int64_t processes,
                                                 int64_t group_size, int64_t state_bytes,
                                                 const EstimatedOffload& offload = {});

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_MEMORY_ESTIMATE_H_
