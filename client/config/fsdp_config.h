#ifndef MUSTER_CLIENT_CONFIG_FSDP_CONFIG_H_
#define MUSTER_CLIENT_CONFIG_FSDP_CONFIG_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::client {

// How FSDP gathers state dicts. `rank0_only` is for full ones.
struct FsdpStateDictConfig {
  bool offload_to_cpu = true;
  std::optional<bool> rank0_only;
};

// The values that Accelerate (release 1.15) derives from the settings of its FSDP plugin, before
// Muster maps them to its own sharding (sharding_settings.h). docs/sharding_config.md lists the
// differences. Pure.
struct FsdpSettings {
  // Torch's enumerations; kNone only if the settings allow it.
  enum class Strategy {
    kFullShard = 1,
    kShardGradOp,
    kNoShard,
    kHybridShard,
    kHybridShardZero2,
  };
  enum class Prefetch { kBackwardPre = 1, kBackwardPost };
  enum class StateDict { kFull = 1, kLocal, kSharded };
  enum class Wrap { kNone, kTransformer, kSize };
  // Names of torch's dtypes: "float16", "bfloat16", "float32". `last` is for buffers in version 1
  // and for outputs in version 2.
  struct Precision {
    std::string param;
    std::string reduce;
    std::string last;
  };

  int version = 1;
  // For version 1. In version 2 an argument is kept here, too, but has no effect.
  std::optional<Strategy> strategy;
  // The argument `sharding_strategy` if Accelerate keeps it unchanged: a number in version 1,
  // anything in version 2, even what is no strategy. Null: not given.
  nlohmann::json kept_strategy = nullptr;
  std::optional<bool> reshard_after_forward;  // version 2
  std::optional<Prefetch> backward_prefetch;  // version 1
  Wrap wrap = Wrap::kNone;
  std::optional<std::vector<std::string>> transformer_classes;
  // The argument was a single text, without the policy for which it is meant; Accelerate does not
  // split it: it is the only entry of `transformer_classes`.
  bool classes_are_one_text = false;
  std::optional<int64_t> min_num_params;
  bool cpu_offload = false;
  std::optional<Precision> precision;
  StateDict state_dict = StateDict::kFull;
  std::optional<FsdpStateDictConfig> state_dict_config;  // nullopt for local ones
  bool limit_all_gathers = true;
  std::optional<bool> use_orig_params;     // version 1
  std::optional<bool> sync_module_states;  // version 1
  std::optional<bool> forward_prefetch;    // version 1
  bool activation_checkpointing = false;
  bool activation_checkpointing_offload = false;
  bool cpu_ram_efficient_loading = false;
  std::optional<std::string> ignored_modules;
  // What was corrected or has no effect, a sentence each, for the log.
  std::vector<std::string> notes;
};

// `arguments`: those of the plugin by name; null means not given. They win over `variables`
// (FSDP_...), and those over defaults. `mixed_precision`: "no", "fp16", "bf16" or "fp8", the
// Accelerator's. Errors: INVALID_ARGUMENT that names the argument or variable and its value.
absl::StatusOr<FsdpSettings> ResolveFsdp(const nlohmann::json& arguments,
                                         const std::map<std::string, std::string>& variables,
                                         absl::string_view mixed_precision);

// Sets another state dict type, with the configuration that belongs to it.
absl::Status SetStateDictType(absl::string_view type, FsdpSettings& settings);

// The fields under Accelerate's names.
nlohmann::json FsdpFields(const FsdpSettings& settings);

// The names of the plugin's arguments, and of the variables that ResolveFsdp reads.
const std::vector<std::string>& FsdpArgumentNames();
const std::vector<std::string>& FsdpVariableNames();

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_FSDP_CONFIG_H_
