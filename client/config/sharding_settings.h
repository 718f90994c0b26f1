#ifndef MUSTER_CLIENT_CONFIG_SHARDING_SETTINGS_H_
#define MUSTER_CLIENT_CONFIG_SHARDING_SETTINGS_H_

#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/config/fsdp_config.h"

namespace muster::client {

// Muster's own terms for sharded training, to which the settings of FSDP and of DeepSpeed are
// mapped. docs/sharding_config.md has the table. Pure.
struct ShardingSettings {
  enum class Strategy {
    kNone,
    kOptimizer,        // ZeRO stage 1
    kGradients,        // ZeRO stage 2, SHARD_GRAD_OP
    kFull,             // ZeRO stage 3, FULL_SHARD
    kHybrid,           // kFull inside a node, whole between nodes
    kHybridGradients,  // kGradients inside a node
  };
  enum class Wrap { kLists, kTypes, kSize };
  enum class Offload { kNone, kCpu, kDisk };

  Strategy strategy = Strategy::kFull;
  // With kFull and kHybrid: free the gathered parameters of a unit between forward and backward.
  bool reshard_after_forward = true;
  // Communication runs concurrently with computation.
  bool overlap = false;
  // The units: the entries of the model's lists of modules, modules of these types (if none is
  // named, those that the model itself keeps whole), or modules of at least this many parameters.
  Wrap wrap = Wrap::kLists;
  std::vector<std::string> wrap_types;
  int64_t min_parameters = 0;
  // Modules, by class or name, that stay in one piece.
  std::vector<std::string> no_split;
  // A regular expression for the names of modules that are not sharded.
  std::optional<std::string> ignored_modules;
  Offload offload_parameters = Offload::kNone;
  std::string offload_parameters_path;  // with kDisk
  Offload offload_optimizer = Offload::kNone;
  std::string offload_optimizer_path;
  bool activation_checkpointing = false;
  bool activation_offload = false;
  // Names of torch's dtypes; nullopt: the dtype of the parameters.
  std::optional<std::string> parameter_dtype;
  std::optional<std::string> reduce_dtype;
  std::optional<std::string> output_dtype;
  std::optional<std::string> buffer_dtype;
};

// The scale of losses in fp16. `fixed` 0: dynamic.
struct PlannedLossScale {
  double fixed = 0;
  int64_t initial_power = 16;
  int64_t window = 1000;
  int64_t hysteresis = 2;
  double minimum = 1;
};

// The section "optimizer": `type` is AdamW, Adam, SGD or Adagrad.
struct PlannedOptimizer {
  std::string type;
  std::optional<double> lr;
  std::optional<double> weight_decay;
  std::optional<double> eps;
  std::optional<double> beta1;
  std::optional<double> beta2;
  std::optional<double> momentum;
  std::optional<bool> nesterov;
};

// The section "scheduler": `type` is WarmupLR, WarmupDecayLR or WarmupCosineLR.
struct PlannedScheduler {
  std::string type;
  bool logarithmic = true;  // the shape of the warm-up
  std::optional<double> min_lr;
  std::optional<double> max_lr;
  std::optional<double> min_ratio;
  std::optional<double> cosine_min_ratio;
  std::optional<int64_t> warmup_steps;
  std::optional<int64_t> total_steps;
};

// The settings of a config about training, besides sharding.
struct ShardingPlan {
  ShardingSettings sharding;
  std::string mixed_precision = "no";  // no, fp16 or bf16
  std::optional<PlannedLossScale> loss_scale;
  std::optional<double> gradient_clipping;  // nullopt: no clipping
  std::optional<int64_t> gradient_accumulation_steps;
  std::optional<int64_t> micro_batch_size;
  std::optional<int64_t> train_batch_size;
  std::optional<PlannedOptimizer> optimizer;
  std::optional<PlannedScheduler> scheduler;
  // Settings that have no effect here, a sentence each, for the log.
  std::vector<std::string> notes;
};

// How a known setting is used.
struct SettingUse {
  enum class Use {
    kSection,   // holds other settings
    kMapped,    // `text`: the target
    kNoEffect,  // `text`: why no result depends on it
    kRefused,   // unless switched off; `text`: what to set instead
  };
  std::string key;  // dotted
  Use use;
  std::string text;
  nlohmann::json off;  // kRefused: the value, besides false and null, that requests nothing
};
// Returns all arguments of the FSDP plugin, and all keys of a DeepSpeed config.
const std::vector<SettingUse>& FsdpUses();
const std::vector<SettingUse>& DeepSpeedUses();

// Errors of both: INVALID_ARGUMENT for an invalid value, UNIMPLEMENTED for a setting that cannot be
// honoured; each names the setting and the nearest one that can.
absl::StatusOr<ShardingPlan> MapFsdp(const FsdpSettings& settings);
// `config`: resolved (DeepSpeedConfig::config), with its clipping settled. A batch size or
// accumulation steps that are still "auto" count as not given.
absl::StatusOr<ShardingPlan> MapDeepSpeed(const nlohmann::json& config);

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_SHARDING_SETTINGS_H_
