#ifndef MUSTER_WORKER_MODELS_MODEL_CONFIG_H_
#define MUSTER_WORKER_MODELS_MODEL_CONFIG_H_

#include <cstdint>
#include <optional>
#include <string>
#include <variant>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"

namespace muster::models {

// The contents of a model folder's config.json, in the terms of the models here. Needs no torch:
// tools use it too.

// kGelu and kGeluErf are the same formula, and so are kGeluTanh, kGeluNew and kGeluFast. As in
// transformers, the first of each is one operation; the others consist of several, which each round
// in low precision. kGeluClipped is kGelu within [-10, 10].
enum class Activation {
  kSilu,
  kGelu,
  kGeluErf,
  kGeluTanh,
  kGeluNew,
  kGeluFast,
  kGeluClipped,
  kQuickGelu,
  kRelu,
  kRelu2,
  kRelu6,
  kLeakyRelu,
  kHardswish,
  kMish,
  kSigmoid,
  kTanh,
  kLaplace,
  kSqrtSoftplus,
  kLinear,
};

// The class that the folder was saved from, named as in "architectures".
enum class Architecture {
  kGpt2LMHeadModel,
  kLlamaForCausalLM,
  kMistralForCausalLM,
  kMixtralForCausalLM,
  kQwen2ForCausalLM,
  kBertForMaskedLM,
  kBertForSequenceClassification,
};
absl::string_view ArchitectureName(Architecture architecture);

// The settings that all models have.
struct CommonConfig {
  Architecture architecture = Architecture::kLlamaForCausalLM;
  int64_t vocab_size = 0;
  // Positions that the model was trained for. For GPT-2 and BERT, the maximum.
  int64_t max_positions = 0;
  // Standard deviation of the initial weights.
  double initializer_range = 0.02;
  // The logits are computed with the embedding's own weights.
  bool tie_word_embeddings = false;
  std::optional<int64_t> bos_token_id = std::nullopt;
  std::optional<int64_t> pad_token_id = std::nullopt;
  std::vector<int64_t> eos_token_ids = {};
  // Type of the weights in the files, by torch's name ("bfloat16"); empty if not specified.
  std::string dtype = "";
  // The text of config.json, from which ToJson keeps what is not in this struct. May be empty.
  std::string source_json = "";
};

// Rotary position embedding. `kind` and numbers as in transformers' "rope_parameters".
struct RopeConfig {
  enum class Kind { kDefault, kLinear, kDynamic, kYarn, kLlama3, kLongRope, kProportional };
  Kind kind = Kind::kDefault;
  double theta = 10000;
  double factor = 1;
  // The positions that the model was made for, before stretching.
  int64_t original_max_positions = 8192;
  // Only kLlama3.
  double low_freq_factor = 1;
  double high_freq_factor = 4;
  // kYarn and kLongRope. By default it follows from `factor`, and for kYarn also from the mscales.
  std::optional<double> attention_factor = std::nullopt;
  // Only kYarn.
  double mscale = 0;  // 0: none
  double mscale_all_dim = 0;
  double beta_fast = 32;
  double beta_slow = 1;
  bool truncate = true;
  // Only kLongRope: how much each pair's wave is stretched, [head_dim / 2] each, in passes that
  // stay within original_max_positions and in longer ones.
  std::vector<double> short_factor = {};
  std::vector<double> long_factor = {};
  // Only kProportional: the share of the pairs that rotate; the others, the slow ones, do not.
  double partial_rotary_factor = 1;
};

// Returns the factor for the cosines and sines of kLongRope: attention_factor, or the value that
// follows from `factor`.
double LongRopeAttentionFactor(const RopeConfig& rope);

// Llama, Mistral, Mixtral and Qwen2: RMS norms, rotary positions, grouped queries, gated
// feed-forward layers with one expert or many.
struct DecoderConfig : CommonConfig {
  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t num_key_value_heads = 0;
  int64_t head_dim = 0;
  double rms_norm_eps = 1e-6;
  RopeConfig rope = {};
  Activation activation = Activation::kSilu;
  bool qkv_bias = false;
  bool attention_output_bias = false;
  bool mlp_bias = false;
  double attention_dropout = 0;
  // For each layer: how many positions a query attends to, including its own; 0: all before it.
  std::vector<int64_t> sliding_windows = {};
  // Experts: 0 for a dense model.
  int64_t num_experts = 0;
  int64_t num_experts_per_token = 0;
  double router_aux_loss_coef = 0;
  // Adds the router's auxiliary loss to the loss.
  bool output_router_logits = false;
  double router_jitter_noise = 0;
};

struct Gpt2Config : CommonConfig {
  int64_t hidden_size = 0;
  int64_t inner_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  Activation activation = Activation::kGeluNew;
  double layer_norm_epsilon = 1e-5;
  double embedding_dropout = 0.1;
  double attention_dropout = 0.1;
  double residual_dropout = 0.1;
  bool scale_attention = true;
  bool scale_attention_by_layer = false;
};

struct BertConfig : CommonConfig {
  // The meaning of a sequence classifier's labels. kFromLabels decides for each batch: one label
  // means regression, whole numbers mean classes, other numbers mean several labels at once.
  enum class Problem { kFromLabels, kRegression, kSingleLabel, kMultiLabel };

  int64_t hidden_size = 0;
  int64_t intermediate_size = 0;
  int64_t num_layers = 0;
  int64_t num_heads = 0;
  int64_t type_vocab_size = 2;
  Activation activation = Activation::kGelu;
  double layer_norm_eps = 1e-12;
  double hidden_dropout = 0.1;
  double attention_dropout = 0.1;
  double classifier_dropout = 0.1;
  int64_t num_labels = 2;
  Problem problem = Problem::kFromLabels;
};

using ModelConfig = std::variant<DecoderConfig, Gpt2Config, BertConfig>;

const CommonConfig& Common(const ModelConfig& config);
CommonConfig& Common(ModelConfig& config);

// The maximum number of tokens of a row: max_positions, or what "dynamic" and "yarn" stretch it to.
int64_t ContextLength(const ModelConfig& config);

struct ReadConfigOptions {
  // The class to build, for a folder that was saved from another class or names none.
  std::string architecture = "";
  // Settings in config.json to ignore although Muster does not know them, or "auto_map".
  // INVALID_ARGUMENT names one that Muster knows or that does not occur.
  std::vector<std::string> ignore_settings = {};
};

// Parses a config.json as transformers 4 and 5 write it. `source` is for messages. Every setting is
// either applied, known to have no effect on the model's results, or refused. Errors:
// INVALID_ARGUMENT "SOURCE: FIELD ..." for an invalid config; UNIMPLEMENTED names an architecture
// or setting that Muster does not support.
absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json, absl::string_view source,
                                             const ReadConfigOptions& options = {});

// Reads a config. `path`: a folder with config.json, or the file. NOT_FOUND names the file.
absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& path,
                                            const ReadConfigOptions& options = {});

// Refuses numbers that no model can have, by name. For configs created in code.
absl::Status ValidateConfig(const ModelConfig& config);

// Returns a config.json that transformers 4 and 5 read. Keeps keys of `source_json` that the struct
// does not determine.
std::string ToJson(const ModelConfig& config);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_MODEL_CONFIG_H_
