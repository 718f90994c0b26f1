#include "client/config/sharding_settings.h"

#include <algorithm>
#include <cmath>
#include <utility>

#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/status_macros.h"
#include "base/suggest.h"

namespace muster::client {
namespace {

using Json = nlohmann::json;
using Strategy = ShardingSettings::Strategy;
using Offload = ShardingSettings::Offload;
using Use = SettingUse::Use;

std::string Shown(const Json& value) {
  return value.dump(-1, ' ', false, Json::error_handler_t::replace).substr(0, 200);
}

absl::Status Wrong(absl::string_view key, const Json& value, absl::string_view must) {
  return absl::InvalidArgumentError(absl::StrCat(key, " must be ", must, ", not ", Shown(value)));
}

absl::Status Refused(absl::string_view key, const Json& value, absl::string_view instead) {
  return absl::UnimplementedError(
      absl::StrCat(key, ": ", Shown(value), " cannot be honoured; ", instead));
}

// Whether a setting that is refused requests nothing.
bool IsOff(const Json& value, const Json& off) {
  // For a setting that is on by default, false is a request.
  if (off == true) return value.is_null() || value == true;
  if (value.is_null() || value == false || (!off.is_null() && value == off)) return true;
  if (value.is_array()) return value.empty();
  return value.is_object() && (value.empty() || value.value("enabled", Json(true)) == false);
}

constexpr char kUnitsOfLists[] =
    "the units are the entries of the model's lists of modules, which needs less memory than one "
    "unit and gives the same numbers";

// Maps one DeepSpeed config.
class DeepSpeedMapper {
 public:
  explicit DeepSpeedMapper(const Json& config) : config_(config) {}

  absl::StatusOr<ShardingPlan> Map() {
    if (!config_.is_object()) return Wrong("a DeepSpeed config", config_, "an object");
    MUSTER_RETURN_IF_ERROR(CheckKeys(config_, ""));
    MUSTER_RETURN_IF_ERROR(Zero());
    MUSTER_RETURN_IF_ERROR(Precision());
    MUSTER_RETURN_IF_ERROR(Steps());
    MUSTER_RETURN_IF_ERROR(Optimizer());
    MUSTER_RETURN_IF_ERROR(Scheduler());
    return std::move(plan_);
  }

 private:
  absl::Status CheckKeys(const Json& section, const std::string& prefix) {
    for (const auto& [name, value] : section.items()) {
      const std::string key = prefix + name;
      const auto& uses = DeepSpeedUses();
      const auto use = std::find_if(uses.begin(), uses.end(),
                                    [&](const SettingUse& known) { return known.key == key; });
      if (use == uses.end()) {
        std::vector<std::string> known;
        for (const SettingUse& other : uses) {
          const bool here = other.key.compare(0, prefix.size(), prefix) == 0 &&
                            other.key.find('.', prefix.size()) == std::string::npos;
          if (here) known.push_back(other.key.substr(prefix.size()));
        }
        return absl::InvalidArgumentError(absl::StrCat(
            "unknown key ", key, " in the DeepSpeed config", DidYouMean(name, known, prefix)));
      }
      switch (use->use) {
        case Use::kSection:
          if (value.is_null()) break;
          if (!value.is_object()) return Wrong(key, value, "an object");
          MUSTER_RETURN_IF_ERROR(CheckKeys(value, key + "."));
          break;
        case Use::kMapped:
          break;
        case Use::kNoEffect:
          // Accelerate writes it into every config.
          if (key == "steps_per_print" && value == "inf") break;
          if (absl::EndsWith(key, "_weights_on_model_save") && value == false) break;
          plan_.notes.push_back(absl::StrCat(key, " has no effect: ", use->text));
          break;
        case Use::kRefused:
          if (!IsOff(value, use->off)) return Refused(key, value, use->text);
      }
    }
    return absl::OkStatus();
  }

  // Returns the value at a dotted key; null if there is none.
  Json At(const std::string& key) const {
    const Json* node = &config_;
    size_t from = 0;
    while (true) {
      const size_t dot = key.find('.', from);
      if (!node->is_object()) return Json();
      const auto at = node->find(key.substr(from, dot - from));
      if (at == node->end()) return Json();
      node = &*at;
      if (dot == std::string::npos) return *node;
      from = dot + 1;
    }
  }

  template <class T>
  absl::Status Number(const std::string& key, double least, std::optional<T>& number) const {
    const Json value = At(key);
    if (value.is_null()) return absl::OkStatus();
    // 1e3 is a whole number, too.
    const bool whole = std::is_integral_v<T>;
    const double size = value.is_number() ? value.get<double>() : -1;
    if (!(size >= least && size < 9e18) || (whole && size != std::floor(size))) {
      return Wrong(key, value,
                   absl::StrCat(whole ? "a whole number" : "a number", " of at least ", least));
    }
    number = value.get<T>();
    return absl::OkStatus();
  }

  absl::StatusOr<bool> Flag(const std::string& key, bool otherwise) const {
    const Json value = At(key);
    if (value.is_null()) return otherwise;
    if (!value.is_boolean()) return Wrong(key, value, "true or false");
    return value.get<bool>();
  }

  absl::Status Zero() {
    if (const auto zero = config_.find("zero_optimization");
        zero != config_.end() && zero->is_null()) {
      return Wrong("zero_optimization", *zero, "an object with its stage");
    }
    const Json stage = At("zero_optimization.stage");
    auto& sharding = plan_.sharding;
    if (stage.is_null() || stage == 0) {
      sharding.strategy = Strategy::kNone;
    } else if (stage == 1) {
      sharding.strategy = Strategy::kOptimizer;
    } else if (stage == 2) {
      sharding.strategy = Strategy::kGradients;
    } else if (stage == 3) {
      sharding.strategy = Strategy::kFull;
    } else {
      return Wrong("zero_optimization.stage", stage, "0, 1, 2 or 3");
    }
    // Stages 1 and 2 keep parameters whole.
    sharding.reshard_after_forward = sharding.strategy == Strategy::kFull;
    MUSTER_ASSIGN_OR_RETURN(sharding.overlap, Flag("zero_optimization.overlap_comm", false));
    MUSTER_RETURN_IF_ERROR(OffloadOf("offload_optimizer", Strategy::kOptimizer,
                                     sharding.offload_optimizer, sharding.offload_optimizer_path));
    MUSTER_RETURN_IF_ERROR(OffloadOf("offload_param", Strategy::kFull, sharding.offload_parameters,
                                     sharding.offload_parameters_path));
    return absl::OkStatus();
  }

  absl::Status OffloadOf(const std::string& section, Strategy least, Offload& offload,
                         std::string& path) {
    const std::string prefix = absl::StrCat("zero_optimization.", section, ".");
    const Json device = At(prefix + "device");
    if (device.is_null() || device == "none") return absl::OkStatus();
    if (device != "cpu" && device != "nvme") {
      return Wrong(prefix + "device", device, "none, cpu or nvme");
    }
    if (plan_.sharding.strategy < least) {
      return Refused(prefix + "device", device,
                     least == Strategy::kFull ? "it needs zero_optimization.stage 3"
                                              : "it needs zero_optimization.stage 1, 2 or 3");
    }
    offload = device == "cpu" ? Offload::kCpu : Offload::kDisk;
    if (offload == Offload::kCpu) return absl::OkStatus();
    const Json folder = At(prefix + "nvme_path");
    if (!folder.is_string() || folder == "" || folder == "none") {
      return Wrong(prefix + "nvme_path", folder, "a folder, since the device is nvme");
    }
    path = folder.get<std::string>();
    return absl::OkStatus();
  }

  absl::Status Precision() {
    MUSTER_ASSIGN_OR_RETURN(const bool fp16, Flag("fp16.enabled", false));
    MUSTER_ASSIGN_OR_RETURN(const bool bf16, Flag("bf16.enabled", false));
    if (fp16 && bf16) {
      return absl::InvalidArgumentError("fp16.enabled and bf16.enabled are both true: choose one");
    }
    auto& sharding = plan_.sharding;
    if (fp16 || bf16) {
      plan_.mixed_precision = fp16 ? "fp16" : "bf16";
      sharding.parameter_dtype = fp16 ? "float16" : "bfloat16";
      sharding.reduce_dtype = sharding.parameter_dtype;
      // There the whole model computes in this type, without autocast, so it also returns it.
      sharding.output_dtype = sharding.parameter_dtype;
    }
    // There it is on unless the config says otherwise.
    if (bf16 && At("bf16.check_grad_overflow") != false) {
      plan_.notes.push_back(
          "bf16.check_grad_overflow has no effect: a step in bf16 is taken also with gradients "
          "that "
          "are not finite");
    }
    MUSTER_RETURN_IF_ERROR(DataTypes());
    if (fp16) {
      PlannedLossScale scale;
      const auto read = [&](const char* key, double least, auto& target) -> absl::Status {
        std::optional<std::decay_t<decltype(target)>> number;
        MUSTER_RETURN_IF_ERROR(Number(key, least, number));
        target = number.value_or(target);
        return absl::OkStatus();
      };
      MUSTER_RETURN_IF_ERROR(read("fp16.loss_scale", 0, scale.fixed));
      MUSTER_RETURN_IF_ERROR(read("fp16.initial_scale_power", 0, scale.initial_power));
      MUSTER_RETURN_IF_ERROR(read("fp16.loss_scale_window", 1, scale.window));
      MUSTER_RETURN_IF_ERROR(read("fp16.hysteresis", 1, scale.hysteresis));
      MUSTER_RETURN_IF_ERROR(read("fp16.min_loss_scale", 0, scale.minimum));
      plan_.loss_scale = scale;
    }
    const Json reduce = At("communication_data_type");
    if (reduce.is_null()) return absl::OkStatus();
    if (reduce == "fp32") {
      sharding.reduce_dtype = "float32";
    } else if (reduce == "fp16") {
      sharding.reduce_dtype = "float16";
    } else if (reduce == "bf16" || reduce == "bfp16") {
      sharding.reduce_dtype = "bfloat16";
    } else {
      return Wrong("communication_data_type", reduce, "fp32, fp16 or bf16");
    }
    return absl::OkStatus();
  }

  // Reads the names of DeepSpeed's types: its own, torch's, and those of torch's Python.
  absl::StatusOr<std::optional<std::string>> Dtype(const std::string& key) const {
    const Json value = At(key);
    if (value.is_null()) return std::nullopt;
    for (const auto& [dtype, names] :
         {std::pair<const char*, std::vector<const char*>>{
              "float32", {"fp32", "float32", "float", "torch.float32"}},
          {"float16", {"fp16", "float16", "half", "torch.float16"}},
          {"bfloat16", {"bf16", "bfloat16", "torch.bfloat16"}}}) {
      for (const char* name : names) {
        if (value == name) return std::optional<std::string>(dtype);
      }
    }
    return Wrong(key, value, "fp32, fp16 or bf16");
  }

  absl::Status DataTypes() {
    auto& sharding = plan_.sharding;
    MUSTER_ASSIGN_OR_RETURN(sharding.buffer_dtype, Dtype("data_types.buffer_dtype"));
    MUSTER_ASSIGN_OR_RETURN(const auto parameters, Dtype("data_types.param_dtype"));
    if (parameters.has_value() && *parameters != sharding.parameter_dtype.value_or("float32")) {
      return Wrong("data_types.param_dtype", At("data_types.param_dtype"),
                   "that of fp16.enabled or bf16.enabled (fp32 with neither)");
    }
    return absl::OkStatus();
  }

  absl::Status Steps() {
    struct Whole {
      const char* key;
      std::optional<int64_t>* number;
    };
    for (const Whole& field :
         {Whole{"gradient_accumulation_steps", &plan_.gradient_accumulation_steps},
          Whole{"train_micro_batch_size_per_gpu", &plan_.micro_batch_size},
          Whole{"train_batch_size", &plan_.train_batch_size}}) {
      if (At(field.key) == "auto") continue;
      MUSTER_RETURN_IF_ERROR(Number(field.key, 1, *field.number));
    }
    // As text, because JSON has no infinity. No norm exceeds it.
    if (At("gradient_clipping") == "inf") return absl::OkStatus();
    MUSTER_RETURN_IF_ERROR(Number("gradient_clipping", 0, plan_.gradient_clipping));
    if (plan_.gradient_clipping == 0.0) plan_.gradient_clipping.reset();
    return absl::OkStatus();
  }

  absl::Status Optimizer() {
    const Json section = At("optimizer");
    if (section.is_null()) return absl::OkStatus();
    PlannedOptimizer optimizer;
    const Json type = At("optimizer.type");
    const std::string name = type.is_string() ? absl::AsciiStrToLower(type.get<std::string>()) : "";
    const bool adam = name == "adam" || name == "adamw";
    // DeepSpeed's Adam decouples the decay unless adam_w_mode is false.
    MUSTER_ASSIGN_OR_RETURN(const bool decoupled, Flag("optimizer.params.adam_w_mode", true));
    if (adam) {
      optimizer.type = name == "adamw" || decoupled ? "AdamW" : "Adam";
    } else if (name == "sgd" || name == "adagrad") {
      optimizer.type = name == "sgd" ? "SGD" : "Adagrad";
    } else {
      return Refused("optimizer.type", type, "set AdamW, Adam, SGD or Adagrad");
    }
    const Json betas = At("optimizer.params.betas");
    const auto is_beta = [](const Json& beta) { return beta.is_number() && beta >= 0 && beta < 1; };
    if (!betas.is_null()) {
      if (!betas.is_array() || betas.size() != 2 || !is_beta(betas[0]) || !is_beta(betas[1])) {
        return Wrong("optimizer.params.betas", betas, "two numbers from 0 to below 1");
      }
      optimizer.beta1 = betas[0].get<double>();
      optimizer.beta2 = betas[1].get<double>();
    }
    MUSTER_RETURN_IF_ERROR(Number("optimizer.params.lr", 0, optimizer.lr));
    MUSTER_RETURN_IF_ERROR(Number("optimizer.params.weight_decay", 0, optimizer.weight_decay));
    MUSTER_RETURN_IF_ERROR(Number("optimizer.params.eps", 0, optimizer.eps));
    MUSTER_RETURN_IF_ERROR(Number("optimizer.params.momentum", 0, optimizer.momentum));
    if (!At("optimizer.params.nesterov").is_null()) {
      MUSTER_ASSIGN_OR_RETURN(optimizer.nesterov, Flag("optimizer.params.nesterov", false));
    }
    // Each parameter belongs to an optimizer.
    for (const auto& [key, for_it] :
         {std::pair{"betas", adam}, std::pair{"adam_w_mode", adam}, std::pair{"eps", name != "sgd"},
          std::pair{"momentum", name == "sgd"}, std::pair{"nesterov", name == "sgd"}}) {
      const Json value = At(absl::StrCat("optimizer.params.", key));
      if (!for_it && !value.is_null()) {
        return Refused(absl::StrCat("optimizer.params.", key), value,
                       absl::StrCat(optimizer.type, " has no such parameter: remove it"));
      }
    }
    plan_.optimizer = optimizer;
    return absl::OkStatus();
  }

  absl::Status Scheduler() {
    if (At("scheduler").is_null()) return absl::OkStatus();
    PlannedScheduler scheduler;
    const Json type = At("scheduler.type");
    const std::vector<std::string> types = {"WarmupLR", "WarmupDecayLR", "WarmupCosineLR"};
    if (!type.is_string() || std::find(types.begin(), types.end(), type) == types.end()) {
      return Refused("scheduler.type", type,
                     absl::StrCat("set one of ", absl::StrJoin(types, ", "),
                                  ", or make the scheduler in the program"));
    }
    scheduler.type = type.get<std::string>();
    const Json shape = At("scheduler.params.warmup_type");
    if (!shape.is_null() && shape != "log" && shape != "linear") {
      return Wrong("scheduler.params.warmup_type", shape, "log or linear");
    }
    scheduler.logarithmic = shape.is_null() || shape == "log";
    MUSTER_RETURN_IF_ERROR(Number("scheduler.params.warmup_min_lr", 0, scheduler.min_lr));
    MUSTER_RETURN_IF_ERROR(Number("scheduler.params.warmup_max_lr", 0, scheduler.max_lr));
    MUSTER_RETURN_IF_ERROR(Number("scheduler.params.warmup_min_ratio", 0, scheduler.min_ratio));
    MUSTER_RETURN_IF_ERROR(Number("scheduler.params.cos_min_ratio", 0, scheduler.cosine_min_ratio));
    MUSTER_RETURN_IF_ERROR(Number("scheduler.params.warmup_num_steps", 1, scheduler.warmup_steps));
    MUSTER_RETURN_IF_ERROR(Number("scheduler.params.total_num_steps", 1, scheduler.total_steps));
    plan_.scheduler = scheduler;
    return absl::OkStatus();
  }

  const Json& config_;
  ShardingPlan plan_;
};

}  // namespace

absl::StatusOr<ShardingPlan> MapFsdp(const FsdpSettings& settings) {
  ShardingPlan plan;
  plan.notes = settings.notes;
  ShardingSettings& sharding = plan.sharding;
  if (settings.version == 1) {
    switch (settings.strategy.value_or(FsdpSettings::Strategy::kFullShard)) {
      case FsdpSettings::Strategy::kFullShard:
        sharding.strategy = Strategy::kFull;
        break;
      case FsdpSettings::Strategy::kShardGradOp:
        sharding.strategy = Strategy::kGradients;
        break;
      case FsdpSettings::Strategy::kNoShard:
        sharding.strategy = Strategy::kNone;
        break;
      case FsdpSettings::Strategy::kHybridShard:
        sharding.strategy = Strategy::kHybrid;
        break;
      case FsdpSettings::Strategy::kHybridShardZero2:
        sharding.strategy = Strategy::kHybridGradients;
        break;
    }
    sharding.reshard_after_forward =
        sharding.strategy == Strategy::kFull || sharding.strategy == Strategy::kHybrid;
  } else {
    // A misspelt word had a purpose, although nothing reads it.
    if (!settings.kept_strategy.is_null() && !settings.strategy.has_value()) {
      return Refused("sharding_strategy", settings.kept_strategy,
                     "remove it: in version 2 reshard_after_forward decides");
    }
    sharding.reshard_after_forward = settings.reshard_after_forward.value_or(true);
  }
  if (settings.state_dict == FsdpSettings::StateDict::kLocal) {
    return Refused("state_dict_type", "LOCAL_STATE_DICT", "set SHARDED_STATE_DICT");
  }
  switch (settings.wrap) {
    case FsdpSettings::Wrap::kNone:
      plan.notes.push_back(absl::StrCat("auto_wrap_policy NO_WRAP has no effect: ", kUnitsOfLists));
      break;
    case FsdpSettings::Wrap::kTransformer:
      sharding.wrap = ShardingSettings::Wrap::kTypes;
      sharding.wrap_types = settings.transformer_classes.value_or(std::vector<std::string>());
      for (const std::string& name : sharding.wrap_types) {
        if (name.empty()) {
          return Wrong("transformer_cls_names_to_wrap", Json(sharding.wrap_types),
                       "names of module types without an empty one");
        }
      }
      break;
    case FsdpSettings::Wrap::kSize:
      sharding.min_parameters = settings.min_num_params.value_or(0);
      if (sharding.min_parameters < 0) {
        return Wrong("min_num_params", sharding.min_parameters, "at least 0");
      }
      if (sharding.min_parameters > 0) {
        sharding.wrap = ShardingSettings::Wrap::kSize;
      } else {
        plan.notes.push_back(
            absl::StrCat("SIZE_BASED_WRAP with min_num_params 0 has no effect: ", kUnitsOfLists));
      }
  }
  if (settings.transformer_classes && settings.wrap != FsdpSettings::Wrap::kTransformer) {
    return Refused("transformer_cls_names_to_wrap", Json(*settings.transformer_classes),
                   "set auto_wrap_policy to TRANSFORMER_BASED_WRAP");
  }
  if (settings.min_num_params && settings.wrap != FsdpSettings::Wrap::kSize) {
    return Refused("min_num_params", *settings.min_num_params,
                   "set auto_wrap_policy to SIZE_BASED_WRAP");
  }
  // FSDP keeps gradients and the optimizer's states with the parameters.
  if (settings.cpu_offload) {
    sharding.offload_parameters = Offload::kCpu;
    sharding.offload_optimizer = Offload::kCpu;
  }
  if (settings.precision) {
    sharding.parameter_dtype = settings.precision->param;
    sharding.reduce_dtype = settings.precision->reduce;
    (settings.version == 1 ? sharding.buffer_dtype : sharding.output_dtype) =
        settings.precision->last;
    plan.mixed_precision = settings.precision->param == "float16"    ? "fp16"
                           : settings.precision->param == "bfloat16" ? "bf16"
                                                                     : "no";
  }
  sharding.activation_checkpointing = settings.activation_checkpointing;
  sharding.activation_offload = settings.activation_checkpointing_offload;
  sharding.ignored_modules = settings.ignored_modules;
  const auto note = [&](bool given, const char* key) {
    if (!given) return;
    for (const SettingUse& use : FsdpUses()) {
      if (use.key == key) plan.notes.push_back(absl::StrCat(key, " has no effect: ", use.text));
    }
  };
  note(settings.backward_prefetch.has_value(), "backward_prefetch");
  note(settings.forward_prefetch.value_or(false), "forward_prefetch");
  note(!settings.limit_all_gathers, "limit_all_gathers");
  note(settings.use_orig_params == false, "use_orig_params");
  note(true, "state_dict_type");
  note(settings.sync_module_states == false, "sync_module_states");
  note(settings.cpu_ram_efficient_loading, "cpu_ram_efficient_loading");
  return plan;
}

absl::StatusOr<ShardingPlan> MapDeepSpeed(const Json& config) {
  return DeepSpeedMapper(config).Map();
}

}  // namespace muster::client
