#ifndef MUSTER_CLIENT_CONFIG_DEEPSPEED_CONFIG_H_
#define MUSTER_CLIENT_CONFIG_DEEPSPEED_CONFIG_H_

#include <cstdint>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::client {

// A DeepSpeed config and the fields of Accelerate's DeepSpeed plugin (release 1.15), each filled in
// from the other: an explicit argument wins over the environment, that over the default, a value in
// the config over all of them, and "auto" in the config is filled in from them.
// docs/sharding_config.md lists the differences.

// Reads the text of ACCELERATE_DEEPSPEED_CONFIG_FILE: a path, JSON, or JSON in URL-safe base64.
// Errors: INVALID_ARGUMENT.
absl::StatusOr<nlohmann::json> ReadDeepSpeedConfig(absl::string_view text);

// What the Accelerator contributes.
struct DeepSpeedContext {
  std::string mixed_precision = "no";
  int64_t gradient_accumulation_steps = 1;
  int64_t num_processes = 1;
  bool split_batches = false;
};

// The objects that are prepared.
struct DeepSpeedModel {
  // Attributes of the model's config: the size, or the largest of several.
  std::optional<int64_t> hidden_size;
  bool has_config = true;
};

struct DeepSpeedOptimizer {
  bool placeholder = false;
  double lr = 1e-3;
  double weight_decay = 0;
};

struct DeepSpeedScheduler {
  bool placeholder = false;
  bool with_callable = false;  // a placeholder with a function that makes the scheduler
  std::optional<int64_t> total_num_steps;
  int64_t warmup_num_steps = 0;
};

struct DeepSpeedObjects {
  std::optional<DeepSpeedModel> model;
  std::optional<DeepSpeedOptimizer> optimizer;
  std::optional<DeepSpeedScheduler> scheduler;
  std::vector<std::optional<int64_t>> batch_sizes;  // of the loaders; nullopt: it has none
};

struct DeepSpeedBatchSizes {
  int64_t train = 0;
  int64_t micro = 0;
  int64_t accumulation = 0;
};

class DeepSpeedConfig {
 public:
  // `config`: null if there is none; then ACCELERATE_DEEPSPEED_CONFIG_FILE of `variables` is read.
  // `arguments`: those of the plugin by name; null means not given. Errors: INVALID_ARGUMENT that
  // names the argument, variable or key.
  static absl::StatusOr<DeepSpeedConfig> Resolve(
      const nlohmann::json& config, const nlohmann::json& arguments,
      const std::map<std::string, std::string>& variables, DeepSpeedContext context);

  // Fills "auto" from `values`, by dotted key. With `must_match`, other values must be equal.
  absl::Status Process(const std::map<std::string, nlohmann::json>& values, bool must_match);

  // Settles a clipping that is still "auto": 1.0 if a config asks for it; none if only the default
  // of the plugin says "auto", because then clipping was not requested.
  void SettleClipping();

  // Fills in everything that is still "auto" from the prepared objects.
  absl::Status Prepare(const DeepSpeedObjects& objects);

  // The resolved config. `steps_per_print` is the text "inf".
  const nlohmann::json& config() const { return config_; }
  // The plugin's fields under their names.
  const nlohmann::json& fields() const { return fields_; }
  // After Prepare: the number in the config. Before it: that of the Accelerator.
  int64_t gradient_accumulation_steps() const { return context_.gradient_accumulation_steps; }
  // After Prepare: whether a real optimizer runs on the CPU, like DeepSpeed's.
  bool cpu_optimizer() const { return cpu_optimizer_; }

 private:
  DeepSpeedConfig() = default;
  absl::Status Init(const nlohmann::json& config, const nlohmann::json& arguments,
                    const std::map<std::string, std::string>& variables);
  absl::Status FromConfig(const std::map<std::string, std::string>& variables, bool given_steps);
  void FromFields();
  absl::Status SetInitFlag(const nlohmann::json& arguments,
                           const std::map<std::string, std::string>& variables);
  absl::Status SetMsAmp(const nlohmann::json& arguments,
                        const std::map<std::string, std::string>& variables);
  absl::Status SetMixedPrecision();
  absl::StatusOr<std::optional<int64_t>> MicroBatchSize(const DeepSpeedObjects& objects) const;
  absl::Status CheckPlaceholders(const DeepSpeedObjects& objects);

  nlohmann::json config_;
  nlohmann::json fields_;
  DeepSpeedContext context_;
  bool clipping_is_asked_for_ = true;
  bool msamp_ = false;
  std::string msamp_level_;
  bool cpu_optimizer_ = false;
};

// Does DeepSpeed's arithmetic: of the three batch sizes, those that `config` leaves out follow from
// the others and the number of processes. Errors: INVALID_ARGUMENT if they contradict each other.
absl::StatusOr<DeepSpeedBatchSizes> DeepSpeedBatch(const nlohmann::json& config,
                                                   int64_t num_processes);

// The names of the plugin's arguments.
const std::vector<std::string>& DeepSpeedArgumentNames();

}  // namespace muster::client

#endif  // MUSTER_CLIENT_CONFIG_DEEPSPEED_CONFIG_H_
