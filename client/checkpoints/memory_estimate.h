#ifndef MUSTER_CLIENT_CHECKPOINTS_MEMORY_ESTIMATE_H_
#define MUSTER_CLIENT_CHECKPOINTS_MEMORY_ESTIMATE_H_

#include <cstdint>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::client {

// Estimates how much memory a model takes, from the names and sizes of its tensors. Activations,
// and the own memory of libraries, are not included. Pure.

struct EstimatedTensor {
  std::string name;
  int64_t elements = 0;
  int64_t bytes = 0;  // as stored
  bool floating = true;
};

struct ModelSize {
  int64_t tensors = 0;
  int64_t elements = 0;     // in floating-point tensors
  int64_t other_bytes = 0;  // of the other tensors, whose type does not change
  // The largest part that is kept together: an entry of a module list ("layers.3"), with everything
  // in it, a module like BERT's embeddings, or a module outside of lists with its own tensors.
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
  // Parameters, gradients and two states of Adam in this type; below 0: training in it is unusual.
  int64_t training = 0;
};
// `dtype`: float32, float16, bfloat16, int8 or int4. Errors: INVALID_ARGUMENT for any other.
absl::StatusOr<DtypeEstimate> EstimateDtype(const ModelSize& size, absl::string_view dtype);

// The memory of each process, in bytes, for training in fp32 (also with mixed precision, which
// casts as it goes).
struct StrategyEstimate {
  std::string strategy;  // as in muster launch --sharding
  int64_t parameters = 0;
  int64_t gradients = 0;
  int64_t states = 0;
  int64_t gathered = 0;  // additional at the peak of a step: whole units, or whole gradients
  // Outside of the memory in which the process trains, and not in total(): what EstimatedOffload
  // says.
  int64_t offloaded = 0;
  int64_t total() const { return parameters + gradients + states + gathered; }
};
// What is kept elsewhere between its uses, as options.sharding.offload_optimizer, offload_gradients
// and offload_parameters say.
struct EstimatedOffload {
  enum class Place { kNone, kCpu, kDisk };
  // Windows of 64 MiB, or of the largest state, are in memory in a step: three for a disk, one for
  // the CPU.
  Place optimizer = Place::kNone;
  // Reduced gradients of three units are in memory, or on the GPU. Not with "no_shard"; one process
  // then has "zero2" as well.
  Place gradients = Place::kNone;
  // Offloaded with the gradients; parts of two units, and gradients of three, are in memory, or on
  // the GPU. Only for strategies that divide parameters.
  Place parameters = Place::kNone;
  // options.sharding.optimizer_in_backward: gradients of a unit and parts of three at a time. Not
  // with "no_shard"; one process then has "zero2" as well.
  bool optimizer_in_backward = false;
};
// `processes` >= 1 divide one copy; with hybrid strategies, `group_size` of them do (1 <=
// group_size <= processes). `state_bytes`: the optimizer's bytes per element: 8 for Adam, 4 for
// momentum, 0. One process has "zero3" only if its parameters are offloaded.
std::vector<StrategyEstimate> EstimateStrategies(const ModelSize& size, int64_t processes,
                                                 int64_t group_size, int64_t state_bytes,
                                                 const EstimatedOffload& offload = {});

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CHECKPOINTS_MEMORY_ESTIMATE_H_
