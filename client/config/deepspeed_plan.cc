#include "client/config/deepspeed_plan.h"

#include <nlohmann/json.hpp>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "base/status_macros.h"

namespace muster::client {
namespace {

// Takes out of `config` what Accelerate fills from the program's placeholders where it is "auto".
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

// What the file of a DeepSpeed config says about the loop, and the process has in another place.
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
  // "auto", and a file that says nothing, have been filled in from elsewhere.
  MUSTER_ASSIGN_OR_RETURN(const nlohmann::json config, ReadDeepSpeedConfig(file->second));
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
  // DeepSpeed's leaf modules: the experts of each are gathered together, whichever are used.
  const auto experts = variables.find("ACCELERATE_DEEPSPEED_MOE_LAYER_CLS_NAMES");
  if (experts != variables.end()) {
    for (absl::string_view name : absl::StrSplit(experts->second, ',', absl::SkipWhitespace())) {
      planned.plan.sharding.no_split.emplace_back(absl::StripAsciiWhitespace(name));
    }
  }
  return planned;
}

}  // namespace muster::client
