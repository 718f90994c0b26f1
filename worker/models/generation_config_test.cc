#include "worker/models/generation_config.h"

#include <gtest/gtest.h>

#include "base/file.h"
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

TEST(ParseGenerationConfig, WhatMusterDoesNotHave_IsRefusedByName) {
  const std::pair<const char*, const char*> cases[] = {
      {R"({"typical_p": 0.9})", "does not have the setting \"typical_p\""},
      {R"({"suppress_tokens": [1]})", "does not have the setting \"suppress_tokens\""},
      {R"({"max_time": 1.5})", "does not have the setting \"max_time\""},
      {R"({"is_assistant": true})", "does not have the setting \"is_assistant\""},
      {R"({"cache_implementation": "quantized"})", "the setting \"cache_implementation\""},
      {R"({"top_k": -1})", "\"top_k\" is -1"},
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

  ASSERT_TRUE(WriteFileAtomically(config, R"({"suppress_tokens": [1, 2]})").ok());
  EXPECT_NE(ReadGenerationConfig(folder.path())
                .status()
                .message()
                .find("config.json: Muster does not have the setting \"suppress_tokens\""),
            std::string::npos);
  // It counts alone.
  ASSERT_TRUE(WriteFileAtomically(folder.Path("generation_config.json"), "{}").ok());
  EXPECT_TRUE(ReadGenerationConfig(folder.path()).ok());
}

TEST(ReadGenerationConfig, NoFile_IsTheDefaults) {
  const TestFolder folder;
  const auto options = ReadGenerationConfig(folder.path());
  ASSERT_TRUE(options.ok());
  EXPECT_EQ(options->max_new_tokens, GenerateOptions().max_new_tokens);
  const auto sampling = ReadGenerationConfig(folder.path(), true);
  ASSERT_TRUE(sampling.ok());
  EXPECT_EQ(sampling->rules.top_k, 50);
}

}  // namespace
}  // namespace muster::models
