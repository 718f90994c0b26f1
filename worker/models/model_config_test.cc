#include "worker/models/model_config.h"

#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/mutate.h"
#include "base/peak_growth.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"

namespace muster::models {
namespace {

using Json = nlohmann::json;

const Json kLlama = {{"model_type", "llama"},    {"hidden_size", 32},
                     {"intermediate_size", 48},  {"num_hidden_layers", 2},
                     {"num_attention_heads", 4}, {"vocab_size", 100}};

DecoderConfig Decoder(const Json& json) {
  const auto config = ParseModelConfig(json.dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  return config.ok() ? std::get<DecoderConfig>(*config) : DecoderConfig();
}

Json With(Json json, const Json& more) {
  json.update(more);
  return json;
}

std::string ErrorOf(const Json& json, const ReadConfigOptions& options = {}) {
  const auto config = ParseModelConfig(json.dump(), "config.json", options);
  return config.ok() ? "" : std::string(config.status().message());
}

std::vector<std::string> RecordedFolders() {
  std::vector<std::string> folders;
  for (const char* const kind : {"hf_models", "hf_train", "hf_generate"}) {
    for (const Json& test_case : testing_support::GoldenCases(kind)) {
      const std::string dir = test_case["in"]["dir"];
      if (folders.empty() || folders.back() != dir) folders.push_back(dir);
    }
  }
  return folders;
}

TEST(ParseModelConfig, EveryRecordedConfig_SurvivesToJson) {
  for (const std::string& dir : RecordedFolders()) {
    SCOPED_TRACE(dir);
    const auto config = ReadModelConfig(testing_support::GoldenPath(dir));
    ASSERT_TRUE(config.ok()) << config.status();
    const std::string json = ToJson(*config);
    const auto again = ParseModelConfig(json, "again");
    ASSERT_TRUE(again.ok()) << again.status() << json;
    EXPECT_EQ(ToJson(*again), json);
    EXPECT_EQ(Common(*again).vocab_size, Common(*config).vocab_size);
  }
}

TEST(ParseModelConfig, RopeOfTransformers4And5_IsTheSame) {
  const DecoderConfig four = Decoder(
      With(kLlama, {{"rope_theta", 5e5}, {"rope_scaling", {{"type", "linear"}, {"factor", 4.0}}}}));
  const DecoderConfig five = Decoder(
      With(kLlama,
           {{"rope_parameters", {{"rope_theta", 5e5}, {"rope_type", "linear"}, {"factor", 4.0}}}}));
  for (const DecoderConfig& config : {four, five}) {
    EXPECT_EQ(config.rope.theta, 5e5);
    EXPECT_EQ(config.rope.kind, RopeConfig::Kind::kLinear);
    EXPECT_EQ(config.rope.factor, 4);
  }
}

TEST(ParseModelConfig, StretchedPositions_LengthenTheContext) {
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 4.0}, {"truncate", false}, {"mscale", 0.7}};
  const Json with_yarn = With(kLlama, {{"max_position_embeddings", 64}, {"rope_scaling", yarn}});
  const DecoderConfig config = Decoder(with_yarn);
  EXPECT_EQ(config.rope.kind, RopeConfig::Kind::kYarn);
  EXPECT_EQ(config.rope.original_max_positions, 64);
  EXPECT_FALSE(config.rope.truncate);
  EXPECT_EQ(ContextLength(config), 256);
  // In some files max_position_embeddings includes the stretched positions already.
  EXPECT_EQ(ContextLength(Decoder(With(with_yarn, {{"original_max_position_embeddings", 16}}))),
            64);
  const DecoderConfig dynamic =
      Decoder(With(kLlama, {{"max_position_embeddings", 64},
                            {"rope_scaling", {{"type", "dynamic"}, {"factor", 2.0}}}}));
  EXPECT_EQ(ContextLength(dynamic), 128);
  for (const DecoderConfig& each : {config, dynamic}) {
    const std::string json = ToJson(each);
    const auto again = ParseModelConfig(json, "again");
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(ToJson(*again), json);
    EXPECT_EQ(ContextLength(*again), ContextLength(each));
  }
}

// transformers 5.17 computes this.
TEST(ParseModelConfig, YarnWithNullFactor_StretchesByThePositions) {
  const Json yarn = {{"rope_type", "yarn"},
                     {"factor", nullptr},
                     {"truncate", nullptr},
                     {"original_max_position_embeddings", 16}};
  const DecoderConfig config =
      Decoder(With(kLlama, {{"max_position_embeddings", 64}, {"rope_parameters", yarn}}));
  EXPECT_EQ(config.rope.factor, 4);
  EXPECT_FALSE(config.rope.truncate);
}

TEST(ParseModelConfig, LongRope_StretchesByTheFactorOrByThePositions) {
  const Json rope = {
      {"type", "longrope"}, {"short_factor", {1.0, 1.0, 1.0, 1.5}}, {"long_factor", {1, 2, 3, 4}}};
  const Json json = With(kLlama, {{"max_position_embeddings", 64},
                                  {"original_max_position_embeddings", 16},
                                  {"rope_scaling", rope}});
  const DecoderConfig config = Decoder(json);
  EXPECT_EQ(config.rope.kind, RopeConfig::Kind::kLongRope);
  EXPECT_EQ(config.rope.original_max_positions, 16);
  EXPECT_EQ(config.rope.factor, 4);
  EXPECT_EQ(config.rope.long_factor, (std::vector<double>{1, 2, 3, 4}));
  EXPECT_EQ(ContextLength(config), 64);
  Json given = rope;
  given.update({{"factor", 2.0}, {"attention_factor", 1.25}});
  const DecoderConfig other = Decoder(With(json, {{"rope_scaling", given}}));
  EXPECT_EQ(other.rope.factor, 2);
  EXPECT_EQ(other.rope.attention_factor, 1.25);
  // transformers 4 computes the factor from the positions, which gives the value derived from this
  // one.
  given.erase("attention_factor");
  const DecoderConfig own_factor = Decoder(With(json, {{"rope_scaling", given}}));
  EXPECT_EQ(own_factor.rope.attention_factor, std::nullopt);
  EXPECT_EQ(Json::parse(ToJson(own_factor))["rope_scaling"]["attention_factor"],
            std::sqrt(1 + std::log(2.0) / std::log(16.0)));
  EXPECT_FALSE(Json::parse(ToJson(config))["rope_scaling"].contains("attention_factor"));
  for (const DecoderConfig& each : {config, other, own_factor}) {
    const std::string text = ToJson(each);
    const auto again = ParseModelConfig(text, "again");
    ASSERT_TRUE(again.ok()) << again.status();
    EXPECT_EQ(ToJson(*again), text);
    EXPECT_EQ(std::get<DecoderConfig>(*again).rope.original_max_positions, 16);
  }
}

// Quirk hf_generate/s005: transformers refuses a hidden size that is no multiple of the heads.
TEST(ParseModelConfig, HeadDim_DecidesWhereTheQuotientIsNotWhole) {
  const DecoderConfig config = Decoder(
      With(kLlama, {{"num_attention_heads", 6}, {"num_key_value_heads", 3}, {"head_dim", 10}}));
  EXPECT_EQ(config.head_dim, 10);
  EXPECT_NE(ErrorOf(With(kLlama, {{"num_attention_heads", 6}})).find("there is no \"head_dim\""),
            std::string::npos);
}

TEST(ParseModelConfig, Qwen2_HasAWindowInTheLayersThatTheConfigSays) {
  const Json qwen = With(kLlama, {{"model_type", "qwen2"},
                                  {"num_hidden_layers", 3},
                                  {"num_key_value_heads", 2},
                                  {"sliding_window", 4},
                                  {"max_window_layers", 1}});
  EXPECT_EQ(Decoder(qwen).sliding_windows, (std::vector<int64_t>{0, 0, 0}));
  EXPECT_EQ(Decoder(With(qwen, {{"use_sliding_window", true}})).sliding_windows,
            (std::vector<int64_t>{0, 4, 4}));
  EXPECT_EQ(Decoder(With(qwen, {{"use_sliding_window", true},
                                {"layer_types",
                                 {"sliding_attention", "full_attention", "full_attention"}}}))
                .sliding_windows,
            (std::vector<int64_t>{4, 0, 0}));
  EXPECT_TRUE(Decoder(qwen).qkv_bias);
}

// transformers' classes distinguish a missing key from null.
TEST(ParseModelConfig, MissingKeys_GetTheClassesDefaults) {
  Json qwen = With(kLlama, {{"model_type", "qwen2"},
                            {"num_attention_heads", 4},
                            {"num_key_value_heads", nullptr},
                            {"use_sliding_window", true},
                            {"max_window_layers", 1}});
  EXPECT_EQ(Decoder(qwen).num_key_value_heads, 4);
  EXPECT_EQ(Decoder(qwen).sliding_windows, (std::vector<int64_t>{0, 4096}));
  EXPECT_EQ(Decoder(With(qwen, {{"sliding_window", nullptr}})).sliding_windows,
            (std::vector<int64_t>{0, 0}));
  qwen.erase("num_key_value_heads");
  EXPECT_EQ(
      Decoder(With(qwen, {{"num_attention_heads", 32}, {"hidden_size", 64}})).num_key_value_heads,
      32);
  const Json heads = {{"num_attention_heads", 16}};
  const Json mistral = With(With(kLlama, {{"model_type", "mistral"}}), heads);
  EXPECT_EQ(Decoder(mistral).num_key_value_heads, 8);
  EXPECT_EQ(Decoder(mistral).sliding_windows, (std::vector<int64_t>{4096, 4096}));
  const Json mixtral = With(With(kLlama, {{"model_type", "mixtral"}}), heads);
  EXPECT_EQ(Decoder(mixtral).sliding_windows, (std::vector<int64_t>{0, 0}));
}

// Returns bos_token_id, eos_token_id and pad_token_id; -1: none.
std::vector<int64_t> TokensOf(const Json& json) {
  const auto config = ParseModelConfig(json.dump(), "config.json");
  EXPECT_TRUE(config.ok()) << config.status();
  if (!config.ok()) return {};
  const CommonConfig& common = Common(*config);
  EXPECT_LE(common.eos_token_ids.size(), 1u);
  return {common.bos_token_id.value_or(-1),
          common.eos_token_ids.empty() ? -1 : common.eos_token_ids[0],
          common.pad_token_id.value_or(-1)};
}

TEST(ParseModelConfig, MissingTokens_AreTheClassesButForTheEnd_AndNullIsNone) {
  const std::vector<std::pair<Json, std::vector<int64_t>>> cases = {
      {kLlama, {1, -1, -1}},
      {With(kLlama, {{"model_type", "mistral"}, {"num_key_value_heads", 2}}), {1, -1, -1}},
      {With(kLlama, {{"model_type", "mixtral"}, {"num_key_value_heads", 2}}), {1, -1, -1}},
      {With(kLlama, {{"model_type", "qwen2"}, {"num_key_value_heads", 2}}), {-1, -1, -1}},
      {{{"model_type", "gpt2"}}, {50'256, -1, -1}},
      // There is no token beyond the vocabulary.
      {{{"model_type", "gpt2"}, {"vocab_size", 50'256}}, {-1, -1, -1}},
      {With(kLlama, {{"vocab_size", 1}}), {-1, -1, -1}},
      {With(kLlama, {{"architectures", {"BertForMaskedLM"}}, {"model_type", "bert"}}),
       {-1, -1, 0}}};
  for (const auto& [json, tokens] : cases) {
    SCOPED_TRACE(json.dump());
    EXPECT_EQ(TokensOf(json), tokens);
    const Json none = With(
        json, {{"bos_token_id", nullptr}, {"eos_token_id", nullptr}, {"pad_token_id", nullptr}});
    EXPECT_EQ(TokensOf(none), (std::vector<int64_t>{-1, -1, -1}));
    EXPECT_EQ(TokensOf(With(json, {{"eos_token_id", -1}, {"bos_token_id", -1}})),
              (std::vector<int64_t>{-1, -1, tokens[2]}));
    // A saved config contains the value, whichever class reads it.
    const auto config = ParseModelConfig(json.dump(), "config.json");
    ASSERT_TRUE(config.ok()) << config.status();
    EXPECT_EQ(TokensOf(Json::parse(ToJson(*config))), tokens);
  }
}

TEST(ParseModelConfig, Proportional_TurnsAShareOfThePairs) {
  const DecoderConfig inside = Decoder(With(
      kLlama, {{"partial_rotary_factor", 0.5},
               {"rope_parameters",
                {{"rope_type", "proportional"}, {"partial_rotary_factor", 0.25}, {"factor", 2}}}}));
  EXPECT_EQ(inside.rope.kind, RopeConfig::Kind::kProportional);
  EXPECT_EQ(inside.rope.partial_rotary_factor, 0.25);
  EXPECT_EQ(inside.rope.factor, 2);
  const DecoderConfig outside =
      Decoder(With(kLlama, {{"partial_rotary_factor", 0.5},
                            {"rope_parameters", {{"rope_type", "proportional"}}}}));
  EXPECT_EQ(outside.rope.partial_rotary_factor, 0.5);
  EXPECT_EQ(outside.rope.factor, 1);
  for (const DecoderConfig& each : {inside, outside}) {
    const std::string json = ToJson(each);
    const DecoderConfig again = Decoder(Json::parse(json));
    EXPECT_EQ(ToJson(again), json);
    EXPECT_EQ(again.rope.partial_rotary_factor, each.rope.partial_rotary_factor);
  }
  EXPECT_NE(ErrorOf(With(kLlama, {{"rope_parameters",
                                   {{"rope_type", "proportional"}, {"partial_rotary_factor", 2}}}}))
                .find("partial_rotary_factor\" is 2, not a number from 0 to 1"),
            std::string::npos);
}

// transformers 5.17 refuses a null for a number of its class, or fails when it computes with it.
TEST(ParseModelConfig, NullWhereANumberMustBe_IsRefusedByName) {
  const Json gpt2 = {{"model_type", "gpt2"}};
  const Json qwen = With(kLlama, {{"model_type", "qwen2"}, {"num_key_value_heads", 2}});
  const Json mixtral = With(kLlama, {{"model_type", "mixtral"}, {"num_key_value_heads", 2}});
  const Json bert = With(kLlama, {{"architectures", {"BertForMaskedLM"}}, {"model_type", "bert"}});
  const std::vector<std::pair<Json, std::vector<std::string>>> cases = {
      {kLlama,
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers",
        "num_attention_heads", "max_position_embeddings", "initializer_range", "rms_norm_eps",
        "rope_theta", "hidden_act"}},
      {qwen, {"max_window_layers", "attention_dropout", "head_dim"}},
      {mixtral,
       {"num_local_experts", "num_experts", "num_experts_per_tok", "router_aux_loss_coef",
        "router_jitter_noise"}},
      {gpt2,
       {"n_embd", "n_layer", "n_head", "n_positions", "layer_norm_epsilon", "embd_pdrop",
        "attn_pdrop", "resid_pdrop", "activation_function"}},
      {bert,
       {"type_vocab_size", "layer_norm_eps", "hidden_dropout_prob",
        "attention_probs_dropout_prob"}}};
  for (const auto& [json, names] : cases) {
    for (const std::string& name : names) {
      // The error contains the class's own name of the setting.
      const std::string shown = name == "num_experts" ? "num_local_experts" : name;
      EXPECT_NE(ErrorOf(With(json, {{name, nullptr}})).find("\"" + shown + "\" is null"),
                std::string::npos)
          << name << ": " << ErrorOf(With(json, {{name, nullptr}}));
    }
  }
  // If the class reads null as none.
  for (const auto& [json, name] :
       std::vector<std::pair<Json, std::string>>{{kLlama, "num_key_value_heads"},
                                                 {kLlama, "head_dim"},
                                                 {kLlama, "attention_dropout"},
                                                 {qwen, "num_key_value_heads"},
                                                 {mixtral, "head_dim"},
                                                 {mixtral, "sliding_window"},
                                                 {gpt2, "n_inner"},
                                                 {bert, "classifier_dropout"}}) {
    EXPECT_EQ(ErrorOf(With(json, {{name, nullptr}})), "") << name;
  }
}

TEST(ParseModelConfig, NullInRopeParameters_IsRefusedWhereItIsComputedWith) {
  const Json yarn = {{"rope_type", "yarn"}, {"factor", 2.0}};
  const Json proportional = {{"rope_type", "proportional"}};
  const Json plain = {{"rope_type", "default"}};
  for (const auto& [rope, name] :
       std::vector<std::pair<Json, std::string>>{{yarn, "original_max_position_embeddings"},
                                                 {yarn, "rope_theta"},
                                                 {yarn, "partial_rotary_factor"},
                                                 {yarn, "rope_type"},
                                                 {proportional, "factor"},
                                                 {proportional, "partial_rotary_factor"},
                                                 {plain, "rope_theta"}}) {
    const std::string error =
        ErrorOf(With(kLlama, {{"rope_parameters", With(rope, {{name, nullptr}})}}));
    EXPECT_NE(error.find("\"rope_parameters." + name + "\" is null"), std::string::npos)
        << rope << " " << name << ": " << error;
  }
  for (const auto& [rope, name] :
       std::vector<std::pair<Json, std::string>>{{yarn, "attention_factor"},
                                                 {yarn, "mscale"},
                                                 {yarn, "beta_fast"},
                                                 {yarn, "type"},
                                                 {plain, "original_max_position_embeddings"},
                                                 {plain, "partial_rotary_factor"}}) {
    EXPECT_EQ(ErrorOf(With(kLlama, {{"rope_parameters", With(rope, {{name, nullptr}})}})), "")
        << rope << " " << name;
  }
  // An inner value counts.
  EXPECT_EQ(Decoder(With(kLlama, {{"rope_theta", nullptr},
                                  {"rope_parameters", With(plain, {{"rope_theta", 5e5}})}}))
                .rope.theta,
            5e5);
  EXPECT_NE(ErrorOf(With(kLlama, {{"original_max_position_embeddings", nullptr},
                                  {"rope_parameters", yarn}}))
                .find("\"original_max_position_embeddings\" is null"),
            std::string::npos);
}

// In transformers 5.17 the setting reaches attention, and null removes the causal mask.
TEST(ParseModelConfig, IsCausal_IsAsTheArchitectureIsOrRefused) {
  const Json mistral = With(kLlama, {{"model_type", "mistral"}, {"num_key_value_heads", 2}});
  const Json gpt2 = {{"model_type", "gpt2"}};
  const Json bert = With(kLlama, {{"architectures", {"BertForMaskedLM"}}, {"model_type", "bert"}});
  const Json classifier = With(bert, {{"architectures", {"BertForSequenceClassification"}}});
  for (const Json& json : {kLlama, mistral, gpt2, bert, classifier}) {
    SCOPED_TRACE(json.dump());
    const bool causal = json["model_type"] != "bert";
    EXPECT_EQ(ErrorOf(json), "");
    EXPECT_EQ(ErrorOf(With(json, {{"is_causal", causal}})), "");
    EXPECT_NE(
        ErrorOf(With(json, {{"is_causal", !causal}}))
            .find(causal ? "\"is_causal\" is false; of this architecture Muster has only true"
                         : "\"is_causal\" is true; of this architecture Muster has only false"),
        std::string::npos);
    EXPECT_NE(ErrorOf(With(json, {{"is_causal", nullptr}})).find("\"is_causal\" is null"),
              std::string::npos);
  }
}

// Otherwise the setting, and with it the model's computation, would be lost silently.
TEST(ParseModelConfig, IgnoredSettingThatMusterKnows_IsRefusedByName) {
  const Json gpt2 = {{"model_type", "gpt2"},
                     {"scale_attn_weights", false},
                     {"activation_function", "relu"},
                     {"hidden_size", 48},
                     {"add_cross_attention", false},
                     {"own_setting", 7},
                     {"auto_map", {{"AutoModel", "own.Own"}}}};
  EXPECT_EQ(ErrorOf(gpt2, {.ignore_settings = {"own_setting", "auto_map"}}), "");
  // "hidden_size" is another name for "n_embd".
  for (const char* const name :
       {"scale_attn_weights", "activation_function", "hidden_size", "add_cross_attention"}) {
    EXPECT_EQ(ErrorOf(gpt2, {.ignore_settings = {"own_setting", "auto_map", name}}),
              std::string("config.json: \"") + name +
                  "\", named in ignore_settings, is a setting that Muster knows, and it counts; "
                  "change config.json if it is to have another value");
  }
  EXPECT_EQ(ErrorOf(gpt2, {.ignore_settings = {"own_setting", "auto_map", "foo"}}),
            "config.json: \"foo\", named in ignore_settings, is no setting of this file");
  EXPECT_NE(ErrorOf(With(kLlama, {{"quantization_config", {{"bits", 4}}}}),
                    {.ignore_settings = {"quantization_config"}}),
            "");
}

// transformers 5.17 refuses them; transformers 4 reads them as Python does.
TEST(ParseModelConfig, NullOfAFlagOrOfTheNumberOfLabels_IsRefusedByName) {
  const Json mixtral = With(kLlama, {{"model_type", "mixtral"}, {"num_key_value_heads", 2}});
  const Json qwen = With(kLlama, {{"model_type", "qwen2"}, {"num_key_value_heads", 2}});
  const Json gpt2 = {{"model_type", "gpt2"}};
  const Json bert = With(kLlama, {{"architectures", {"BertForMaskedLM"}}, {"model_type", "bert"}});
  const Json classifier = With(bert, {{"architectures", {"BertForSequenceClassification"}}});
  const std::vector<std::pair<Json, std::vector<std::string>>> cases = {
      {kLlama,
       {"tie_word_embeddings", "attention_bias", "mlp_bias", "use_cache", "is_encoder_decoder",
        "num_labels"}},
      {mixtral, {"tie_word_embeddings", "output_router_logits", "num_labels"}},
      {qwen, {"tie_word_embeddings", "use_sliding_window", "use_cache", "num_labels"}},
      {gpt2,
       {"tie_word_embeddings", "scale_attn_weights", "scale_attn_by_inverse_layer_idx",
        "reorder_and_upcast_attn", "add_cross_attention", "summary_use_proj", "num_labels"}},
      {bert,
       {"tie_word_embeddings", "is_decoder", "add_cross_attention", "is_encoder_decoder",
        "position_embedding_type", "num_labels"}},
      {classifier, {"tie_word_embeddings", "num_labels"}}};
  for (const auto& [json, names] : cases) {
    EXPECT_EQ(ErrorOf(json), "");
    for (const std::string& name : names) {
      const std::string error = ErrorOf(With(json, {{name, nullptr}}));
      EXPECT_NE(error.find("\"" + name + "\" is null"), std::string::npos) << name << ": " << error;
    }
  }
  EXPECT_EQ(ErrorOf(With(bert, {{"position_embedding_type", "absolute"}})), "");
  EXPECT_NE(ErrorOf(With(bert, {{"position_embedding_type", "relative_key"}})), "");
  // For other classes these are unknown settings like any others.
  EXPECT_EQ(ErrorOf(With(qwen, {{"attention_bias", nullptr}, {"is_decoder", nullptr}})), "");
}

TEST(ParseModelConfig, MissingSizes_AreTheClasses) {
  const DecoderConfig llama = Decoder({{"architectures", {"LlamaForCausalLM"}}});
  EXPECT_EQ(llama.vocab_size, 32'000);
  EXPECT_EQ(llama.hidden_size, 4096);
  EXPECT_EQ(llama.intermediate_size, 11'008);
  EXPECT_EQ(llama.num_layers, 32);
  EXPECT_EQ(llama.num_heads, 32);
  EXPECT_EQ(Decoder({{"model_type", "qwen2"}}).vocab_size, 151'936);
  EXPECT_EQ(Decoder({{"model_type", "mixtral"}}).intermediate_size, 14'336);
  const auto gpt2 = ParseModelConfig(R"({"model_type": "gpt2", "n_layer": 2})", "config.json");
  ASSERT_TRUE(gpt2.ok()) << gpt2.status();
  EXPECT_EQ(std::get<Gpt2Config>(*gpt2).hidden_size, 768);
  EXPECT_EQ(std::get<Gpt2Config>(*gpt2).num_layers, 2);
}

TEST(ParseModelConfig, OtherNamesOfTheClass_AreUnderstoodAndLeftOut) {
  const std::string json =
      R"({"model_type": "gpt2", "hidden_size": 24, "num_attention_heads": 3, "n_embd": 24})";
  const auto config = ParseModelConfig(json, "config.json");
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(std::get<Gpt2Config>(*config).num_heads, 3);
  const Json again = Json::parse(ToJson(*config));
  EXPECT_EQ(again["n_embd"], 24);
  EXPECT_FALSE(again.contains("hidden_size"));
  const DecoderConfig mixtral = Decoder(
      With(kLlama, {{"model_type", "mixtral"}, {"num_key_value_heads", 2}, {"num_experts", 4}}));
  EXPECT_EQ(mixtral.num_experts, 4);
}

// Folders on the Hub contain such settings.
TEST(ParseModelConfig, WhatIsNullOrChangesNothing_IsNotRefused) {
  EXPECT_EQ(ErrorOf(With(kLlama, {{"some_setting", nullptr},
                                  {"max_sequence_length", 2048},
                                  {"is_llama_config", true},
                                  {"transformers.js_config", {{"dtype", "q4"}}},
                                  {"_num_labels", 3},
                                  {"num_labels", 1}})),
            "");
  EXPECT_EQ(ErrorOf(With(kLlama, {{"model_type", "qwen2"},
                                  {"num_key_value_heads", 2},
                                  {"use_mrope", false},
                                  {"attention_bias", false}})),
            "");
}

TEST(ParseModelConfig, LabelsAreCountedByTheNumber_ElseByTheirNames) {
  const Json bert =
      With(kLlama, {{"model_type", "bert"}, {"id2label", {{"0", "a"}, {"1", "b"}, {"2", "c"}}}});
  const ReadConfigOptions classifier = {.architecture = "BertForSequenceClassification"};
  const auto labels = [&](const Json& json) {
    const auto config = ParseModelConfig(json.dump(), "config.json", classifier);
    EXPECT_TRUE(config.ok()) << config.status();
    return config.ok() ? std::get<BertConfig>(*config).num_labels : -1;
  };
  EXPECT_EQ(labels(bert), 3);
  EXPECT_EQ(labels(With(kLlama, {{"model_type", "bert"}})), 2);
  // transformers 5.17 reads it as regression, although there are names of classes.
  EXPECT_EQ(labels(With(bert, {{"num_labels", 1}})), 1);
  EXPECT_EQ(labels(With(bert, {{"num_labels", 1}, {"problem_type", "regression"}})), 1);
  EXPECT_NE(ErrorOf(With(bert, {{"id2label", {{"0", "a"}}},
                                {"problem_type", "single_label_classification"}}),
                    classifier)
                .find("only one label"),
            std::string::npos);
}

TEST(ParseModelConfig, WhatMusterCannotCompute_IsRefusedByName) {
  const std::vector<std::pair<Json, std::string>> cases = {
      {{{"attention_sinks", 4}}, "does not know the setting \"attention_sinks\""},
      {{{"rope_scaling", {{"rope_type", "su"}, {"long_factor", {1.0, 1.5}}}}}, "the type \"su\""},
      {{{"rope_scaling", {{"rope_type", "longrope"}, {"long_factor", {1.0, 1.5}}}}},
       "\"rope_scaling.short_factor\" is missing"},
      {{{"rope_scaling",
         {{"rope_type", "longrope"}, {"long_factor", {1.0, 1.5}}, {"short_factor", 2.0}}}},
       "short_factor\" is 2.0, not a list"},
      {{{"rope_scaling",
         {{"rope_type", "longrope"}, {"long_factor", {1.0, 0}}, {"short_factor", {1.0, 1.5}}}}},
       "long_factor\" is 0, not a number"},
      {{{"rope_scaling",
         {{"rope_type", "longrope"}, {"long_factor", {1.0, 1.5}}, {"short_factor", {1.0, 1.5}}}}},
       "\"short_factor\" of \"longrope\" has 2 numbers; a \"head_dim\" of 8 needs 4"},
      {{{"rope_scaling", {{"rope_type", "yarn"}}}}, "\"rope_scaling.factor\" is missing"},
      {{{"rope_scaling", {{"rope_type", "linear"}}}}, "\"rope_scaling.factor\" is missing"},
      {{{"rope_scaling", {{"rope_type", "linear"}, {"factor", nullptr}}}},
       "\"rope_scaling.factor\" is missing"},
      {{{"attention_bias", "yes"}}, "\"attention_bias\" is \"yes\""},
      {{{"model_type", "qwen2"}, {"num_key_value_heads", 2}, {"attention_bias", true}},
       "\"attention_bias\" is true; Muster has only false"},
      {{{"use_mrope", true}}, "\"use_mrope\" is true"},
      {{{"model_type", "mixtral"},
        {"num_key_value_heads", 2},
        {"num_experts", 4},
        {"num_local_experts", 8}},
       "\"num_local_experts\" is 8, but \"num_experts\", another name for it, is 4"},
      {{{"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 5e5}}},
        {"rope_scaling", {{"rope_type", "linear"}, {"factor", 2.0}}}},
       "\"rope_parameters\" and \"rope_scaling\" say different things"},
      {{{"model_type", "mistral"},
        {"num_key_value_heads", 2},
        {"layer_types", {"full_attention", "sliding_attention"}}},
       "only Qwen2 has layers with and without \"sliding_window\""},
      {{{"rope_theta", 1.0}, {"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}}}},
       "\"rope_theta\" is 1"},
      {{{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2.0}, {"beta_fast", 0.5}}}},
       "beta_fast\" is below"},
      {{{"hidden_act", "prelu"}}, "\"hidden_act\": \"prelu\" is not one of silu, "},
      {{{"hidden_act", "xielu"}}, "\"hidden_act\": \"xielu\" is not one of silu, "},
      {{{"quantization_config", {{"bits", 4}}}}, "quantized weights"},
      {{{"partial_rotary_factor", 0.5}}, "Muster has only 1.0"},
      {{{"architectures", {"FalconForCausalLM"}}}, "does not have the architecture \"Falcon"},
      {{{"architectures", {"Qwen2ForCausalLM"}}}, "\"model_type\" is \"llama\""},
      {{{"hidden_size", -1}}, "\"hidden_size\" is -1"},
      {{{"hidden_size", "32"}}, "\"hidden_size\" is \"32\""},
      {{{"num_key_value_heads", 3}}, "no multiple of \"num_key_value_heads\" 3"},
      {{{"pad_token_id", 100}}, "beyond the vocabulary of 100"},
      {{{"eos_token_id", std::numeric_limits<uint64_t>::max()}},
       "\"eos_token_id\": 18446744073709551615 is no token"},
      {{{"head_dim", 7}}, "\"head_dim\" is 7; rotary positions need an even number"},
      {{{"sliding_window", 0}, {"model_type", "mistral"}, {"num_key_value_heads", 2}},
       "\"sliding_window\" is 0, not a whole number from 1"},
      {{{"vocab_size", nullptr}}, "\"vocab_size\" is null"}};
  for (const auto& [more, message] : cases) {
    EXPECT_NE(ErrorOf(With(kLlama, more)).find(message), std::string::npos)
        << ErrorOf(With(kLlama, more)) << " does not contain " << message;
  }
  EXPECT_EQ(
      ErrorOf(With(kLlama, {{"attention_sinks", 4}}), {.ignore_settings = {"attention_sinks"}}),
      "");
}

// A model has an object for each of them.
TEST(ModelConfig, LayersTimesExperts_AreBounded) {
  const std::string path = testing_support::GoldenPath("hf_models/mixtral_shared/config.json");
  Json json = Json::parse(*ReadFile(path));
  const auto read = [&](int64_t layers, int64_t experts) {
    json["num_hidden_layers"] = layers;
    json["num_local_experts"] = experts;
    return ParseModelConfig(json.dump(), "config.json").status();
  };
  EXPECT_TRUE(read(100, 10'000).ok());
  const absl::Status status = read(10'000, 60'000);
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("config.json: the config has 600000000 layers and experts"),
            std::string::npos)
      << status;
}

TEST(ParseModelConfig, ActivationsOfTransformers_KeepTheirNames) {
  for (const char* const name : {"gelu",
                                 "gelu_10",
                                 "gelu_fast",
                                 "gelu_new",
                                 "gelu_python",
                                 "gelu_pytorch_tanh",
                                 "gelu_python_tanh",
                                 "gelu_accurate",
                                 "hardswish",
                                 "laplace",
                                 "leaky_relu",
                                 "linear",
                                 "mish",
                                 "quick_gelu",
                                 "relu",
                                 "relu2",
                                 "relu6",
                                 "sigmoid",
                                 "silu",
                                 "sqrtsoftplus",
                                 "swish",
                                 "tanh"}) {
    DecoderConfig config = Decoder(With(kLlama, {{"hidden_act", name}}));
    EXPECT_EQ(Json::parse(ToJson(config))["hidden_act"], name);
    // A config made in code has the name of an activation with the same meaning.
    config.source_json.clear();
    EXPECT_EQ(Decoder(Json::parse(ToJson(config))).activation, config.activation) << name;
  }
}

TEST(ParseModelConfig, Architecture_CanBeAnotherClassOfTheSameType) {
  const Json bert = With(kLlama, {{"model_type", "bert"}, {"architectures", {"BertForMaskedLM"}}});
  const auto config = ParseModelConfig(bert.dump(), "config.json",
                                       {.architecture = "BertForSequenceClassification"});
  ASSERT_TRUE(config.ok()) << config.status();
  EXPECT_EQ(Common(*config).architecture, Architecture::kBertForSequenceClassification);
}

TEST(ToJson, WhatTheStructDoesNotHold_IsKept) {
  const DecoderConfig config = Decoder(With(kLlama, {{"task_specific_params", {{"a", 1}}}}));
  const Json json = Json::parse(ToJson(config));
  EXPECT_EQ(json["task_specific_params"]["a"], 1);
  EXPECT_EQ(json["architectures"][0], "LlamaForCausalLM");
}

TEST(ReadModelConfig, NoFile_NamesIt) {
  const TestFolder folder;
  const auto config = ReadModelConfig(folder.path());
  EXPECT_EQ(config.status().code(), absl::StatusCode::kNotFound);
  EXPECT_NE(config.status().message().find("config.json"), std::string::npos);
}

void ExpectErrorOrValid(const std::string& text) {
  const auto config = ParseModelConfig(text, "config.json");
  if (config.ok()) {
    EXPECT_TRUE(ValidateConfig(*config).ok()) << text;
    EXPECT_TRUE(ParseModelConfig(ToJson(*config), "again").ok()) << text;
  } else {
    EXPECT_FALSE(config.status().message().empty());
  }
}

// MUSTER_FUZZ_CASES sets the number.
TEST(ParseModelConfig, DamagedTexts_AreErrorsOrValid) {
  int64_t cases = 20'000;
  if (const char* const wanted = std::getenv("MUSTER_FUZZ_CASES")) cases = std::atoll(wanted);
  // The largest result of a config is a list of layers: 16 million of them.
  constexpr int64_t kMostMemory = int64_t{512} << 20;
  const PeakGrowth growth;
  std::mt19937_64 random(1);
  std::vector<std::string> texts;
  for (const std::string& dir : RecordedFolders()) {
    texts.push_back(*ReadFile(testing_support::GoldenPath(dir + "/config.json")));
  }
  const std::vector<Json> strange = {nullptr,
                                     true,
                                     -1,
                                     0,
                                     1,
                                     5,
                                     7,
                                     1e300,
                                     0.5,
                                     "",
                                     "default",
                                     std::numeric_limits<uint64_t>::max(),
                                     std::numeric_limits<int64_t>::min(),
                                     int64_t{1} << 24,
                                     Json::array(),
                                     Json::array({1, -1, "x"}),
                                     Json::object(),
                                     Json{{"rope_type", "llama3"}, {"factor", 0}}};
  for (int64_t i = 0; i < cases; ++i) {
    const std::string& text = texts[random() % texts.size()];
    ASSERT_TRUE(growth.IsAtMost(kMostMemory)) << "case " << i;
    if (i % 2 == 0) {
      ExpectErrorOrValid(Mutate(text, random));
      continue;
    }
    Json json = Json::parse(text);
    for (int change = 0; change < 2; ++change) {
      const auto at = std::next(json.begin(), static_cast<int64_t>(random() % json.size()));
      *at = strange[random() % strange.size()];
    }
    ExpectErrorOrValid(json.dump());
  }
}

}  // namespace
}  // namespace muster::models
