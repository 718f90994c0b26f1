#include "worker/models/model_config.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/file.h"
#include "base/home_path.h"
#include "base/json.h"
#include "base/regular_file.h"
#include "base/status_macros.h"

namespace muster::models {
namespace {

using Json = nlohmann::json;

// Above these limits a config is damaged, or the arithmetic of sizes could overflow.
constexpr int64_t kMaxSize = int64_t{1} << 24;
constexpr int64_t kMaxLayers = 10'000;
// Layers times experts. Each is an object with parameters, even in a model without memory.
constexpr int64_t kMostModules = 1'000'000;
constexpr int64_t kMaxExperts = 65'536;

// The only refused setting that may be ignored.
constexpr char kAutoMap[] = "auto_map";

struct KnownArchitecture {
  const char* name;
  Architecture architecture;
  const char* model_type;
};
constexpr KnownArchitecture kArchitectures[] = {
    {"GPT2LMHeadModel", Architecture::kGpt2LMHeadModel, "gpt2"},
    {"LlamaForCausalLM", Architecture::kLlamaForCausalLM, "llama"},
    {"MistralForCausalLM", Architecture::kMistralForCausalLM, "mistral"},
    {"MixtralForCausalLM", Architecture::kMixtralForCausalLM, "mixtral"},
    {"Qwen2ForCausalLM", Architecture::kQwen2ForCausalLM, "qwen2"},
    {"BertForMaskedLM", Architecture::kBertForMaskedLM, "bert"},
    {"BertForSequenceClassification", Architecture::kBertForSequenceClassification, "bert"},
};

// transformers' names. The first name of an activation is the one that is written.
constexpr std::pair<const char*, Activation> kActivations[] = {
    {"silu", Activation::kSilu},
    {"swish", Activation::kSilu},
    {"gelu", Activation::kGelu},
    {"gelu_python", Activation::kGeluErf},
    {"gelu_pytorch_tanh", Activation::kGeluTanh},
    {"gelu_new", Activation::kGeluNew},
    {"gelu_accurate", Activation::kGeluNew},
    {"gelu_python_tanh", Activation::kGeluNew},
    {"gelu_fast", Activation::kGeluFast},
    {"gelu_10", Activation::kGeluClipped},
    {"quick_gelu", Activation::kQuickGelu},
    {"relu", Activation::kRelu},
    {"relu2", Activation::kRelu2},
    {"relu6", Activation::kRelu6},
    {"leaky_relu", Activation::kLeakyRelu},
    {"hardswish", Activation::kHardswish},
    {"mish", Activation::kMish},
    {"sigmoid", Activation::kSigmoid},
    {"tanh", Activation::kTanh},
    {"laplace", Activation::kLaplace},
    {"sqrtsoftplus", Activation::kSqrtSoftplus},
    {"linear", Activation::kLinear},
};

// Settings that change neither weights nor logits nor loss: names, defaults of generation (see
// generation_config.json), the result of a Python call, and how it is run.
const std::set<std::string, std::less<>>& HarmlessSettings() {
  static const auto* const settings =
      new std::set<std::string, std::less<>>{"_attn_implementation",
                                             "_experts_implementation",
                                             "_experts_implementation_internal",
                                             "_num_labels",
                                             "_attn_implementation_autoset",
                                             "_attn_implementation_internal",
                                             "_commit_hash",
                                             "_name_or_path",
                                             "architectures",
                                             "attn_implementation",
                                             "bad_words_ids",
                                             "begin_suppress_tokens",
                                             "chunk_size_feed_forward",
                                             "cls_token_id",
                                             "decoder_start_token_id",
                                             "directionality",
                                             "diversity_penalty",
                                             "do_sample",
                                             "early_stopping",
                                             "encoder_no_repeat_ngram_size",
                                             "experts_implementation",
                                             "exponential_decay_length_penalty",
                                             "finetuning_task",
                                             "forced_bos_token_id",
                                             "forced_eos_token_id",
                                             "gradient_checkpointing",
                                             "id2label",
                                             "ignore_keys_at_rope_validation",
                                             "is_llama_config",
                                             "keys_to_ignore_at_inference",
                                             "label2id",
                                             "language",
                                             "length_penalty",
                                             "mask_token_id",
                                             "max_length",
                                             "max_sequence_length",
                                             "min_length",
                                             "model_max_length",
                                             "model_type",
                                             "n_ctx",
                                             "name",
                                             "no_repeat_ngram_size",
                                             "num_beam_groups",
                                             "num_beams",
                                             "num_labels",
                                             "num_return_sequences",
                                             "output_attentions",
                                             "output_hidden_states",
                                             "output_past",
                                             "output_scores",
                                             "pooler_fc_size",
                                             "pooler_num_attention_heads",
                                             "pooler_num_fc_layers",
                                             "pooler_size_per_head",
                                             "pooler_type",
                                             "predict_special_tokens",
                                             "prefix",
                                             "problem_type",
                                             "pretraining_tp",
                                             "remove_invalid_values",
                                             "reorder_and_upcast_attn",
                                             "repetition_penalty",
                                             "return_dict",
                                             "return_dict_in_generate",
                                             "sep_token_id",
                                             "summary_activation",
                                             "summary_first_dropout",
                                             "summary_proj_to_labels",
                                             "summary_type",
                                             "summary_use_proj",
                                             "suppress_tokens",
                                             "task_specific_params",
                                             "temperature",
                                             "tf_legacy_loss",
                                             "tokenizer_class",
                                             "top_k",
                                             "top_p",
                                             "torchscript",
                                             "transformers.js_config",
                                             "transformers_version",
                                             "typical_p",
                                             "unk_token_id",
                                             "unsloth_fixed",
                                             "unsloth_version",
                                             "use_bfloat16",
                                             "use_cache",
                                             "xla_device"};
  return *settings;
}

// Settings that would change the model, with the only value that Muster supports. They may be
// absent.
const std::map<std::string, Json, std::less<>>& OnlySettings() {
  static const auto* const settings = new std::map<std::string, Json, std::less<>>{
      {"add_cross_attention", false},
      {"attention_bias", false},
      {"cross_attention_hidden_size", nullptr},
      {"is_decoder", false},
      {"is_encoder_decoder", false},
      {"mlp_bias", false},
      {"partial_rotary_factor", 1.0},
      {"position_embedding_type", "absolute"},
      {"pruned_heads", Json::object()},
      {"rope_interleaved", false},
      {"tie_encoder_decoder", false},
      {"use_mrope", false},
  };
  return *settings;
}

// One config.json: returns settings and records which ones were asked for. The first error counts;
// values returned after it have no meaning.
class Settings {
 public:
  Settings(const Json& json, absl::string_view source) : json_(json), source_(source) {}

  const absl::Status& status() const { return status_; }

  void Fail(absl::StatusCode code, const std::string& what) {
    if (status_.ok()) status_ = absl::Status(code, absl::StrCat(source_, ": ", what));
  }
  void Invalid(const std::string& what) { Fail(absl::StatusCode::kInvalidArgument, what); }
  void Unknown(const std::string& what) { Fail(absl::StatusCode::kUnimplemented, what); }

  // Returns null if the setting is missing or null.
  const Json* Find(const std::string& name) {
    seen_.insert(name);
    const auto found = json_.find(name);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }
  bool Has(const std::string& name) { return Find(name) != nullptr; }
  // Whether the setting is present, even as null.
  bool Names(const std::string& name) {
    seen_.insert(name);
    return json_.contains(name);
  }

  // `most` must not be negative.
  static bool IsWholeIn(const Json& value, int64_t least, int64_t most) {
    if (!value.is_number_integer()) return false;
    // Unsigned numbers beyond 2^63 would wrap around.
    if (value.is_number_unsigned() && value.get<uint64_t>() > static_cast<uint64_t>(most)) {
      return false;
    }
    return value.get<int64_t>() >= least && value.get<int64_t>() <= most;
  }
  // Returns an integer in [least, most]; `otherwise`, the default of transformers' class, if the
  // file does not name it. Null is no number for transformers either, except where a class reads it
  // as none: SizeOrNull() and ProbabilityOrNull().
  int64_t Int(const std::string& name, int64_t least, int64_t most, int64_t otherwise) {
    if (!Names(name)) return otherwise;
    const Json& value = json_[name];
    if (!IsWholeIn(value, least, most)) {
      Invalid(absl::StrCat("\"", name, "\" is ", Shown(value), ", not a whole number from ", least,
                           " to ", most));
      return least;
    }
    return value.get<int64_t>();
  }
  int64_t Size(const std::string& name, int64_t otherwise) {
    return Int(name, 1, kMaxSize, otherwise);
  }
  int64_t SizeOrNull(const std::string& name, int64_t otherwise) {
    return Has(name) ? Size(name, otherwise) : otherwise;
  }
  int64_t Layers(const std::string& name, int64_t otherwise) {
    return Int(name, 1, kMaxLayers, otherwise);
  }

  double Number(const std::string& name, double least, double most, double otherwise) {
    return Names(name) ? NumberOf(name, json_[name], least, most) : otherwise;
  }
  double NumberOf(const std::string& name, const Json& value, double least, double most) {
    if (!value.is_number() || !(value.get<double>() >= least && value.get<double>() <= most)) {
      Invalid(absl::StrCat("\"", name, "\" is ", Shown(value), ", not a number from ", least,
                           " to ", most));
      return least;
    }
    return value.get<double>();
  }
  double Probability(const std::string& name, double otherwise) {
    return Number(name, 0, 1, otherwise);
  }
  double ProbabilityOrNull(const std::string& name, double otherwise) {
    return Has(name) ? Probability(name, otherwise) : otherwise;
  }

  // Null is refused by transformers 5, and transformers 4 reads it as Python does.
  void RefuseNull(const std::string& name, const char* wanted) {
    if (!Names(name) || Has(name)) return;
    Invalid(absl::StrCat("\"", name, "\" is null, not ", wanted,
                         "; leave it out for what the class has"));
  }

  bool Bool(const std::string& name, bool otherwise) {
    const Json* const value = Find(name);
    if (value == nullptr) {
      RefuseNull(name, "true or false");
      return otherwise;
    }
    if (!value->is_boolean()) {
      Invalid(absl::StrCat("\"", name, "\" is ", Shown(*value), ", not true or false"));
      return otherwise;
    }
    return value->get<bool>();
  }

  // Refuses every other value. Unlike for OnlySettings(), null counts as another value.
  void Only(const std::string& name, const Json& right) {
    if (!Names(name) || json_[name] == right) return;
    Unknown(absl::StrCat("\"", name, "\" is ", Shown(json_[name]),
                         "; of this architecture Muster has only ", right.dump(),
                         ", which it also takes if the setting is left out"));
  }

  std::string Text(const std::string& name, const std::string& otherwise) {
    const Json* const value = Find(name);
    if (value == nullptr) return otherwise;
    if (!value->is_string()) {
      Invalid(absl::StrCat("\"", name, "\" is ", Shown(*value), ", not a text"));
      return otherwise;
    }
    return value->get<std::string>();
  }

  Activation ActivationOf(const std::string& name, const std::string& otherwise) {
    const std::string text = Text(name, otherwise);
    if (Names(name) && !Has(name)) {
      Invalid(absl::StrCat("\"", name, "\" is null, not the name of an activation"));
    }
    for (const auto& [known, activation] : kActivations) {
      if (text == known) return activation;
    }
    Unknown(absl::StrCat("\"", name, "\": \"", Printable(text), "\" is not one of ",
                         absl::StrJoin(kActivations, ", ", [](std::string* out, const auto& known) {
                           out->append(known.first);
                         })));
    return Activation::kSilu;
  }

  // Handles the settings that were never asked for.
  void Finish(const ReadConfigOptions& options) {
    for (const std::string& name : options.ignore_settings) {
      if (name == kAutoMap) continue;
      // A setting that is no longer there was another name for a known one.
      if (seen_.count(name) == 0 && OnlySettings().count(name) == 0 && json_.contains(name))
        continue;
      Invalid(absl::StrCat("\"", Printable(name),
                           "\", named in ignore_settings, is a setting that Muster knows, and it "
                           "counts; change config.json if it is to have another value"));
    }
    for (const auto& [name, value] : json_.items()) {
      // Null means none, whatever the setting is.
      if (value.is_null() || seen_.count(name) != 0 || HarmlessSettings().count(name) != 0)
        continue;
      if (std::find(options.ignore_settings.begin(), options.ignore_settings.end(), name) !=
          options.ignore_settings.end()) {
        continue;
      }
      const auto only = OnlySettings().find(name);
      if (only == OnlySettings().end()) {
        Unknown(absl::StrCat("Muster does not know the setting \"", Printable(name),
                             "\"; if it has no effect on what the model computes, name it in "
                             "ignore_settings"));
      } else if (value != only->second) {
        Unknown(absl::StrCat("\"", name, "\" is ", Shown(value), "; Muster has only ",
                             only->second.dump()));
      }
    }
  }

  static std::string Shown(const Json& value) {
    return Printable(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60);
  }

 private:
  const Json& json_;
  const absl::string_view source_;
  absl::Status status_;
  std::set<std::string, std::less<>> seen_;
};

// The tokens that transformers' classes use if config.json does not name them.
struct ClassTokens {
  std::optional<int64_t> bos = std::nullopt, pad = std::nullopt;
};
ClassTokens TokensOf(Architecture architecture) {
  switch (architecture) {
    case Architecture::kLlamaForCausalLM:
    case Architecture::kMistralForCausalLM:
    case Architecture::kMixtralForCausalLM:
      return {.bos = 1};
    case Architecture::kGpt2LMHeadModel:
      return {.bos = 50'256};
    case Architecture::kQwen2ForCausalLM:
      return {};
    case Architecture::kBertForMaskedLM:
    case Architecture::kBertForSequenceClassification:
      break;
  }
  // This token keeps a row of the embedding from learning.
  return {.pad = 0};
}

// Null means none. A default beyond the vocabulary also means none, because no row can hold it.
std::optional<int64_t> TokenId(Settings& settings, const std::string& name,
                               std::optional<int64_t> otherwise, int64_t vocab_size) {
  if (!settings.Names(name)) {
    return otherwise.has_value() && *otherwise < vocab_size ? otherwise : std::nullopt;
  }
  if (!settings.Has(name)) return std::nullopt;
  // Some files write -1 for none.
  const int64_t id = settings.Int(name, -1, kMaxSize, -1);
  return id < 0 ? std::nullopt : std::make_optional(id);
}

void ReadCommon(Settings& settings, Architecture architecture, int64_t default_vocabulary,
                CommonConfig* config) {
  config->architecture = architecture;
  config->vocab_size = settings.Size("vocab_size", default_vocabulary);
  config->initializer_range = settings.Number("initializer_range", 0, 1e6, 0.02);
  const ClassTokens defaults = TokensOf(architecture);
  const auto token = [&](const char* name, std::optional<int64_t> otherwise) {
    return TokenId(settings, name, otherwise, config->vocab_size);
  };
  config->bos_token_id = token("bos_token_id", defaults.bos);
  config->pad_token_id = token("pad_token_id", defaults.pad);
  const bool is_bert = architecture == Architecture::kBertForMaskedLM ||
                       architecture == Architecture::kBertForSequenceClassification;
  // transformers passes it to attention, where null, which is not true, removes the causal mask.
  settings.Only("is_causal", !is_bert);
  if (config->pad_token_id.has_value() && *config->pad_token_id >= config->vocab_size) {
    settings.Invalid(absl::StrCat("\"pad_token_id\" is ", *config->pad_token_id,
                                  ", beyond the vocabulary of ", config->vocab_size));
  }
  const Json* const ends = settings.Find("eos_token_id");
  // If it is missing, generate() of transformers 5 has no end token, whatever the class says.
  if (ends != nullptr) {
    for (const Json& id : ends->is_array() ? *ends : Json::array({*ends})) {
      if (!Settings::IsWholeIn(id, -1, kMaxSize)) {
        settings.Invalid(absl::StrCat("\"eos_token_id\": ", Settings::Shown(id), " is no token"));
      } else if (id.get<int64_t>() >= 0) {
        config->eos_token_ids.push_back(id.get<int64_t>());
      }
    }
  }
  // Flags that a class checks although its model does not use them, and the number of labels.
  std::vector<const char*> flags = {"is_encoder_decoder", "use_cache"};
  if (architecture == Architecture::kGpt2LMHeadModel) {
    flags.insert(flags.end(),
                 {"add_cross_attention", "reorder_and_upcast_attn", "summary_use_proj"});
  } else if (is_bert) {
    flags.insert(flags.end(), {"add_cross_attention", "is_decoder"});
  }
  for (const char* const flag : flags) {
    settings.RefuseNull(flag, "true or false");
  }
  settings.RefuseNull("num_labels", "a number");
  const std::string legacy = settings.Text("torch_dtype", "");
  config->dtype = settings.Text("dtype", legacy);
  if (settings.Has("quantization_config")) {
    settings.Unknown(
        "\"quantization_config\": Muster does not read quantized weights; take the folder that "
        "they were made from");
  }
  if (settings.Has(kAutoMap)) {
    settings.Unknown(
        "\"auto_map\": the model is Python code of its own; if its architecture computes the same, "
        "name \"auto_map\" in ignore_settings");
  }
}

std::vector<double> ReadFactors(Settings& settings, const std::string& place, const Json& value) {
  std::vector<double> factors;
  if (!value.is_array()) {
    settings.Invalid(
        absl::StrCat("\"", place, "\" is ", Settings::Shown(value), ", not a list of numbers"));
    return factors;
  }
  for (const Json& each : value) factors.push_back(settings.NumberOf(place, each, 1e-9, 1e9));
  return factors;
}

// transformers 5 writes everything in "rope_parameters", transformers 4 in "rope_theta" and
// "rope_scaling", whose type once had the key "type".
void ReadRope(Settings& settings, double default_theta, int64_t max_positions, RopeConfig* rope) {
  rope->original_max_positions = max_positions;
  const char* name = "rope_parameters";
  const Json* const legacy = settings.Find("rope_scaling");
  const Json* parameters = settings.Find(name);
  if (parameters == nullptr || parameters->empty()) {
    parameters = legacy;
    name = "rope_scaling";
  } else if (legacy != nullptr && !legacy->empty() && *legacy != *parameters) {
    // transformers 5 ignores the former, with its rope_theta; transformers 4 does not know it.
    return settings.Invalid(
        "\"rope_parameters\" and \"rope_scaling\" say different things; keep one of them");
  }
  const bool is_theta_inside =
      parameters != nullptr && parameters->is_object() && parameters->contains("rope_theta");
  // The inner value counts, and then transformers ignores an outer null.
  if (!is_theta_inside || settings.Has("rope_theta")) {
    rope->theta = settings.Number("rope_theta", 1e-9, 1e30, default_theta);
  }
  if (parameters == nullptr) return;
  if (!parameters->is_object()) {
    return settings.Invalid(
        absl::StrCat("\"", name, "\" is ", Settings::Shown(*parameters), ", not an object"));
  }
  std::string kind = "default";
  // "rope_type" is newer and counts.
  for (const char* const key : {"type", "rope_type"}) {
    const auto type = parameters->find(key);
    if (type == parameters->end()) continue;
    const bool counts = key == absl::string_view("rope_type") || !parameters->contains("rope_type");
    if (type->is_null() && !counts) continue;
    if (!type->is_string()) {
      return settings.Invalid(
          absl::StrCat("\"", name, ".", key, "\" is ", Settings::Shown(*type), ", not a text"));
    }
    kind = type->get<std::string>();
  }
  // Check the type before its settings, which are unknown for other types.
  static const auto* const kinds = new std::map<std::string, RopeConfig::Kind>{
      {"default", RopeConfig::Kind::kDefault},
      {"linear", RopeConfig::Kind::kLinear},
      {"dynamic", RopeConfig::Kind::kDynamic},
      {"yarn", RopeConfig::Kind::kYarn},
      {"llama3", RopeConfig::Kind::kLlama3},
      {"longrope", RopeConfig::Kind::kLongRope},
      {"proportional", RopeConfig::Kind::kProportional}};
  const auto known = kinds->find(kind);
  if (known == kinds->end()) {
    return settings.Unknown(
        absl::StrCat("\"", name, "\": the type \"", Printable(kind),
                     "\" is not one of default, linear, dynamic, yarn, llama3, longrope, "
                     "proportional"));
  }
  rope->kind = known->second;
  const bool has_original = rope->kind == RopeConfig::Kind::kYarn ||
                            rope->kind == RopeConfig::Kind::kLlama3 ||
                            rope->kind == RopeConfig::Kind::kLongRope;
  const std::map<std::string, double*> numbers = {{"factor", &rope->factor},
                                                  {"low_freq_factor", &rope->low_freq_factor},
                                                  {"high_freq_factor", &rope->high_freq_factor},
                                                  {"beta_fast", &rope->beta_fast},
                                                  {"beta_slow", &rope->beta_slow}};
  for (const auto& [key, value] : parameters->items()) {
    const std::string place = absl::StrCat(name, ".", key);
    if (value.is_null()) {
      // Python reads null as false, unlike a missing key.
      if (key == "truncate") rope->truncate = false;
      // transformers computes with these, and fails if they are null.
      const bool is_needed =
          key == "rope_theta" || (key == "original_max_position_embeddings" && has_original) ||
          (key == "partial_rotary_factor" && rope->kind != RopeConfig::Kind::kDefault) ||
          (key == "factor" && rope->kind == RopeConfig::Kind::kProportional);
      if (is_needed) settings.Invalid(absl::StrCat("\"", place, "\" is null, not a number"));
      continue;
    }
    if (key == "rope_type" || key == "type") continue;
    if (key == "rope_theta") {
      rope->theta = settings.NumberOf(place, value, 1e-9, 1e30);
    } else if (const auto number = numbers.find(key); number != numbers.end()) {
      *number->second = settings.NumberOf(place, value, 1e-9, 1e9);
    } else if (rope->kind == RopeConfig::Kind::kLongRope &&
               (key == "short_factor" || key == "long_factor")) {
      (key == "short_factor" ? rope->short_factor : rope->long_factor) =
          ReadFactors(settings, place, value);
    } else if (key == "attention_factor") {
      rope->attention_factor = settings.NumberOf(place, value, 0, 1e9);
    } else if (key == "mscale" || key == "mscale_all_dim") {
      (key == "mscale" ? rope->mscale : rope->mscale_all_dim) =
          settings.NumberOf(place, value, 0, 1e9);
    } else if (key == "truncate") {
      if (!value.is_boolean()) {
        return settings.Invalid(absl::StrCat("\"", place, "\" is neither true nor false"));
      }
      rope->truncate = value.get<bool>();
    } else if (key == "original_max_position_embeddings") {
      rope->original_max_positions =
          static_cast<int64_t>(settings.NumberOf(place, value, 1, static_cast<double>(kMaxSize)));
    } else if (key == "partial_rotary_factor" && rope->kind == RopeConfig::Kind::kProportional) {
      rope->partial_rotary_factor = settings.NumberOf(place, value, 0, 1);
    } else if (key == "partial_rotary_factor") {
      if (value != Json(1.0)) settings.Unknown(absl::StrCat("\"", place, "\" other than 1"));
    } else {
      settings.Unknown(absl::StrCat("Muster does not know the setting \"", Printable(place), "\""));
    }
  }
  // transformers gives precedence to the outer value, and the other types do not use it.
  rope->original_max_positions =
      has_original
          ? settings.Size("original_max_position_embeddings", rope->original_max_positions)
          : settings.SizeOrNull("original_max_position_embeddings", rope->original_max_positions);
  const auto require = [&](std::initializer_list<const char*> keys) {
    for (const char* const key : keys) {
      if (parameters->contains(key) && !(*parameters)[key].is_null()) continue;
      settings.Invalid(absl::StrCat("\"", name, ".", key, "\" is missing"));
    }
  };
  if (rope->kind == RopeConfig::Kind::kProportional) {
    // Folders may have it beside "rope_theta"; the inner value counts.
    if (settings.Has("partial_rotary_factor") && !parameters->contains("partial_rotary_factor")) {
      rope->partial_rotary_factor = settings.Number("partial_rotary_factor", 0, 1, 1);
    }
  } else if (rope->kind == RopeConfig::Kind::kLinear) {
    require({"factor"});
  } else if (rope->kind == RopeConfig::Kind::kDynamic) {
    rope->original_max_positions = max_positions;
    require({"factor"});
  } else if (rope->kind == RopeConfig::Kind::kYarn) {
    const auto factor = parameters->find("factor");
    if (factor != parameters->end() && factor->is_null()) {
      rope->factor =
          static_cast<double>(max_positions) / static_cast<double>(rope->original_max_positions);
    } else {
      require({"factor"});
    }
    if (rope->theta <= 1) {
      settings.Invalid(
          absl::StrCat("\"rope_theta\" is ", rope->theta, "; \"yarn\" needs more than 1"));
    }
    if (rope->beta_fast < rope->beta_slow) {
      settings.Invalid(absl::StrCat("\"", name, ".beta_fast\" is below beta_slow"));
    }
  } else if (rope->kind == RopeConfig::Kind::kLongRope) {
    require({"short_factor", "long_factor"});
    if (!parameters->contains("factor") || (*parameters)["factor"].is_null()) {
      rope->factor =
          static_cast<double>(max_positions) / static_cast<double>(rope->original_max_positions);
    }
  } else if (rope->kind == RopeConfig::Kind::kLlama3) {
    require({"factor", "low_freq_factor", "high_freq_factor"});
    if (rope->high_freq_factor <= rope->low_freq_factor) {
      settings.Invalid(
          absl::StrCat("\"", name, ".high_freq_factor\" is not above low_freq_factor"));
    }
  }
}

// Reads which layers attend only to a window.
void ReadSlidingWindows(Settings& settings, DecoderConfig* config) {
  config->sliding_windows.assign(config->num_layers, 0);
  const bool is_qwen = config->architecture == Architecture::kQwen2ForCausalLM;
  const bool has_window = config->architecture == Architecture::kMistralForCausalLM ||
                          config->architecture == Architecture::kMixtralForCausalLM || is_qwen;
  int64_t window = 0;
  if (has_window && settings.Has("sliding_window")) {
    window = settings.Size("sliding_window", 0);
  } else if (has_window && !settings.Names("sliding_window") &&
             config->architecture != Architecture::kMixtralForCausalLM) {
    // transformers' default; null means none.
    window = 4096;
  }
  int64_t first = 0;
  if (is_qwen) {
    // transformers' default; configs that switch the window on name the layer.
    first = settings.Int("max_window_layers", 0, kMaxSize, 28);
    if (!settings.Bool("use_sliding_window", false)) window = 0;
  }
  const Json* const types = settings.Find("layer_types");
  if (types == nullptr) {
    for (int64_t i = first; i < config->num_layers; ++i) config->sliding_windows[i] = window;
    return;
  }
  if (!types->is_array() || static_cast<int64_t>(types->size()) != config->num_layers) {
    return settings.Invalid(
        absl::StrCat("\"layer_types\" does not name each of the ", config->num_layers, " layers"));
  }
  for (int64_t i = 0; i < config->num_layers; ++i) {
    const Json& type = (*types)[i];
    if (type == "sliding_attention") {
      if (window == 0) {
        return settings.Invalid(
            "\"layer_types\" has a sliding_attention layer, but there is no \"sliding_window\" in "
            "use");
      }
      config->sliding_windows[i] = window;
    } else if (type != "full_attention") {
      return settings.Unknown(absl::StrCat("\"layer_types\": ", Settings::Shown(type),
                                           " is neither full_attention nor sliding_attention"));
    } else if (window != 0 && !is_qwen) {
      // transformers gives all layers of these architectures the window, whatever the list says.
      return settings.Unknown(
          "\"layer_types\": only Qwen2 has layers with and without \"sliding_window\"");
    }
  }
}

void ReadExperts(Settings& settings, DecoderConfig* config) {
  config->num_experts = settings.Int("num_local_experts", 1, kMaxExperts, 8);
  config->num_experts_per_token = settings.Int("num_experts_per_tok", 1, kMaxExperts, 2);
  if (config->num_experts_per_token > config->num_experts) {
    settings.Invalid(absl::StrCat("\"num_experts_per_tok\" is ", config->num_experts_per_token,
                                  ", but there are ", config->num_experts, " experts"));
  }
  config->router_aux_loss_coef = settings.Number("router_aux_loss_coef", 0, 1e9, 0.001);
  config->output_router_logits = settings.Bool("output_router_logits", false);
  config->router_jitter_noise = settings.Number("router_jitter_noise", 0, 1, 0);
}

DecoderConfig ReadDecoder(Settings& settings, Architecture architecture) {
  DecoderConfig config;
  const bool is_llama = architecture == Architecture::kLlamaForCausalLM;
  const bool is_qwen = architecture == Architecture::kQwen2ForCausalLM;
  const bool is_mixtral = architecture == Architecture::kMixtralForCausalLM;
  ReadCommon(settings, architecture, is_qwen ? 151'936 : 32'000, &config);
  config.hidden_size = settings.Size("hidden_size", 4096);
  config.intermediate_size = settings.Size("intermediate_size", is_llama  ? 11'008
                                                                : is_qwen ? 22'016
                                                                          : 14'336);
  config.num_layers = settings.Layers("num_hidden_layers", 32);
  config.num_heads = settings.Size("num_attention_heads", 32);
  // Null means as many as heads; only a file that does not name it gets the class's default.
  const bool as_many = is_llama || settings.Names("num_key_value_heads");
  config.num_key_value_heads = settings.SizeOrNull("num_key_value_heads", as_many ? config.num_heads
                                                                          : is_qwen ? 32
                                                                                    : 8);
  // The head's size decides, not the quotient, which need not be an integer.
  if (!settings.Has("head_dim") && config.hidden_size % config.num_heads != 0) {
    settings.Invalid(absl::StrCat("\"hidden_size\" ", config.hidden_size,
                                  " is no multiple of \"num_attention_heads\" ", config.num_heads,
                                  ", and there is no \"head_dim\""));
  }
  const int64_t quotient = std::max<int64_t>(1, config.hidden_size / config.num_heads);
  // transformers uses the null of a Qwen2 as the size, and fails.
  config.head_dim =
      is_qwen ? settings.Size("head_dim", quotient) : settings.SizeOrNull("head_dim", quotient);
  config.max_positions = settings.Size("max_position_embeddings", is_llama  ? 2048
                                                                  : is_qwen ? 32768
                                                                            : int64_t{4096} * 32);
  config.rms_norm_eps = settings.Number("rms_norm_eps", 0, 1, is_mixtral ? 1e-5 : 1e-6);
  ReadRope(settings, is_mixtral ? 1e6 : 1e4, config.max_positions, &config.rope);
  config.activation = settings.ActivationOf("hidden_act", "silu");
  config.tie_word_embeddings = settings.Bool("tie_word_embeddings", false);
  config.attention_dropout = is_llama ? settings.ProbabilityOrNull("attention_dropout", 0)
                                      : settings.Probability("attention_dropout", 0);
  config.qkv_bias = is_qwen;
  if (is_llama) {
    config.qkv_bias = settings.Bool("attention_bias", false);
    config.attention_output_bias = config.qkv_bias;
    config.mlp_bias = settings.Bool("mlp_bias", false);
  }
  if (settings.status().ok()) ReadSlidingWindows(settings, &config);
  if (is_mixtral) ReadExperts(settings, &config);
  return config;
}

Gpt2Config ReadGpt2(Settings& settings) {
  Gpt2Config config;
  ReadCommon(settings, Architecture::kGpt2LMHeadModel, 50'257, &config);
  config.hidden_size = settings.Size("n_embd", 768);
  config.num_layers = settings.Layers("n_layer", 12);
  config.num_heads = settings.Size("n_head", 12);
  config.inner_size = settings.SizeOrNull("n_inner", std::min(kMaxSize, 4 * config.hidden_size));
  config.max_positions = settings.Size("n_positions", 1024);
  config.activation = settings.ActivationOf("activation_function", "gelu_new");
  config.layer_norm_epsilon = settings.Number("layer_norm_epsilon", 0, 1, 1e-5);
  config.embedding_dropout = settings.Probability("embd_pdrop", 0.1);
  config.attention_dropout = settings.Probability("attn_pdrop", 0.1);
  config.residual_dropout = settings.Probability("resid_pdrop", 0.1);
  config.scale_attention = settings.Bool("scale_attn_weights", true);
  config.scale_attention_by_layer = settings.Bool("scale_attn_by_inverse_layer_idx", false);
  config.tie_word_embeddings = settings.Bool("tie_word_embeddings", true);
  return config;
}

BertConfig ReadBert(Settings& settings, Architecture architecture) {
  BertConfig config;
  ReadCommon(settings, architecture, 30'522, &config);
  config.hidden_size = settings.Size("hidden_size", 768);
  config.intermediate_size = settings.Size("intermediate_size", 3072);
  config.num_layers = settings.Layers("num_hidden_layers", 12);
  config.num_heads = settings.Size("num_attention_heads", 12);
  config.max_positions = settings.Size("max_position_embeddings", 512);
  config.type_vocab_size = settings.Size("type_vocab_size", 2);
  // For transformers 4 null is not "absolute": it leaves the positions out.
  settings.Only("position_embedding_type", "absolute");
  config.activation = settings.ActivationOf("hidden_act", "gelu");
  config.layer_norm_eps = settings.Number("layer_norm_eps", 0, 1, 1e-12);
  config.hidden_dropout = settings.Probability("hidden_dropout_prob", 0.1);
  config.attention_dropout = settings.Probability("attention_probs_dropout_prob", 0.1);
  config.classifier_dropout =
      settings.ProbabilityOrNull("classifier_dropout", config.hidden_dropout);
  config.tie_word_embeddings = settings.Bool("tie_word_embeddings", true);
  const Json* const labels = settings.Find("id2label");
  const int64_t named =
      labels != nullptr && labels->is_object() ? static_cast<int64_t>(labels->size()) : 2;
  // If they disagree the number decides, as in transformers 5; transformers 4 uses the names, and
  // the shape of the weights shows which version wrote the file.
  config.num_labels = settings.Size("num_labels", std::max<int64_t>(named, 1));
  const std::string problem = settings.Text("problem_type", "");
  if (problem == "regression") {
    config.problem = BertConfig::Problem::kRegression;
  } else if (problem == "single_label_classification") {
    config.problem = BertConfig::Problem::kSingleLabel;
    if (config.num_labels == 1) {
      settings.Invalid(
          "\"problem_type\" is \"single_label_classification\", but there is only one label, and "
          "nothing to learn: write \"regression\" for a score, or have two labels");
    }
  } else if (problem == "multi_label_classification") {
    config.problem = BertConfig::Problem::kMultiLabel;
  } else if (!problem.empty()) {
    settings.Invalid(absl::StrCat("\"problem_type\" is \"", Printable(problem),
                                  "\", not regression, single_label_classification or "
                                  "multi_label_classification"));
  }
  return config;
}

// Returns the class to build: the caller's choice, the file's, or the only one of its model_type.
absl::StatusOr<Architecture> ChooseArchitecture(const Json& json, absl::string_view source,
                                                const ReadConfigOptions& options) {
  std::string name = options.architecture;
  if (name.empty() && json.contains("architectures") && json["architectures"].is_array() &&
      !json["architectures"].empty() && json["architectures"][0].is_string()) {
    name = json["architectures"][0].get<std::string>();
  }
  std::string type;
  if (json.contains("model_type") && json["model_type"].is_string()) {
    type = json["model_type"].get<std::string>();
  }
  std::vector<std::string> known;
  for (const KnownArchitecture& each : kArchitectures) {
    known.push_back(each.name);
    const bool chosen = name.empty() ? type == each.model_type : name == each.name;
    if (!chosen) continue;
    if (!type.empty() && type != each.model_type) {
      return absl::InvalidArgumentError(absl::StrCat(source, ": \"model_type\" is \"",
                                                     Printable(type), "\", but ", each.name,
                                                     " is of type \"", each.model_type, "\""));
    }
    return each.architecture;
  }
  const std::string what =
      !name.empty() ? absl::StrCat("the architecture \"", Printable(name), "\"")
      : !type.empty()
          ? absl::StrCat("the model_type \"", Printable(type), "\"")
          : std::string("a config that names neither \"architectures\" nor \"model_type\"");
  return absl::UnimplementedError(absl::StrCat(source, ": Muster does not have ", what, "; it has ",
                                               absl::StrJoin(known, ", ")));
}

struct OtherName {
  const char* model_type;
  const char* name;
  const char* other;
};
// Other names that transformers' classes accept for a setting.
constexpr OtherName kOtherNames[] = {
    {"gpt2", "n_embd", "hidden_size"},
    {"gpt2", "n_head", "num_attention_heads"},
    {"gpt2", "n_layer", "num_hidden_layers"},
    {"gpt2", "n_positions", "max_position_embeddings"},
    {"mixtral", "num_local_experts", "num_experts"},
};

const char* ModelType(Architecture architecture) {
  for (const KnownArchitecture& known : kArchitectures) {
    if (known.architecture == architecture) return known.model_type;
  }
  return "";
}

absl::Status UseOwnNames(Architecture architecture, absl::string_view source, Json& json) {
  for (const OtherName& each : kOtherNames) {
    if (each.model_type != absl::string_view(ModelType(architecture))) continue;
    const auto other = json.find(each.other);
    if (other == json.end()) continue;
    if (json.contains(each.name) && json[each.name] != *other) {
      return absl::InvalidArgumentError(
          absl::StrCat(source, ": \"", each.name, "\" is ", Settings::Shown(json[each.name]),
                       ", but \"", each.other, "\", another name for it, is ",
                       Settings::Shown(*other), "; keep one of them"));
    }
    json[each.name] = *other;
    json.erase(each.other);
  }
  return absl::OkStatus();
}

absl::Status CheckHeads(const std::string& what, int64_t hidden, int64_t heads) {
  if (hidden % heads == 0) return absl::OkStatus();
  return absl::InvalidArgumentError(
      absl::StrCat(what, ": the hidden size ", hidden, " is no multiple of the ", heads, " heads"));
}

absl::Status Validate(const DecoderConfig& config) {
  if (config.num_heads % config.num_key_value_heads != 0) {
    return absl::InvalidArgumentError(absl::StrCat("\"num_attention_heads\" ", config.num_heads,
                                                   " is no multiple of \"num_key_value_heads\" ",
                                                   config.num_key_value_heads));
  }
  if (config.head_dim % 2 != 0) {
    return absl::InvalidArgumentError(absl::StrCat("\"head_dim\" is ", config.head_dim,
                                                   "; rotary positions need an even number"));
  }
  if (config.rope.kind == RopeConfig::Kind::kDynamic && config.head_dim < 4) {
    return absl::InvalidArgumentError(
        "\"rope_type\" \"dynamic\" needs a \"head_dim\" of at least 4");
  }
  if (config.rope.kind == RopeConfig::Kind::kLongRope) {
    for (const auto& [name, factors] : {std::pair("short_factor", &config.rope.short_factor),
                                        std::pair("long_factor", &config.rope.long_factor)}) {
      if (static_cast<int64_t>(factors->size()) == config.head_dim / 2) continue;
      return absl::InvalidArgumentError(absl::StrCat(
          "\"", name, "\" of \"longrope\" has ", factors->size(), " numbers; a \"head_dim\" of ",
          config.head_dim, " needs ", config.head_dim / 2));
    }
    // The formula of the attention factor divides by the logarithm of this number.
    if (config.rope.original_max_positions < 2) {
      return absl::InvalidArgumentError(
          "\"longrope\" needs an \"original_max_position_embeddings\" of at least 2");
    }
  }
  if (config.num_heads * config.head_dim > kMaxSize) {
    return absl::InvalidArgumentError(
        absl::StrCat(config.num_heads, " heads of ", config.head_dim, " are more than ", kMaxSize));
  }
  if (static_cast<int64_t>(config.sliding_windows.size()) != config.num_layers) {
    return absl::InvalidArgumentError("sliding_windows needs an entry for each layer");
  }
  if (config.num_experts > 0 &&
      (config.num_experts_per_token < 1 || config.num_experts_per_token > config.num_experts)) {
    return absl::InvalidArgumentError("num_experts_per_token must be from 1 to num_experts");
  }
  return absl::OkStatus();
}

absl::Status Validate(const Gpt2Config& config) {
  return CheckHeads("GPT-2", config.hidden_size, config.num_heads);
}

absl::Status Validate(const BertConfig& config) {
  return CheckHeads("BERT", config.hidden_size, config.num_heads);
}

const char* ActivationName(Activation activation) {
  for (const auto& [name, meaning] : kActivations) {
    if (meaning == activation) return name;
  }
  return kActivations[0].first;
}

// Leaves an existing value unchanged if it has the same meaning, so that a saved config reads as
// before.
void SetActivation(Json& json, const char* name, Activation activation) {
  if (json.contains(name) && json[name].is_string()) {
    for (const auto& [known, meaning] : kActivations) {
      if (json[name] == known && meaning == activation) return;
    }
  }
  json[name] = ActivationName(activation);
}

void WriteCommon(const CommonConfig& config, Json* json) {
  Json& out = *json;
  const char* const type = ModelType(config.architecture);
  out["architectures"] = Json::array({std::string(ArchitectureName(config.architecture))});
  out["model_type"] = type;
  for (const OtherName& each : kOtherNames) {
    if (each.model_type == absl::string_view(type)) out.erase(each.other);
  }
  out["vocab_size"] = config.vocab_size;
  out["initializer_range"] = config.initializer_range;
  out["tie_word_embeddings"] = config.tie_word_embeddings;
  const auto token = [](const std::optional<int64_t>& id) { return id ? Json(*id) : Json(); };
  out["bos_token_id"] = token(config.bos_token_id);
  out["pad_token_id"] = token(config.pad_token_id);
  out["eos_token_id"] = config.eos_token_ids.empty()       ? Json()
                        : config.eos_token_ids.size() == 1 ? Json(config.eos_token_ids[0])
                                                           : Json(config.eos_token_ids);
  // transformers 4 reads the old name, transformers 5 reads both.
  if (!config.dtype.empty()) out["torch_dtype"] = config.dtype;
  out.erase("dtype");
}

Json RopeScaling(const RopeConfig& rope) {
  const Json original = rope.original_max_positions;
  switch (rope.kind) {
    case RopeConfig::Kind::kDefault:
      return nullptr;
    case RopeConfig::Kind::kLinear:
      return {{"rope_type", "linear"}, {"factor", rope.factor}};
    case RopeConfig::Kind::kDynamic:
      return {{"rope_type", "dynamic"}, {"factor", rope.factor}};
    case RopeConfig::Kind::kProportional:
      return {{"rope_type", "proportional"},
              {"factor", rope.factor},
              {"partial_rotary_factor", rope.partial_rotary_factor}};
    case RopeConfig::Kind::kLlama3:
      return {{"rope_type", "llama3"},
              {"factor", rope.factor},
              {"low_freq_factor", rope.low_freq_factor},
              {"high_freq_factor", rope.high_freq_factor},
              {"original_max_position_embeddings", original}};
    case RopeConfig::Kind::kLongRope: {
      Json json = {{"rope_type", "longrope"},
                   {"factor", rope.factor},
                   {"short_factor", rope.short_factor},
                   {"long_factor", rope.long_factor}};
      if (rope.attention_factor.has_value()) json["attention_factor"] = *rope.attention_factor;
      return json;
    }
    case RopeConfig::Kind::kYarn:
      break;
  }
  Json json = {{"rope_type", "yarn"},
               {"factor", rope.factor},
               {"original_max_position_embeddings", original},
               {"beta_fast", rope.beta_fast},
               {"beta_slow", rope.beta_slow}};
  if (rope.attention_factor.has_value()) json["attention_factor"] = *rope.attention_factor;
  if (rope.mscale != 0) json["mscale"] = rope.mscale;
  if (rope.mscale_all_dim != 0) json["mscale_all_dim"] = rope.mscale_all_dim;
  if (!rope.truncate) json["truncate"] = false;
  return json;
}

void Write(const DecoderConfig& config, Json* json) {
  Json& out = *json;
  out["hidden_size"] = config.hidden_size;
  out["intermediate_size"] = config.intermediate_size;
  out["num_hidden_layers"] = config.num_layers;
  out["num_attention_heads"] = config.num_heads;
  out["num_key_value_heads"] = config.num_key_value_heads;
  out["head_dim"] = config.head_dim;
  out["max_position_embeddings"] = config.max_positions;
  out["rms_norm_eps"] = config.rms_norm_eps;
  SetActivation(out, "hidden_act", config.activation);
  out["attention_dropout"] = config.attention_dropout;
  out.erase("rope_parameters");
  out["rope_theta"] = config.rope.theta;
  out.erase("original_max_position_embeddings");
  // transformers 4 looks for this setting of "longrope" only outside.
  if (config.rope.kind == RopeConfig::Kind::kLongRope) {
    out["original_max_position_embeddings"] = config.rope.original_max_positions;
  }
  out["rope_scaling"] = RopeScaling(config.rope);
  if (config.rope.kind == RopeConfig::Kind::kLongRope &&
      config.rope.factor != static_cast<double>(config.max_positions) /
                                static_cast<double>(config.rope.original_max_positions)) {
    // If the original positions are given, transformers 4 ignores a separate factor.
    out["rope_scaling"]["attention_factor"] = LongRopeAttentionFactor(config.rope);
  }
  if (config.architecture == Architecture::kLlamaForCausalLM) {
    out["attention_bias"] = config.qkv_bias;
    out["mlp_bias"] = config.mlp_bias;
  } else {
    const int64_t window =
        *std::max_element(config.sliding_windows.begin(), config.sliding_windows.end());
    out["sliding_window"] = window == 0 ? Json() : Json(window);
    if (config.architecture == Architecture::kQwen2ForCausalLM) {
      out["use_sliding_window"] = window != 0;
      Json types = Json::array();
      for (const int64_t each : config.sliding_windows) {
        types.push_back(each == 0 ? "full_attention" : "sliding_attention");
      }
      out["layer_types"] = types;
    }
  }
  if (config.num_experts > 0) {
    out["num_local_experts"] = config.num_experts;
    out["num_experts_per_tok"] = config.num_experts_per_token;
    out["router_aux_loss_coef"] = config.router_aux_loss_coef;
    out["output_router_logits"] = config.output_router_logits;
    out["router_jitter_noise"] = config.router_jitter_noise;
  }
}

void Write(const Gpt2Config& config, Json* json) {
  Json& out = *json;
  out["n_embd"] = config.hidden_size;
  out["n_inner"] = config.inner_size == 4 * config.hidden_size ? Json() : Json(config.inner_size);
  out["n_layer"] = config.num_layers;
  out["n_head"] = config.num_heads;
  out["n_positions"] = config.max_positions;
  SetActivation(out, "activation_function", config.activation);
  out["layer_norm_epsilon"] = config.layer_norm_epsilon;
  out["embd_pdrop"] = config.embedding_dropout;
  out["attn_pdrop"] = config.attention_dropout;
  out["resid_pdrop"] = config.residual_dropout;
  out["scale_attn_weights"] = config.scale_attention;
  out["scale_attn_by_inverse_layer_idx"] = config.scale_attention_by_layer;
}

void Write(const BertConfig& config, Json* json) {
  Json& out = *json;
  out["hidden_size"] = config.hidden_size;
  out["intermediate_size"] = config.intermediate_size;
  out["num_hidden_layers"] = config.num_layers;
  out["num_attention_heads"] = config.num_heads;
  out["max_position_embeddings"] = config.max_positions;
  out["type_vocab_size"] = config.type_vocab_size;
  SetActivation(out, "hidden_act", config.activation);
  out["layer_norm_eps"] = config.layer_norm_eps;
  out["hidden_dropout_prob"] = config.hidden_dropout;
  out["attention_probs_dropout_prob"] = config.attention_dropout;
  if (config.architecture != Architecture::kBertForSequenceClassification) return;
  out["classifier_dropout"] = config.classifier_dropout;
  constexpr std::array<const char*, 4> kProblems = {
      nullptr, "regression", "single_label_classification", "multi_label_classification"};
  const char* const problem = kProblems[static_cast<size_t>(config.problem)];
  out["problem_type"] = problem == nullptr ? Json() : Json(problem);
  const bool named = out.contains("id2label") && out["id2label"].is_object() &&
                     static_cast<int64_t>(out["id2label"].size()) == config.num_labels;
  out.erase("num_labels");
  if (named) return;
  out["id2label"] = Json::object();
  out["label2id"] = Json::object();
  for (int64_t i = 0; i < config.num_labels; ++i) {
    out["id2label"][absl::StrCat(i)] = absl::StrCat("LABEL_", i);
    out["label2id"][absl::StrCat("LABEL_", i)] = i;
  }
}

// Counts experts for layers that have them. Numbers of a config made in code can have any size.
int64_t NumModules(const ModelConfig& config) {
  const auto* const decoder = std::get_if<DecoderConfig>(&config);
  const int64_t layers =
      std::visit([](const auto& each) -> int64_t { return each.num_layers; }, config);
  if (decoder == nullptr) return layers;
  return layers * std::clamp<int64_t>(decoder->num_experts, 1, kMostModules);
}

}  // namespace

double LongRopeAttentionFactor(const RopeConfig& rope) {
  if (rope.attention_factor.has_value()) return *rope.attention_factor;
  if (rope.factor <= 1) return 1;
  return std::sqrt(1 + std::log(rope.factor) /
                           std::log(static_cast<double>(rope.original_max_positions)));
}

absl::string_view ArchitectureName(Architecture architecture) {
  for (const KnownArchitecture& known : kArchitectures) {
    if (known.architecture == architecture) return known.name;
  }
  return "";
}

const CommonConfig& Common(const ModelConfig& config) {
  return std::visit([](const auto& each) -> const CommonConfig& { return each; }, config);
}

int64_t ContextLength(const ModelConfig& config) {
  const int64_t given = Common(config).max_positions;
  const auto* const decoder = std::get_if<DecoderConfig>(&config);
  if (decoder == nullptr) return given;
  const RopeConfig& rope = decoder->rope;
  if (rope.kind != RopeConfig::Kind::kDynamic && rope.kind != RopeConfig::Kind::kYarn) return given;
  const double stretched = rope.factor * static_cast<double>(rope.original_max_positions);
  return std::max(given, static_cast<int64_t>(std::min<double>(stretched, kMaxSize)));
}

CommonConfig& Common(ModelConfig& config) {
  return std::visit([](auto& each) -> CommonConfig& { return each; }, config);
}

absl::Status ValidateConfig(const ModelConfig& config) {
  const auto sizes_are_valid = [](const auto& each) {
    return each.hidden_size > 0 && each.hidden_size <= kMaxSize && each.num_layers > 0 &&
           each.num_layers <= kMaxLayers && each.num_heads > 0 && each.num_heads <= kMaxSize &&
           each.vocab_size > 0 && each.vocab_size <= kMaxSize && each.max_positions > 0;
  };
  if (!std::visit(sizes_are_valid, config)) {
    return absl::InvalidArgumentError(
        absl::StrCat("hidden_size, num_layers, num_heads, vocab_size and max_positions must be "
                     "from 1 to ",
                     kMaxSize, " (layers: ", kMaxLayers, ")"));
  }
  if (const auto* const decoder = std::get_if<DecoderConfig>(&config);
      decoder != nullptr && (decoder->num_key_value_heads < 1 || decoder->head_dim < 1 ||
                             decoder->intermediate_size < 1)) {
    return absl::InvalidArgumentError(
        "num_key_value_heads, head_dim and intermediate_size must be at least 1");
  }
  if (const int64_t modules = NumModules(config); modules > kMostModules) {
    return absl::InvalidArgumentError(absl::StrCat(
        "the config has ", modules, " layers and experts; at most ", kMostModules, " are known"));
  }
  return std::visit([](const auto& each) { return Validate(each); }, config);
}

absl::StatusOr<ModelConfig> ParseModelConfig(absl::string_view json, absl::string_view source,
                                             const ReadConfigOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(Json parsed, ParseJson(json, source, {.max_bytes = size_t{16} << 20}));
  if (!parsed.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": not an object"));
  }
  for (const std::string& name : options.ignore_settings) {
    if (parsed.contains(name)) continue;
    return absl::InvalidArgumentError(
        absl::StrCat(source, ": \"", Printable(name),
                     "\", named in ignore_settings, is no setting of this file"));
  }
  const std::vector<std::string>& ignored = options.ignore_settings;
  if (std::find(ignored.begin(), ignored.end(), kAutoMap) != ignored.end()) parsed.erase(kAutoMap);
  MUSTER_ASSIGN_OR_RETURN(const Architecture architecture,
                          ChooseArchitecture(parsed, source, options));
  MUSTER_RETURN_IF_ERROR(UseOwnNames(architecture, source, parsed));
  Settings settings(parsed, source);
  ModelConfig config;
  switch (architecture) {
    case Architecture::kGpt2LMHeadModel:
      config = ReadGpt2(settings);
      break;
    case Architecture::kBertForMaskedLM:
    case Architecture::kBertForSequenceClassification:
      config = ReadBert(settings, architecture);
      break;
    default:
      config = ReadDecoder(settings, architecture);
  }
  settings.Finish(options);
  MUSTER_RETURN_IF_ERROR(settings.status());
  if (const absl::Status valid = ValidateConfig(config); !valid.ok()) {
    return absl::Status(valid.code(), absl::StrCat(source, ": ", valid.message()));
  }
  Common(config).source_json = std::string(json);
  return config;
}

absl::StatusOr<ModelConfig> ReadModelConfig(const std::string& given,
                                            const ReadConfigOptions& options) {
  const std::string path = WithHome(given);
  const std::string file = IsFolder(path) ? absl::StrCat(path, "/config.json") : path;
  MUSTER_ASSIGN_OR_RETURN(const std::string text, ReadRegularFile(file, int64_t{16} << 20));
  return ParseModelConfig(text, file, options);
}

std::string ToJson(const ModelConfig& config) {
  Json json = Json::object();
  const std::string& source = Common(config).source_json;
  if (!source.empty()) {
    absl::StatusOr<Json> parsed = ParseJson(source, "config.json");
    if (parsed.ok() && parsed->is_object()) json = *std::move(parsed);
  }
  std::visit(
      [&json](const auto& each) {
        WriteCommon(each, &json);
        Write(each, &json);
      },
      config);
  return absl::StrCat(json.dump(2, ' ', false, Json::error_handler_t::replace), "\n");
}

}  // namespace muster::models
