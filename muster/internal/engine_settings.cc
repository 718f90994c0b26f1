#include "muster/internal/engine_settings.h"

#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "client/config/deepspeed_config.h"
#include "client/config/fsdp_config.h"
#include "client/config/sharding_settings.h"

namespace muster::internal {
namespace {

using client::ShardingPlan;
using client::ShardingSettings;

absl::Status Refused(absl::string_view what, absl::string_view instead) {
  return absl::UnimplementedError(absl::StrCat("the settings of Accelerate's launcher ask for ",
                                               what, ", which sharding does not have: ", instead));
}

// Those who set them in a config file must learn that nothing of it would happen.
absl::Status CheckEngineHas(const ShardingPlan& plan) {
  const ShardingSettings& settings = plan.sharding;
  if (settings.activation_checkpointing || settings.activation_offload) {
    return Refused(
        "activation checkpointing",
        "switch it off, and call muster::activation_checkpoint(block, inputs...) where the "
        "model calls its blocks");
  }
  if (plan.gradient_clipping.has_value()) {
    return Refused("gradient clipping inside of backward()",
                   "leave gradient_clipping out and call accelerator.clip_grad_norm_()");
  }
  if (plan.optimizer.has_value() || plan.scheduler.has_value()) {
    return Refused("the optimizer or scheduler of a DeepSpeed config",
                   "leave the sections out and prepare() an optimizer and a schedule");
  }
  if (plan.loss_scale.has_value()) {
    const client::PlannedLossScale standard;
    const client::PlannedLossScale& scale = *plan.loss_scale;
    if (scale.fixed != 0 || scale.initial_power != standard.initial_power ||
        scale.window != standard.window || scale.hysteresis != standard.hysteresis ||
        scale.minimum != standard.minimum) {
      return Refused("a loss scale of its own (fp16.loss_scale and the like)",
                     "leave it out and set options.grad_scaler");
    }
  }
  return absl::OkStatus();
}

absl::StatusOr<std::optional<c10::ScalarType>> DtypeOf(const std::optional<std::string>& name,
                                                       absl::string_view what) {
  if (!name.has_value() || *name == "float32") return std::nullopt;
  if (*name == "bfloat16") return c10::ScalarType::BFloat16;
  if (*name == "float16") return c10::ScalarType::Half;
  return Refused(absl::StrCat(what, " in ", *name), "use float32, bfloat16 or float16");
}

Offload OffloadOf(ShardingSettings::Offload offload) {
  switch (offload) {
    case ShardingSettings::Offload::kNone:
      return Offload::kNone;
    case ShardingSettings::Offload::kCpu:
      return Offload::kCpu;
    case ShardingSettings::Offload::kDisk:
      return Offload::kDisk;
  }
  return Offload::kNone;
}

absl::StatusOr<EngineSettings> ToOptions(const ShardingPlan& plan, int64_t ranks_per_node) {
  MUSTER_RETURN_IF_ERROR(CheckEngineHas(plan));
  const ShardingSettings& from = plan.sharding;
  EngineSettings result{.sharding = {}, .notes = plan.notes};
  ShardingOptions& to = result.sharding;
  switch (from.strategy) {
    case ShardingSettings::Strategy::kNone:
      break;
    case ShardingSettings::Strategy::kOptimizer:
      to.strategy = ShardingStrategy::kOptimizer;
      break;
    case ShardingSettings::Strategy::kGradients:
    case ShardingSettings::Strategy::kHybridGradients:
      to.strategy = ShardingStrategy::kGradients;
      break;
    case ShardingSettings::Strategy::kFull:
    case ShardingSettings::Strategy::kHybrid:
      to.strategy = ShardingStrategy::kFull;
      break;
  }
  if (from.strategy == ShardingSettings::Strategy::kHybrid ||
      from.strategy == ShardingSettings::Strategy::kHybridGradients) {
    to.group_size = ranks_per_node;
  }
  to.reshard_after_forward = from.reshard_after_forward;
  to.overlap = from.overlap;
  to.offload_optimizer = OffloadOf(from.offload_optimizer);
  to.offload_optimizer_path = from.offload_optimizer_path;
  to.offload_parameters = OffloadOf(from.offload_parameters);
  to.offload_parameters_path = from.offload_parameters_path;
  if (to.offload_parameters != Offload::kNone && to.strategy != ShardingStrategy::kFull) {
    to.offload_parameters = Offload::kNone;
    result.notes.push_back(
        "Parameters are not offloaded: this strategy keeps them whole. FULL_SHARD (stage 3) "
        "offloads them.");
  }
  to.ignored_modules = from.ignored_modules.value_or("");
  // Without types the entries of module lists are units: nothing but memory depends on it.
  if (from.wrap == ShardingSettings::Wrap::kTypes) to.unit_types = from.wrap_types;
  if (from.wrap == ShardingSettings::Wrap::kSize) to.min_unit_parameters = from.min_parameters;
  MUSTER_ASSIGN_OR_RETURN(to.parameter_dtype, DtypeOf(from.parameter_dtype, "parameters"));
  MUSTER_ASSIGN_OR_RETURN(to.reduce_dtype, DtypeOf(from.reduce_dtype, "reductions"));
  if (!from.full_state_dict) {
    result.notes.push_back(
        "Checkpoints hold whole tensors, divided among files of all processes, "
        "whatever the state dict type.");
  }
  return result;
}

bool IsOn(const std::map<std::string, std::string>& variables, const std::string& name) {
  const auto it = variables.find(name);
  return it != variables.end() && it->second == "true";
}

}  // namespace

absl::StatusOr<EngineSettings> ReadEngineSettings(
    const std::map<std::string, std::string>& variables, const std::string& mixed_precision,
    int64_t gradient_accumulation_steps, int64_t num_processes, int64_t ranks_per_node) {
  ShardingPlan plan;
  if (IsOn(variables, "ACCELERATE_USE_FSDP")) {
    MUSTER_ASSIGN_OR_RETURN(const client::FsdpSettings settings,
                            client::ResolveFsdp(nullptr, variables, mixed_precision));
    MUSTER_ASSIGN_OR_RETURN(plan, client::MapFsdp(settings));
  } else {
    MUSTER_ASSIGN_OR_RETURN(const client::DeepSpeedConfig config,
                            client::DeepSpeedConfig::Resolve(
                                nullptr, nullptr, variables,
                                {.mixed_precision = mixed_precision,
                                 .gradient_accumulation_steps = gradient_accumulation_steps,
                                 .num_processes = num_processes,
                                 .split_batches = false}));
    MUSTER_ASSIGN_OR_RETURN(plan, client::MapDeepSpeed(config.config()));
  }
  return ToOptions(plan, ranks_per_node);
}

}  // namespace muster::internal
