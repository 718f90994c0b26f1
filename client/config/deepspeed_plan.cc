#include "client/config/deepspeed_plan.h"

#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/bool_word.h"
#include "base/status_macros.h"
#include "client/config/python_values.h"

namespace muster::client {
namespace {

// Removes from `config` the values that are "auto" and that Accelerate fills in from the program's
// placeholders.
std::set<std::string> TakeAutos(nlohmann::json* config) {
  std::set<std::string> autos;
  for (const auto& [section, names] :
       {std::pair<const char*, std::vector<const char*>>{"optimizer", {"lr", "weight_decay"}},
        {"scheduler", {"warmup_min_lr", "warmup_max_lr", "warmup_num_steps", "total_num_steps"}}}) {
    const auto found = config->find(section);
    if (found == config->end() || !found->is_object()) continue;
    const auto params = found->find("params");
    if (params == found->end() || !params->is_object()) continue;
    for (const char* name : names) {
      const auto value = params->find(name);
      if (value == params->end() || *value != "auto") continue;
      autos.insert(absl::StrCat(section, ".params.", name));
      params->erase(value);
    }
  }
  return autos;
}

// Refuses settings of the launcher, which fill in "auto" of a file, if the file has other values:
// only those of the file count.
absl::Status CheckFlags(const std::map<std::string, std::string>& variables,
                        const nlohmann::json& config) {
  struct Rival {
    const char* variable;
    const char* flag;
    const char* pointer;
  };
  for (const Rival& rival :
       {Rival{"ACCELERATE_DEEPSPEED_ZERO_STAGE", "zero_stage", "/zero_optimization/stage"},
        Rival{"ACCELERATE_GRADIENT_CLIPPING", "gradient_clipping", "/gradient_clipping"},
        Rival{"ACCELERATE_DEEPSPEED_OFFLOAD_OPTIMIZER_DEVICE", "offload_optimizer_device",
              "/zero_optimization/offload_optimizer/device"},
        Rival{"ACCELERATE_DEEPSPEED_OFFLOAD_PARAM_DEVICE", "offload_param_device",
              "/zero_optimization/offload_param/device"}}) {
    const auto given = variables.find(rival.variable);
    if (given == variables.end() || given->second == "auto") continue;
    const std::optional<double> number = ParsePythonFloat(given->second);
    nlohmann::json said =
        config.value(nlohmann::json::json_pointer(rival.pointer), nlohmann::json());
    if (said == "auto") continue;
    if (said.is_null()) said = number.has_value() ? nlohmann::json(0) : nlohmann::json("none");
    if (number.has_value() ? said == *number : said == given->second) continue;
    return absl::InvalidArgumentError(absl::StrCat(
        "the DeepSpeed config has ", said.dump(), " as ",
        absl::string_view(rival.pointer).substr(1), ", and --", rival.flag, " (", rival.variable,
        ") is ", given->second, ": leave that out, or write it or \"auto\" into the config"));
  }
  return absl::OkStatus();
}

// Refuses settings of the loop in a DeepSpeed config that the process has with other values.
absl::Status CheckAgrees(const std::map<std::string, std::string>& variables,
                         const ShardingPlan& plan, const DeepSpeedContext& process) {
  const auto file = variables.find("ACCELERATE_DEEPSPEED_CONFIG_FILE");
  if (file == variables.end() || file->second == "none") return absl::OkStatus();
  if (plan.mixed_precision != process.mixed_precision) {
    return absl::InvalidArgumentError(
        absl::StrCat("the DeepSpeed config asks for mixed precision ", plan.mixed_precision,
                     " (fp16.enabled, bf16.enabled), and the process has ", process.mixed_precision,
                     ": set --mixed_precision ", plan.mixed_precision,
                     " or options.mixed_precision, or \"auto\" in the config"));
  }
  // "auto", and missing values, have been filled in from elsewhere.
  MUSTER_ASSIGN_OR_RETURN(const nlohmann::json config, ReadDeepSpeedConfig(file->second));
  MUSTER_RETURN_IF_ERROR(CheckFlags(variables, config));
  const auto steps = config.find("gradient_accumulation_steps");
  if (steps == config.end() || !steps->is_number() ||
      *steps == process.gradient_accumulation_steps) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrCat("the DeepSpeed config has gradient_accumulation_steps ", steps->dump(),
                   ", and the process has ", process.gradient_accumulation_steps,
                   ": set --gradient_accumulation_steps ", steps->dump(),
                   " or options.gradient_accumulation_steps, or \"auto\" in the config"));
}

}  // namespace

absl::StatusOr<DeepSpeedPlan> PlanDeepSpeed(const std::map<std::string, std::string>& variables,
                                            const DeepSpeedContext& process) {
  MUSTER_ASSIGN_OR_RETURN(DeepSpeedConfig config,
                          DeepSpeedConfig::Resolve(nullptr, nullptr, variables, process));
  config.SettleClipping();
  nlohmann::json settings = config.config();
  DeepSpeedPlan planned;
  planned.autos = TakeAutos(&settings);
  MUSTER_ASSIGN_OR_RETURN(planned.plan, MapDeepSpeed(settings));
  MUSTER_RETURN_IF_ERROR(CheckAgrees(variables, planned.plan, process));
  const auto init = variables.find("ACCELERATE_DEEPSPEED_ZERO3_INIT");
  if (init != variables.end() && ParseBoolWord(init->second).value_or(false) &&
      planned.plan.sharding.strategy == ShardingSettings::Strategy::kFull) {
    planned.plan.notes.push_back(
        "zero3_init_flag has no effect: a program that makes its model by muster::deferred_init() "
        "holds it on no process as a whole");
  }
  // DeepSpeed's leaf modules: all experts of one are gathered together, whichever are used.
  const auto experts = variables.find("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES");
  if (experts != variables.end()) {
    for (absl::string_view name : absl::StrSplit(experts->second, ',', absl::SkipWhitespace())) {
      planned.plan.sharding.no_split.emplace_back(absl::StripAsciiWhitespace(name));
    }
  }
  return planned;
}

}  // namespace muster::client
