#include "muster/internal/engine_settings.h"

#include <algorithm>
#include <cmath>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"
#include "client/config/deepspeed_plan.h"
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

GradScalerOptions ScalerOf(const client::PlannedLossScale& scale) {
  GradScalerOptions options;
  options.dynamic = scale.fixed == 0;
  options.init_scale =
      options.dynamic ? std::ldexp(1.0, static_cast<int>(scale.initial_power)) : scale.fixed;
  options.growth_interval = scale.window;
  options.hysteresis = scale.hysteresis;
  if (options.dynamic) options.min_scale = std::min(scale.minimum, options.init_scale);
  return options;
}

absl::StatusOr<std::optional<c10::ScalarType>> DtypeOf(const std::optional<std::string>& name,
                                                       absl::string_view what) {
  if (!name.has_value()) return std::nullopt;
  if (*name == "float32") return c10::ScalarType::Float;
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
  const ShardingSettings& from = plan.sharding;
  EngineSettings result;
  result.notes = plan.notes;
  result.activation_checkpointing = from.activation_checkpointing;
  result.activation_offload = from.activation_offload;
  result.gradient_clipping = plan.gradient_clipping;
  result.configured.optimizer = plan.optimizer;
  result.configured.scheduler = plan.scheduler;
  if (plan.loss_scale.has_value()) result.grad_scaler = ScalerOf(*plan.loss_scale);
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
  // If parameters are offloaded, their gradients are, too.
  if (to.offload_optimizer != Offload::kNone && to.offload_parameters == Offload::kNone) {
    if (to.strategy != ShardingStrategy::kNone) {
      to.offload_gradients = to.offload_optimizer;
      to.offload_gradients_path = to.offload_optimizer_path;
    } else {
      result.notes.push_back(
          "Of what the optimizer needs its states are offloaded, and gradients stay on the device: "
          "this strategy keeps them whole. SHARD_GRAD_OP and FULL_SHARD (stages 2 and 3) offload "
          "them.");
    }
  }
  to.no_split = from.no_split;
  to.ignored_modules = from.ignored_modules.value_or("");
  if (from.wrap == ShardingSettings::Wrap::kTypes) to.unit_types = from.wrap_types;
  if (from.wrap == ShardingSettings::Wrap::kSize) to.min_unit_parameters = from.min_parameters;
  MUSTER_ASSIGN_OR_RETURN(to.parameter_dtype, DtypeOf(from.parameter_dtype, "parameters"));
  MUSTER_ASSIGN_OR_RETURN(to.reduce_dtype, DtypeOf(from.reduce_dtype, "reductions"));
  // fp32 is the same as no value. The type of reductions matters for models in bf16 or fp16.
  if (to.parameter_dtype == c10::ScalarType::Float) to.parameter_dtype.reset();
  MUSTER_ASSIGN_OR_RETURN(to.output_dtype, DtypeOf(from.output_dtype, "outputs"));
  MUSTER_ASSIGN_OR_RETURN(to.buffer_dtype, DtypeOf(from.buffer_dtype, "buffers"));
  if (plan.micro_batch_size.has_value() || plan.train_batch_size.has_value()) {
    result.notes.push_back(
        "Batches are as large as those of the loaders that the program prepares, whatever "
        "train_micro_batch_size_per_gpu and train_batch_size.");
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
  std::set<std::string> autos;
  if (IsOn(variables, "ACCELERATE_USE_FSDP")) {
    MUSTER_ASSIGN_OR_RETURN(const client::FsdpSettings settings,
                            client::ResolveFsdp(nullptr, variables, mixed_precision));
    MUSTER_ASSIGN_OR_RETURN(plan, client::MapFsdp(settings));
  } else {
    MUSTER_ASSIGN_OR_RETURN(client::DeepSpeedPlan planned,
                            client::PlanDeepSpeed(variables, {.mixed_precision = mixed_precision,
                                                              .gradient_accumulation_steps =
                                                                  gradient_accumulation_steps,
                                                              .num_processes = num_processes,
                                                              .split_batches = false}));
    plan = std::move(planned.plan);
    autos = std::move(planned.autos);
  }
  MUSTER_ASSIGN_OR_RETURN(EngineSettings result, ToOptions(plan, ranks_per_node));
  result.configured.autos = std::move(autos);
  return result;
}

}  // namespace muster::internal
