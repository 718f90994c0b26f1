#include "worker/parallel/sharding_options.h"

#include "c10/util/Exception.h"

namespace muster {

ShardingOptions ParseSharding(const std::string& name, int64_t ranks_per_node) {
  if (name == "no_shard") return {};
  if (name == "zero1") return {.strategy = ShardingStrategy::kOptimizer};
  if (name == "zero2") return {.strategy = ShardingStrategy::kGradients};
  if (name == "zero3") return {.strategy = ShardingStrategy::kFull};
  TORCH_CHECK(name == "hybrid", "unknown sharding '", name,
              "': it must be no_shard, zero1, zero2, zero3 or hybrid");
  return {.strategy = ShardingStrategy::kFull, .group_size = ranks_per_node};
}

}  // namespace muster
