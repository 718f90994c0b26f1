#include "worker/models/generation_config.h"

#include <cmath>
#include <map>
#include <nlohmann/json.hpp>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/json.h"
#include "base/regular_file.h"
#include "base/status_macros.h"
#include "worker/train/guard.h"

namespace muster::models {
namespace {

using Json = nlohmann::json;

// Settings that do not change tokens.
const std::set<std::string, std::less<>>& HarmlessSettings() {
  static const auto* const settings =
      new std::set<std::string, std::less<>>{"_from_model_config",
                                             "assistant_confidence_threshold",
                                             "assistant_lookbehind",
                                             "bos_token_id",
                                             "decoder_start_token_id",
                                             "disable_compile",
                                             "max_matching_ngram_size",
                                             "num_assistant_tokens",
                                             "num_assistant_tokens_schedule",
                                             "output_attentions",
                                             "output_hidden_states",
                                             "output_logits",
                                             "output_scores",
                                             "prefill_chunk_size",
                                             "remove_invalid_values",
                                             "return_dict_in_generate",
                                             "return_legacy_cache",
                                             "target_lookbehind",
                                             "tokenizer_class",
                                             "transformers_version",
                                             "use_cache",
                                             "use_model_defaults"};
  return *settings;
}

// Settings that do, with the value at which they have no effect.
const std::map<std::string, Json, std::less<>>& OffSettings() {
  static const auto* const settings = new std::map<std::string, Json, std::less<>>{
      {"diversity_penalty", 0.0}, {"guidance_scale", 1.0}, {"is_assistant", false},
      {"num_beam_groups", 1},     {"penalty_alpha", 0.0},  {"token_healing", false},
      {"use_mtp", false},         {"low_memory", false}};
  return *settings;
}

// Settings that only sampling uses, so that files keep them beside "do_sample": false.
const std::set<std::string, std::less<>>& SamplingSettings() {
  static const auto* const settings =
      new std::set<std::string, std::less<>>{"epsilon_cutoff", "eta_cutoff", "min_p", "temperature",
                                             "top_h",          "top_k",      "top_p", "typical_p"};
  return *settings;
}

// The settings that config.json contained before there was generation_config.json. End and padding
// tokens belong to the model (CommonConfig).
constexpr const char* kSettingsInConfigs[] = {"bad_words_ids",
                                              "begin_suppress_tokens",
                                              "diversity_penalty",
                                              "do_sample",
                                              "early_stopping",
                                              "encoder_no_repeat_ngram_size",
                                              "exponential_decay_length_penalty",
                                              "forced_bos_token_id",
                                              "forced_eos_token_id",
                                              "length_penalty",
                                              "min_length",
                                              "no_repeat_ngram_size",
                                              "num_beam_groups",
                                              "num_beams",
                                              "num_return_sequences",
                                              "repetition_penalty",
                                              "suppress_tokens",
                                              "temperature",
                                              "top_k",
                                              "top_p",
                                              "typical_p"};

absl::Status Invalid(absl::string_view source, const std::string& name, const Json& value) {
  return absl::InvalidArgumentError(
      absl::StrCat(source, ": \"", Printable(name), "\" is ",
                   Printable(value.dump(-1, ' ', false, Json::error_handler_t::replace), 60),
                   ", which has no meaning there"));
}

bool ToTokens(const Json& value, std::vector<int64_t>* tokens) {
  for (const Json& id : value.is_array() ? value : Json::array({value})) {
    if (!id.is_number_integer() || (id.is_number_unsigned() && id.get<uint64_t>() >> 31 != 0)) {
      return false;
    }
    if (id.get<int64_t>() >= 0) tokens->push_back(id.get<int64_t>());
  }
  return true;
}

bool ToCount(const Json& value, int64_t* to) {
  if (!value.is_number_unsigned() || value.get<uint64_t>() >> 31 != 0) return false;
  *to = value.get<int64_t>();
  return true;
}

bool ToNumber(const Json& value, double* to) {
  if (!value.is_number() || !std::isfinite(value.get<double>())) return false;
  *to = value.get<double>();
  return true;
}

bool ToToken(const Json& value, std::optional<int64_t>* to) {
  std::vector<int64_t> tokens;
  if (!ToTokens(value, &tokens) || value.is_array() || tokens.empty()) return false;
  *to = tokens[0];
  return true;
}

bool ToWords(const Json& value, std::vector<std::vector<int64_t>>* words) {
  if (!value.is_array()) return false;
  for (const Json& word : value) {
    std::vector<int64_t>& tokens = words->emplace_back();
    if (!word.is_array() || !ToTokens(word, &tokens) || tokens.size() != word.size() ||
        tokens.empty()) {
      return false;
    }
  }
  return true;
}

bool ToBiases(const Json& value, std::map<std::vector<int64_t>, double>* biases) {
  if (!value.is_array()) return false;
  for (const Json& pair : value) {
    std::vector<std::vector<int64_t>> words;
    double bias = 0;
    if (!pair.is_array() || pair.size() != 2 || !ToWords(Json::array({pair[0]}), &words) ||
        !ToNumber(pair[1], &bias)) {
      return false;
    }
    (*biases)[words[0]] = bias;
  }
  return true;
}

bool ToTexts(const Json& value, std::vector<std::string>* texts) {
  for (const Json& text : value.is_array() ? value : Json::array({value})) {
    if (!text.is_string() || text.get<std::string>().empty()) return false;
    texts->push_back(text.get<std::string>());
  }
  return true;
}

bool ToFlag(const Json& value, bool* to) {
  if (!value.is_boolean()) return false;
  *to = value.get<bool>();
  return true;
}

// Whether `name` is one of Muster's settings; `*valid`: whether its value is meaningful.
bool Apply(const std::string& name, const Json& value, GenerateOptions* options, bool* valid) {
  ScoreRules& rules = options->rules;
  const std::map<std::string, int64_t*> counts = {
      {"max_new_tokens", &options->max_new_tokens},
      {"num_beams", &options->num_beams},
      {"num_return_sequences", &options->num_return_sequences},
      {"no_repeat_ngram_size", &rules.no_repeat_ngram_size},
      {"encoder_no_repeat_ngram_size", &rules.encoder_no_repeat_ngram_size},
      {"min_length", &rules.min_length},
      {"min_new_tokens", &rules.min_new_tokens},
      {"top_k", &rules.top_k}};
  const std::map<std::string, double*> numbers = {
      {"length_penalty", &options->length_penalty},
      {"repetition_penalty", &rules.repetition_penalty},
      {"encoder_repetition_penalty", &rules.encoder_repetition_penalty},
      {"temperature", &rules.temperature},
      {"top_h", &rules.top_h},
      {"top_p", &rules.top_p},
      {"min_p", &rules.min_p},
      {"typical_p", &rules.typical_p},
      {"epsilon_cutoff", &rules.epsilon_cutoff},
      {"eta_cutoff", &rules.eta_cutoff}};
  const std::map<std::string, std::vector<int64_t>*> tokens = {
      {"begin_suppress_tokens", &rules.begin_suppress_tokens},
      {"forced_eos_token_id", &rules.forced_eos_token_id},
      {"suppress_tokens", &rules.suppress_tokens}};
  if (const auto count = counts.find(name); count != counts.end()) {
    // The only count that transformers refuses if it is 0.
    *valid =
        ToCount(value, count->second) && (name != "max_new_tokens" || options->max_new_tokens > 0);
  } else if (const auto number = numbers.find(name); number != numbers.end()) {
    // Muster uses 0 for "no rule".
    *valid = ToNumber(value, number->second) && (name != "top_h" || rules.top_h > 0);
  } else if (const auto list = tokens.find(name); list != tokens.end()) {
    *valid = ToTokens(value, list->second);
  } else if (name == "forced_bos_token_id") {
    *valid = ToToken(value, &rules.forced_bos_token_id);
  } else if (name == "bad_words_ids") {
    *valid = ToWords(value, &rules.bad_words_ids);
  } else if (name == "sequence_bias") {
    *valid = ToBiases(value, &rules.sequence_bias);
  } else if (name == "exponential_decay_length_penalty") {
    ScoreRules::LengthDecay& decay = rules.exponential_decay_length_penalty.emplace();
    *valid = value.is_array() && value.size() == 2 && ToCount(value[0], &decay.start) &&
             ToNumber(value[1], &decay.factor);
  } else if (name == "stop_strings") {
    *valid = ToTexts(value, &options->stop_strings);
  } else if (name == "eos_token_id") {
    *valid = ToTokens(value, &options->eos_token_ids.emplace());
  } else if (name == "pad_token_id") {
    std::vector<int64_t> ids;
    *valid = ToTokens(value, &ids) && ids.size() <= 1;
    if (!ids.empty()) options->pad_token_id = ids[0];
  } else if (name == "renormalize_logits") {
    *valid = ToFlag(value, &rules.renormalize_logits);
  } else if (name == "early_stopping") {
    *valid = value.is_boolean() || value == "never";
    options->early_stopping = value == "never" ? EarlyStopping::kNever
                              : value == true  ? EarlyStopping::kWhenFull
                                               : EarlyStopping::kWhenUnlikely;
  } else {
    return false;
  }
  return true;
}

}  // namespace

absl::StatusOr<GenerateOptions> ParseGenerationConfig(absl::string_view json,
                                                      absl::string_view source,
                                                      std::optional<bool> do_sample,
                                                      int64_t max_new_tokens) {
  MUSTER_ASSIGN_OR_RETURN(const Json parsed,
                          ParseJson(json, source, {.max_bytes = size_t{16} << 20}));
  if (!parsed.is_object()) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": not an object"));
  }
  const auto is_given = [&parsed](const char* name) {
    return parsed.contains(name) && !parsed[name].is_null();
  };
  GenerateOptions options = {.max_new_tokens = max_new_tokens};
  if (is_given("do_sample") && !ToFlag(parsed["do_sample"], &options.do_sample)) {
    return Invalid(source, "do_sample", parsed["do_sample"]);
  }
  options.do_sample = do_sample.value_or(options.do_sample);
  // "max_length" is skipped: in transformers it includes the prompt, while Muster's default counts
  // new tokens.
  for (const auto& [name, value] : parsed.items()) {
    if (value.is_null() || name == "do_sample" || name == "max_length" ||
        HarmlessSettings().count(name) != 0)
      continue;
    if (!options.do_sample && SamplingSettings().count(name) != 0) continue;
    bool valid = true;
    if (Apply(name, value, &options, &valid)) {
      if (!valid) return Invalid(source, name, value);
      continue;
    }
    // Muster decides how keys and values are kept, but not whether they are rounded.
    if (name == "cache_implementation" && value != "quantized") continue;
    const auto off = OffSettings().find(name);
    if (off != OffSettings().end() && value == off->second) continue;
    return absl::UnimplementedError(
        absl::StrCat(source, ": Muster does not have the setting \"", Printable(name), "\""));
  }
  // transformers' default, also for null.
  if (options.do_sample && !is_given("top_k")) options.rules.top_k = 50;
  // As in transformers, min_new_tokens replaces min_length.
  if (is_given("min_new_tokens")) options.rules.min_length = 0;
  const absl::Status valid = Guard([&] { CheckRules(options.rules); });
  if (!valid.ok()) {
    return absl::InvalidArgumentError(absl::StrCat(source, ": ", valid.message()));
  }
  return options;
}

absl::StatusOr<GenerateOptions> ReadGenerationConfig(const std::string& folder,
                                                     std::optional<bool> do_sample,
                                                     int64_t max_new_tokens) {
  const std::string path = absl::StrCat(folder, "/generation_config.json");
  const absl::StatusOr<std::string> text = ReadRegularFile(path, int64_t{16} << 20);
  if (text.ok()) return ParseGenerationConfig(*text, path, do_sample, max_new_tokens);
  if (!absl::IsNotFound(text.status())) return text.status();
  const std::string config_path = absl::StrCat(folder, "/config.json");
  const absl::StatusOr<std::string> config = ReadRegularFile(config_path, int64_t{16} << 20);
  if (absl::IsNotFound(config.status())) {
    return ParseGenerationConfig("{}", config_path, do_sample, max_new_tokens);
  }
  if (!config.ok()) return config.status();
  MUSTER_ASSIGN_OR_RETURN(const Json parsed,
                          ParseJson(*config, config_path, {.max_bytes = size_t{16} << 20}));
  Json settings = Json::object();
  for (const char* const name : kSettingsInConfigs) {
    if (parsed.is_object() && parsed.contains(name)) settings[name] = parsed[name];
  }
  return ParseGenerationConfig(settings.dump(-1, ' ', false, Json::error_handler_t::replace),
                               config_path, do_sample, max_new_tokens);
}

}  // namespace muster::models
