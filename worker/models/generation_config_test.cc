#include "worker/models/generation_config.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <limits>
#include <nlohmann/json.hpp>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/mutate.h"
#include "base/test_folder.h"

namespace muster::models {
namespace {

TEST(ParseGenerationConfig, WhatLlama3Comes_With) {
  const auto options = ParseGenerationConfig(
      R"({"bos_token_id": 128000, "do_sample": true, "eos_token_id": [128001, 128009],
          "temperature": 0.6, "top_p": 0.9, "transformers_version": "4.42.3"})",
      "generation_config.json");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_TRUE(options->do_sample);
  EXPECT_EQ(*options->eos_token_ids, (std::vector<int64_t>{128001, 128009}));
  EXPECT_EQ(options->rules.temperature, 0.6);
  EXPECT_EQ(options->rules.top_p, 0.9);
  EXPECT_EQ(options->rules.top_k, 50);
}

TEST(ParseGenerationConfig, TopKOfNull_IsTheDefault) {
  const auto options =
      ParseGenerationConfig(R"({"do_sample": true, "top_k": null, "num_assistant_tokens": 20})",
                            "generation_config.json");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->rules.top_k, 50);
  const auto none = ParseGenerationConfig(R"({"do_sample": true, "top_k": 0})", "f");
  ASSERT_TRUE(none.ok()) << none.status();
  EXPECT_EQ(none->rules.top_k, 0);
}

TEST(ParseGenerationConfig, SettingsOfSamplingWithoutSampling_AreLeftOut) {
  const auto options = ParseGenerationConfig(R"({"temperature": 0.6, "top_k": 20})", "f");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->rules.temperature, 1);
  EXPECT_EQ(options->rules.top_k, 0);
}

// transformers' generate(do_sample=True) takes them from the file, too.
TEST(ParseGenerationConfig, SettingsOfSampling_AreThoseOfACallerWhoSamples) {
  const auto options =
      ParseGenerationConfig(R"({"do_sample": false, "temperature": 0.6})", "f", true);
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_TRUE(options->do_sample);
  EXPECT_EQ(options->rules.temperature, 0.6);
  EXPECT_EQ(options->rules.top_k, 50);
  const auto greedy =
      ParseGenerationConfig(R"({"do_sample": true, "temperature": 0.6})", "f", false);
  ASSERT_TRUE(greedy.ok()) << greedy.status();
  EXPECT_FALSE(greedy->do_sample);
  EXPECT_EQ(greedy->rules.temperature, 1);
}

TEST(ParseGenerationConfig, MaxNewTokensOfTheCaller_CountWhereTheFileHasNone) {
  const auto tokens = [](const char* json) {
    const auto options = ParseGenerationConfig(json, "f", std::nullopt, 256);
    EXPECT_TRUE(options.ok()) << options.status();
    return options->max_new_tokens;
  };
  EXPECT_EQ(tokens("{}"), 256);
  EXPECT_EQ(tokens(R"({"max_new_tokens": null, "max_length": 7})"), 256);
  EXPECT_EQ(tokens(R"({"max_new_tokens": 20})"), 20);
  EXPECT_EQ(tokens(R"({"max_new_tokens": 2048})"), 2048);
  for (const char* const value : {"0", "-1", "\"x\"", "1.5"}) {
    const auto options = ParseGenerationConfig(absl::StrCat("{\"max_new_tokens\": ", value, "}"),
                                               "f", std::nullopt, 256);
    EXPECT_NE(options.status().message().find("f: \"max_new_tokens\" is "), std::string::npos)
        << value;
  }
}

TEST(ParseGenerationConfig, RulesForTokens_AreRead) {
  const auto options = ParseGenerationConfig(
      R"({"bad_words_ids": [[3], [4, 5]], "min_length": 7, "forced_bos_token_id": 1,
          "forced_eos_token_id": 2, "suppress_tokens": [-1, 9], "begin_suppress_tokens": [6],
          "exponential_decay_length_penalty": [3, 1.5], "stop_strings": "THE END",
          "sequence_bias": [[[5], 1.0], [[5, 6], -2.5], [[5], 2.0]],
          "encoder_repetition_penalty": 1.5, "encoder_no_repeat_ngram_size": 4,
          "renormalize_logits": true})",
      "f");
  ASSERT_TRUE(options.ok()) << options.status();
  const ScoreRules& rules = options->rules;
  EXPECT_EQ(rules.bad_words_ids, (std::vector<std::vector<int64_t>>{{3}, {4, 5}}));
  EXPECT_EQ(rules.min_length, 7);
  EXPECT_EQ(rules.forced_bos_token_id, 1);
  EXPECT_EQ(rules.forced_eos_token_id, (std::vector<int64_t>{2}));
  EXPECT_EQ(rules.suppress_tokens, (std::vector<int64_t>{9}));
  EXPECT_EQ(rules.begin_suppress_tokens, (std::vector<int64_t>{6}));
  EXPECT_EQ(rules.exponential_decay_length_penalty->start, 3);
  EXPECT_EQ(rules.exponential_decay_length_penalty->factor, 1.5);
  EXPECT_EQ(options->stop_strings, (std::vector<std::string>{"THE END"}));
  EXPECT_EQ(rules.encoder_repetition_penalty, 1.5);
  EXPECT_EQ(rules.encoder_no_repeat_ngram_size, 4);
  EXPECT_TRUE(rules.renormalize_logits);
  // As in transformers, the last of equal ones counts.
  EXPECT_EQ(rules.sequence_bias,
            (std::map<std::vector<int64_t>, double>{{{5}, 2.0}, {{5, 6}, -2.5}}));
  // As in transformers, min_new_tokens replaces min_length.
  const auto fresh = ParseGenerationConfig(R"({"min_length": 7, "min_new_tokens": 2})", "f");
  ASSERT_TRUE(fresh.ok()) << fresh.status();
  EXPECT_EQ(fresh->rules.min_length, 0);
}

TEST(ParseGenerationConfig, RulesForSampling_AreRead) {
  const auto options = ParseGenerationConfig(
      R"({"do_sample": true, "top_h": 1, "typical_p": 0.9, "epsilon_cutoff": 3e-4,
          "eta_cutoff": 2e-3})",
      "f");
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->rules.top_h, 1);
  EXPECT_EQ(options->rules.typical_p, 0.9);
  EXPECT_EQ(options->rules.epsilon_cutoff, 3e-4);
  EXPECT_EQ(options->rules.eta_cutoff, 2e-3);
}

// transformers looks at them only if it samples.
TEST(ParseGenerationConfig, InvalidSettingsOfSampling_CountForWhoSamples) {
  const char* const json = R"({"do_sample": true, "top_p": 2.0, "top_k": "all", "top_h": 0.9})";
  EXPECT_FALSE(ParseGenerationConfig(json, "f").ok());
  const auto greedy = ParseGenerationConfig(json, "f", false);
  ASSERT_TRUE(greedy.ok()) << greedy.status();
  EXPECT_EQ(greedy->rules.top_p, 1);
}

TEST(ParseGenerationConfig, WhatMusterDoesNotHave_IsRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"do_sample": true, "top_h": 0})", "\"top_h\" is 0"},
      {R"({"do_sample": true, "top_h": 1.1})", "top_h is 1.1"},
      {R"({"encoder_repetition_penalty": 0.0})", "encoder_repetition_penalty is 0"},
      {R"({"encoder_no_repeat_ngram_size": -1})", "\"encoder_no_repeat_ngram_size\" is -1"},
      {R"({"renormalize_logits": 1})", "\"renormalize_logits\" is 1"},
      {R"({"guidance_scale": 1.5})", "does not have the setting \"guidance_scale\""},
      {R"({"watermarking_config": {}})", "does not have the setting \"watermarking_config\""},
      {R"({"max_time": 1.5})", "does not have the setting \"max_time\""},
      {R"({"is_assistant": true})", "does not have the setting \"is_assistant\""},
      {R"({"cache_implementation": "quantized"})", "the setting \"cache_implementation\""},
      {R"({"do_sample": true, "top_k": -1})", "\"top_k\" is -1"},
      {R"({"bad_words_ids": [1]})", "\"bad_words_ids\" is [1]"},
      {R"({"sequence_bias": [[[1], 2.0, 3]]})", "\"sequence_bias\" is [[[1],2.0,3]]"},
      {R"({"sequence_bias": [[[], 2.0]]})", "\"sequence_bias\" is [[[],2.0]]"},
      {R"({"sequence_bias": {"1": 2.0}})", "\"sequence_bias\" is {"},
      {R"({"do_sample": true, "typical_p": 0.0})", "typical_p is 0"},
      {R"({"do_sample": true, "epsilon_cutoff": 1.0})", "epsilon_cutoff is 1"},
      {R"({"do_sample": true, "eta_cutoff": -1})", "eta_cutoff is -1"},
      {R"({"bad_words_ids": [[]]})", "\"bad_words_ids\" is [[]]"},
      {R"({"bad_words_ids": [[-1]]})", "\"bad_words_ids\" is [[-1]]"},
      {R"({"forced_bos_token_id": [1]})", "\"forced_bos_token_id\" is [1]"},
      {R"({"suppress_tokens": ["a"]})", "\"suppress_tokens\" is [\"a\"]"},
      {R"({"stop_strings": [""]})", "\"stop_strings\" is [\"\"]"},
      {R"({"exponential_decay_length_penalty": [5]})", "\"exponential_decay_length_penalty\" is"},
      {R"({"exponential_decay_length_penalty": [5, -1.0]})", "a factor above 0"},
      {R"({"do_sample": "yes"})", "\"do_sample\" is \"yes\""},
      {R"({"do_sample": true, "top_p": 2.0})", "top_p is 2"},
      {"[]", "not an object"}};
  for (const auto& [json, message] : cases) {
    const auto options = ParseGenerationConfig(json, "f");
    EXPECT_NE(options.status().message().find(message), std::string::npos) << options.status();
  }
  EXPECT_TRUE(ParseGenerationConfig(R"({"typical_p": 1.0, "suppress_tokens": null,
                                        "cache_implementation": "hybrid"})",
                                    "f")
                  .ok());
}

// MUSTER_FUZZ_CASES sets the number.
TEST(ParseGenerationConfig, DamagedTexts_AreErrorsOrValid) {
  int64_t cases = 20'000;
  if (const char* const wanted = std::getenv("MUSTER_FUZZ_CASES")) cases = std::atoll(wanted);
  const nlohmann::json whole = nlohmann::json::parse(
      R"({"do_sample": true, "eos_token_id": [1, 2], "pad_token_id": 0, "temperature": 0.6,
          "top_k": 20, "top_p": 0.9, "min_p": 0.1, "typical_p": 0.9, "epsilon_cutoff": 0.001,
          "eta_cutoff": 0.001, "bad_words_ids": [[3], [4, 5]], "min_length": 7,
          "sequence_bias": [[[5], 1.0], [[5, 6], -2.5]], "forced_eos_token_id": 2,
          "exponential_decay_length_penalty": [3, 1.5], "stop_strings": ["THE END"],
          "num_beams": 3, "early_stopping": "never", "suppress_tokens": [9]})");
  const std::vector<nlohmann::json> strange = {
      nullptr,
      true,
      -1,
      0,
      1,
      1e300,
      -0.5,
      "",
      "x",
      std::numeric_limits<uint64_t>::max(),
      nlohmann::json::array(),
      nlohmann::json::array({nlohmann::json::array({1, "x"})}),
      nlohmann::json::object()};
  std::mt19937_64 random(1);
  int64_t taken = 0;
  for (int64_t i = 0; i < cases; ++i) {
    std::string text = whole.dump();
    if (i % 2 == 0) {
      text = Mutate(text, random);
    } else {
      nlohmann::json json = whole;
      *std::next(json.begin(), static_cast<int64_t>(random() % json.size())) =
          strange[random() % strange.size()];
      text = json.dump();
    }
    const auto options = ParseGenerationConfig(text, "f");
    if (!options.ok()) {
      EXPECT_NE(options.status().message(), "");
      continue;
    }
    ++taken;
    EXPECT_NO_THROW(CheckRules(options->rules)) << text;
  }
  EXPECT_GT(taken, cases / 100);
}

TEST(ReadGenerationConfig, WithoutTheFile_SettingsInConfigJsonCount) {
  const TestFolder folder;
  const std::string config = folder.Path("config.json");
  ASSERT_TRUE(WriteFileAtomically(
                  config,
                  R"({"model_type": "llama", "eos_token_id": 5, "max_length": 50, "num_beams": 2,
                      "top_k": 50, "repetition_penalty": 1.3, "bad_words_ids": null})")
                  .ok());
  const auto options = ReadGenerationConfig(folder.path());
  ASSERT_TRUE(options.ok()) << options.status();
  EXPECT_EQ(options->num_beams, 2);
  EXPECT_EQ(options->rules.repetition_penalty, 1.3);
  EXPECT_EQ(options->rules.top_k, 0);
  EXPECT_EQ(options->eos_token_ids, std::nullopt);  // the model's
  EXPECT_EQ(options->max_new_tokens, GenerateOptions().max_new_tokens);

  ASSERT_TRUE(WriteFileAtomically(config, R"({"diversity_penalty": 0.5})").ok());
  EXPECT_NE(ReadGenerationConfig(folder.path())
                .status()
                .message()
                .find("config.json: Muster does not have the setting \"diversity_penalty\""),
            std::string::npos);
  // The file replaces the settings in config.json.
  ASSERT_TRUE(WriteFileAtomically(folder.Path("generation_config.json"), "{}").ok());
  EXPECT_TRUE(ReadGenerationConfig(folder.path()).ok());
}

TEST(ReadGenerationConfig, NoFile_IsTheDefaults) {
  const TestFolder folder;
  const auto options = ReadGenerationConfig(folder.path());
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->max_new_tokens, GenerateOptions().max_new_tokens);
  const auto sampling = ReadGenerationConfig(folder.path(), true, 256);
  ASSERT_TRUE(sampling.ok());
  EXPECT_EQ(sampling->rules.top_k, 50);
  EXPECT_EQ(sampling->max_new_tokens, 256);
}

}  // namespace
}  // namespace muster::models
