#include "muster/internal/engine_settings.h"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <optional>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
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

// The shortest text that is read as `value` again.
std::string Number(double value) {
  std::array<char, 32> text;
  const std::to_chars_result end =
      std::to_chars(text.data(), text.data() + text.size(), value, std::chars_format::general);
  return std::string(text.data(), end.ptr);
}

// A line of C++ that makes the optimizer of the section "optimizer". The fields are in the order in
// which the options declare them: anything else does not compile.
std::string LineOf(const client::PlannedOptimizer& optimizer) {
  std::vector<std::string> fields;
  const auto add = [&](absl::string_view name, const std::optional<double>& value) {
    if (value.has_value()) fields.push_back(absl::StrCat(".", name, " = ", Number(*value)));
  };
  const bool adagrad = optimizer.type == "Adagrad";
  add("lr", optimizer.lr);
  add("momentum", optimizer.momentum);
  if (optimizer.beta1.has_value() && optimizer.beta2.has_value()) {
    fields.push_back(
        absl::StrCat(".betas = {", Number(*optimizer.beta1), ", ", Number(*optimizer.beta2), "}"));
  }
  if (!adagrad) add("eps", optimizer.eps);
  // DeepSpeed's default is 0 for every type, and AdamW's here is not.
  add("weight_decay", optimizer.weight_decay.value_or(0));
  if (adagrad) add("eps", optimizer.eps);
  if (optimizer.nesterov.value_or(false)) fields.push_back(".nesterov = true");
  return absl::StrCat("muster::Fused", optimizer.type, " optimizer(net->parameters(), {",
                      absl::StrJoin(fields, ", "), "});");
}

// One that makes the schedule of the section "scheduler", or what comes nearest, and what else it
// takes.
std::string LineOf(const client::PlannedScheduler& scheduler) {
  const std::string warmup =
      scheduler.warmup_steps.has_value() ? absl::StrCat(*scheduler.warmup_steps) : "WARMUP";
  const std::string total =
      scheduler.total_steps.has_value() ? absl::StrCat(*scheduler.total_steps) : "TOTAL";
  const bool cosine = scheduler.type == "WarmupCosineLR";
  std::string line;
  if (scheduler.type == "WarmupLR") {
    line = absl::StrCat("muster::ConstantWithWarmup(", warmup, ")");
  } else if (cosine) {
    line = absl::StrCat("muster::CosineWithWarmup(", warmup, ", ", total, ")");
  } else {
    line = absl::StrCat("muster::LinearWithWarmup(", warmup, ", ", total, ")");
  }
  std::vector<std::string> differences;
  if (!cosine) {
    differences.push_back(
        absl::StrCat("give the optimizer .lr = ", Number(scheduler.max_lr.value_or(1e-3)),
                     ": DeepSpeed's schedule puts warmup_max_lr in place of the optimizer's rate"));
  }
  const std::optional<double>& start = cosine ? scheduler.min_ratio : scheduler.min_lr;
  differences.push_back(absl::StrCat(
      "its warm-up is a line from 0, DeepSpeed's a ", scheduler.logarithmic ? "logarithm" : "line",
      " from ", cosine ? "warmup_min_ratio" : "warmup_min_lr", " = ", Number(start.value_or(0))));
  if (cosine) {
    differences.push_back(absl::StrCat("it ends at 0, DeepSpeed's at cos_min_ratio = ",
                                       Number(scheduler.cosine_min_ratio.value_or(1e-4))));
  }
  return absl::StrCat(line, " (", absl::StrJoin(differences, "; "), ")");
}

// Those who set them in a config file must learn that nothing of it would happen.
absl::Status CheckEngineHas(const ShardingPlan& plan) {
  if (plan.optimizer.has_value()) {
    return Refused("an optimizer (the section \"optimizer\" of a DeepSpeed config)",
                   absl::StrCat("remove the section, and prepare() in the program: ",
                                LineOf(*plan.optimizer)));
  }
  if (plan.scheduler.has_value()) {
    return Refused("a learning-rate schedule (the section \"scheduler\" of a DeepSpeed config)",
                   absl::StrCat("remove the section, and prepare() with the optimizer: ",
                                LineOf(*plan.scheduler)));
  }
  return absl::OkStatus();
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
  EngineSettings result;
  result.notes = plan.notes;
  result.activation_checkpointing = from.activation_checkpointing;
  result.activation_offload = from.activation_offload;
  result.gradient_clipping = plan.gradient_clipping;
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
