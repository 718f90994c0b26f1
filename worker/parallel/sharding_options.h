#ifndef MUSTER_WORKER_PARALLEL_SHARDING_OPTIONS_H_
#define MUSTER_WORKER_PARALLEL_SHARDING_OPTIONS_H_

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "c10/core/ScalarType.h"

namespace muster {

// What the ranks divide among them instead of keeping a copy each.
enum class ShardingStrategy {
  kNone,       // nothing: data parallelism
  kOptimizer,  // the optimizer's state (ZeRO-1)
  kGradients,  // and the gradients (ZeRO-2, FSDP's SHARD_GRAD_OP)
  kFull,       // and the parameters (ZeRO-3, FSDP's FULL_SHARD)
};

// How a model is sharded. The unit is what is gathered and freed together: give the blocks of the
// model as units. A parameter belongs to the innermost unit around it; what no unit has is a unit
// of its own. At most one of unit_types, unit_names and min_unit_parameters.
struct ShardingOptions {
  ShardingStrategy strategy = ShardingStrategy::kNone;
  // Ranks that divide one copy of the model (hybrid sharding): each group of so many consecutive
  // ranks has a whole copy, and the groups average their gradients. It must divide the number of
  // ranks. 0: all ranks are one group.
  int64_t group_size = 0;
  // kFull: parameters are freed after the forward pass as well, not only after the backward pass.
  // false: less communication, more memory.
  bool reshard_after_forward = true;
  // The dtype in which fp32 parameters are gathered and used; the optimizer has them in fp32. Half
  // the communication and memory of what is gathered, for a forward and backward pass in low
  // precision: it must be the type of mixed_precision. Absent: fp32, which autocast converts.
  std::optional<c10::ScalarType> parameter_dtype = std::nullopt;
  // The dtype in which gradients are reduced. Absent: fp32.
  std::optional<c10::ScalarType> reduce_dtype = std::nullopt;
  // On the CPU the next unit is gathered, and gradients are reduced, while the one before computes:
  // a thread of its own communicates. Results are the same to the last bit, and so are the bytes on
  // the wire. For links that are slower than the computation. The same on every rank.
  bool overlap = false;
  // Modules of these classes are units: "Block" and "BlockImpl" are the same, namespaces are left
  // out.
  std::vector<std::string> unit_types = {};
  // Modules of these names are units: "encoder.layers.0".
  std::vector<std::string> unit_names = {};
  // Modules of at least so many parameters are units, without the units in them.
  int64_t min_unit_parameters = 0;
  // With none of the three: the entries of each torch::nn::ModuleList and torch::nn::Sequential.
};

// "no_shard", "zero1", "zero2", "zero3" or "hybrid" (zero3 in groups of `ranks_per_node`).
// Throws c10::Error for another name.
ShardingOptions ParseSharding(const std::string& name, int64_t ranks_per_node);

}  // namespace muster

#endif  // MUSTER_WORKER_PARALLEL_SHARDING_OPTIONS_H_
