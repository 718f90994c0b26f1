#include "worker/parallel/sharding_options.h"

#include <string_view>

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

bool GoesElsewhere(Offload place, const c10::Device& device) {
  return place == Offload::kDisk || (place == Offload::kCpu && !device.is_cpu());
}

std::pair<Offload, std::string> ParseOffload(const std::string& text) {
  constexpr std::string_view kDisk = "disk:";
  if (text == "none") return {Offload::kNone, ""};
  if (text == "cpu") return {Offload::kCpu, ""};
  TORCH_CHECK(text.starts_with(kDisk) && text.size() > kDisk.size(),
              "unknown place to offload to, '", text, "': it must be none, cpu or disk:FOLDER");
  return {Offload::kDisk, text.substr(kDisk.size())};
}

}  // namespace muster
