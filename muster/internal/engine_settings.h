#ifndef MUSTER_INTERNAL_ENGINE_SETTINGS_H_
#define MUSTER_INTERNAL_ENGINE_SETTINGS_H_

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "client/config/sharding_settings.h"
#include "worker/parallel/sharding_options.h"
#include "worker/train/options.h"

namespace muster::internal {

// The sections "optimizer" and "scheduler" of a DeepSpeed configuration, if it has them.
struct ConfiguredTraining {
  std::optional<client::PlannedOptimizer> optimizer;
  std::optional<client::PlannedScheduler> scheduler;
  // Dotted keys of them that are "auto".
  std::set<std::string> autos;
};

struct EngineSettings {
  ShardingOptions sharding;
  // Checkpoints the units of `sharding`; and keeps their inputs in the CPU's memory.
  bool activation_checkpointing = false;
  bool activation_offload = false;
  std::optional<double> gradient_clipping;
  std::optional<GradScalerOptions> grad_scaler;
  ConfiguredTraining configured;
  // The settings that have no effect, one sentence each, for the log.
  std::vector<std::string> notes;
};

// Returns what the variables of Accelerate's launcher for FSDP (ACCELERATE_USE_FSDP, FSDP_...) or
// DeepSpeed (ACCELERATE_USE_DEEPSPEED, ACCELERATE_DEEPSPEED_...) ask for. Pure, except that it
// reads the file that ACCELERATE_DEEPSPEED_CONFIG_FILE names. Errors: INVALID_ARGUMENT for an
// invalid value, UNIMPLEMENTED for a setting that cannot be honoured; they name it and what to set
// instead.
absl::StatusOr<EngineSettings> ReadEngineSettings(
    const std::map<std::string, std::string>& variables, const std::string& mixed_precision,
    int64_t gradient_accumulation_steps, int64_t num_processes, int64_t ranks_per_node);

}  // namespace muster::internal

#endif  // MUSTER_INTERNAL_ENGINE_SETTINGS_H_
