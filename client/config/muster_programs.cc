#include "client/config/muster_programs.h"

#include <algorithm>
#include <map>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/bool_word.h"
#include "client/config/deepspeed_plan.h"
#include "client/config/fsdp_config.h"
#include "client/config/sharding_settings.h"

namespace muster::client {
namespace {

using Variables = std::map<std::string, std::string>;

bool IsOn(const Variables& variables, const char* name) {
  const auto it = variables.find(name);
  return it != variables.end() && ParseBoolWord(it->second).value_or(false);
}

absl::Status CheckFsdp(const LaunchConfig& config) {
  const auto settings = ResolveFsdp(nullptr, config.env, config.mixed_precision);
  return settings.ok() ? MapFsdp(*settings).status() : settings.status();
}

absl::Status CheckDeepSpeed(const LaunchConfig& config) {
  return PlanDeepSpeed(config.env, {.mixed_precision = config.mixed_precision,
                                    .gradient_accumulation_steps =
                                        std::max(1, config.gradient_accumulation_steps),
                                    .num_processes = config.num_processes,
                                    .split_batches = false})
      .status();
}

}  // namespace

MusterProgramNotes NotesForMusterPrograms(const LaunchConfig& config) {
  MusterProgramNotes notes;
  // The same as in worker/job/environment.cc.
  for (const auto& [name, what] :
       {std::pair<const char*, const char*>{"ACCELERATE_USE_MEGATRON_LM", "Megatron-LM"},
        {"ACCELERATE_USE_PARALLELISM_CONFIG",
         "parallelism_config (tensor, context and sequence parallelism)"}}) {
    if (!IsOn(config.env, name)) continue;
    notes.refused.push_back(absl::StrCat(what, ", which they do not have: leave the section out, ",
                                         "or shard them with sharding: zero3"));
  }
  absl::Status engine;
  if (IsOn(config.env, "ACCELERATE_USE_FSDP")) engine = CheckFsdp(config);
  if (IsOn(config.env, "ACCELERATE_USE_DEEPSPEED")) engine = CheckDeepSpeed(config);
  if (!engine.ok()) notes.refused.emplace_back(engine.message());
  const auto dynamo = config.env.find("ACCELERATE_DYNAMO_BACKEND");
  if (dynamo != config.env.end() && dynamo->second != "NO" && !dynamo->second.empty()) {
    notes.no_effect.push_back("dynamo_config: there is no Python code to compile");
  }
  if (IsOn(config.env, "ACCELERATE_CPU_AFFINITY")) {
    notes.no_effect.push_back("enable_cpu_affinity: bind the processes with numactl or taskset");
  }
  return notes;
}

}  // namespace muster::client
