#include "worker/models/text_generator.h"

#include <gtest/gtest.h>

#include <limits>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "tests/testdata/golden.h"

namespace muster::models {
namespace {

// A folder with a small GPT-2 of random weights and a recorded tokenizer.
class TextGeneratorTest : public testing::Test {
 protected:
  void SetUp() override {
    const std::string tokenizer =
        testing_support::GoldenPath("hf_tokenizer/gpt2_shared/tokenizer.json");
    ASSERT_TRUE(
        WriteFileAtomically(folder_.Path("tokenizer.json"), ReadFile(tokenizer).value_or("")).ok());
    const auto vocabulary = Tokenizer::FromFolder(folder_.path());
    ASSERT_TRUE(vocabulary.ok()) << vocabulary.status();
    Gpt2Config config;
    config.architecture = Architecture::kGpt2LMHeadModel;
    // Padded, as vocabularies often are: some ids have no text.
    config.vocab_size = vocabulary->VocabSize() + 200;
    config.max_positions = 128;
    config.tie_word_embeddings = true;
    // Large, so that logits differ and texts are not a single repeated word.
    config.initializer_range = 0.5;
    config.hidden_size = 32;
    config.inner_size = 64;
    config.num_layers = 2;
    config.num_heads = 4;
    at::manual_seed(5);
    ASSERT_TRUE(SavePretrained(*MakeModel(config), folder_.path()).ok());
  }

  TextGenerator Load() {
    auto generator = TextGenerator::FromFolder(folder_.path());
    EXPECT_TRUE(generator.ok()) << generator.status();
    return *std::move(generator);
  }

  TestFolder folder_;
};

std::vector<GeneratedText> Texts(TextGenerator& generator, const std::vector<std::string>& prompts,
                                 const TextOptions& options) {
  auto texts = generator.Generate(prompts, options);
  EXPECT_TRUE(texts.ok()) << texts.status();
  return *std::move(texts);
}

TEST_F(TextGeneratorTest, StreamedPieces_AreTheTextOfTheTokens) {
  TextGenerator generator = Load();
  for (const bool sample : {false, true}) {
    std::vector<int64_t> tokens;
    std::string streamed;
    const TextOptions options = {
        .tokens = {.max_new_tokens = 60,
                   .do_sample = sample,
                   .on_tokens = [&](const auto& next, auto&) { tokens.push_back(next[0]); }},
        .on_text = [&](size_t row, absl::string_view piece) {
          EXPECT_EQ(row, 0);
          EXPECT_FALSE(piece.empty());
          streamed.append(piece.data(), piece.size());
        }};
    const auto texts = Texts(generator, {"Hello"}, options);
    ASSERT_EQ(texts.size(), 1);
    EXPECT_EQ(texts[0].num_new_tokens, 60);
    EXPECT_EQ(texts[0].reason, GeneratedText::Reason::kMaxTokens);
    EXPECT_EQ(texts[0].text, streamed);
    std::vector<int64_t> with_text;
    for (const int64_t token : tokens) {
      if (generator.tokenizer().IdToToken(token).has_value()) with_text.push_back(token);
    }
    EXPECT_LT(with_text.size(), tokens.size());
    EXPECT_EQ(texts[0].text, generator.tokenizer().Decode(with_text).value_or(""));
  }
}

TEST_F(TextGeneratorTest, PromptsOfDifferentLengths_SayWhatTheySayAlone) {
  TextGenerator generator = Load();
  const std::vector<std::string> prompts = {"a", "The quick brown fox jumps", "Hi there"};
  const TextOptions options = {.tokens = {.max_new_tokens = 12}};
  const auto together = Texts(generator, prompts, options);
  ASSERT_EQ(together.size(), 3);
  for (size_t i = 0; i < prompts.size(); ++i) {
    EXPECT_EQ(together[i].text, Texts(generator, {prompts[i]}, options)[0].text);
  }
}

TEST_F(TextGeneratorTest, StopString_EndsItsRowBeforeIt) {
  TextGenerator generator = Load();
  const TextOptions whole = {.tokens = {.max_new_tokens = 40}};
  const auto texts = Texts(generator, {"Hello", "Bye"}, whole);
  // Any part of the first row's text.
  ASSERT_GT(texts[0].text.size(), 20);
  const std::string stop = texts[0].text.substr(8, 3);
  const size_t at = texts[0].text.find(stop);
  TextOptions options = whole;
  options.stop = {stop};
  const auto stopped = Texts(generator, {"Hello", "Bye"}, options);
  EXPECT_EQ(stopped[0].text, texts[0].text.substr(0, at));
  EXPECT_EQ(stopped[0].reason, GeneratedText::Reason::kStopString);
  EXPECT_LT(stopped[0].num_new_tokens, 40);
  EXPECT_EQ(stopped[1].text, texts[1].text.substr(0, texts[1].text.find(stop)));
}

TEST_F(TextGeneratorTest, StopStringOfTheModelsFiles_EndsItsRow) {
  TextGenerator plain = Load();
  const std::string whole = Texts(plain, {"Hello"}, {.tokens = {.max_new_tokens = 40}})[0].text;
  ASSERT_GT(whole.size(), 20);
  const std::string stop = whole.substr(8, 3);
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("generation_config.json"),
                                  nlohmann::json({{"stop_strings", {stop}}}).dump())
                  .ok());
  TextGenerator generator = Load();
  TextOptions options = {.tokens = generator.defaults()};
  options.tokens.max_new_tokens = 40;
  const auto texts = Texts(generator, {"Hello"}, options);
  EXPECT_EQ(texts[0].text, whole.substr(0, whole.find(stop)));
  EXPECT_EQ(texts[0].reason, GeneratedText::Reason::kStopString);
}

// The text contains no special tokens in which to find it.
TEST_F(TextGeneratorTest, StopStringThatIsASpecialToken_EndsItsRow) {
  TextGenerator generator = Load();
  const auto special = generator.tokenizer().TokenToId("<|endoftext|>");
  ASSERT_TRUE(special.has_value());
  TextOptions options = {.tokens = {.max_new_tokens = 5, .eos_token_ids = {{}}}};
  options.tokens.rules.forced_eos_token_id = {*special};
  EXPECT_EQ(Texts(generator, {"Hello"}, options)[0].reason, GeneratedText::Reason::kMaxTokens);
  options.stop = {"<|endoftext|>"};
  const auto texts = Texts(generator, {"Hello"}, options);
  EXPECT_EQ(texts[0].reason, GeneratedText::Reason::kStopString);
}

TEST_F(TextGeneratorTest, SeveralDraws_AreOfThePromptThatTheyFollow) {
  TextGenerator generator = Load();
  const TextOptions options = {
      .tokens = {.max_new_tokens = 12, .do_sample = true, .seed = 4, .num_return_sequences = 3}};
  const auto texts = Texts(generator, {"Hello", "Bye, all of you"}, options);
  ASSERT_EQ(texts.size(), 6);
  EXPECT_NE(texts[0].text, texts[1].text);
  EXPECT_EQ(texts[2].num_prompt_tokens, texts[0].num_prompt_tokens);
  // The result of a draw does not depend on the other prompts.
  const auto alone = Texts(generator, {"Hello"}, options);
  for (size_t i = 0; i < 3; ++i) EXPECT_EQ(alone[i].text, texts[i].text);
}

TEST_F(TextGeneratorTest, EndToken_IsNotPartOfTheText) {
  TextGenerator generator = Load();
  std::vector<int64_t> tokens;
  TextOptions options = {.tokens = {.max_new_tokens = 9, .on_tokens = [&](const auto& next, auto&) {
                                      tokens.push_back(next[0]);
                                    }}};
  Texts(generator, {"Hello"}, options);
  options.tokens.eos_token_ids = {{tokens[4]}};
  const auto texts = Texts(generator, {"Hello"}, options);
  EXPECT_EQ(texts[0].reason, GeneratedText::Reason::kEndToken);
  EXPECT_LE(texts[0].num_new_tokens, 5);
}

TEST_F(TextGeneratorTest, ShortenedToTheContext_StopsAtTheLastPosition) {
  TextGenerator generator = Load();
  const auto texts =
      Texts(generator, {"Hello"}, {.tokens = {.max_new_tokens = 500}, .shorten_to_context = true});
  EXPECT_EQ(texts[0].num_prompt_tokens + texts[0].num_new_tokens, 128);
}

// A program reports errors in its prompts before it loads the model, and encodes them once.
TEST_F(TextGeneratorTest, EncodedPrompts_AreCheckedWithoutAModelAndContinuedAsTheirTexts) {
  TextGenerator generator = Load();
  const auto config = ReadModelConfig(folder_.path());
  ASSERT_TRUE(config.ok()) << config.status();
  const TextOptions options = {.tokens = {.max_new_tokens = 6}};
  const std::vector<std::string> texts = {"Hello", "Bye, and hello again"};
  const auto encoded = EncodePrompts(generator.tokenizer(), texts, true);
  ASSERT_TRUE(encoded.ok()) << encoded.status();
  EXPECT_TRUE(CheckPrompts(*config, *encoded, options).ok());
  const auto continued = generator.GenerateEncoded(*encoded, options);
  ASSERT_TRUE(continued.ok()) << continued.status();
  const auto expected = Texts(generator, texts, options);
  ASSERT_EQ(continued->size(), expected.size());
  for (size_t i = 0; i < expected.size(); ++i) EXPECT_EQ((*continued)[i].text, expected[i].text);

  TextOptions long_run = {.tokens = {.max_new_tokens = 127}};
  EXPECT_NE(CheckPrompts(*config, *encoded, long_run)
                .message()
                .find("prompt 1, of " + std::to_string(encoded->ids.size(1)) +
                      " tokens and 127 new ones are more than the 128 positions"),
            std::string::npos);
  long_run.shorten_to_context = true;
  EXPECT_TRUE(CheckPrompts(*config, *encoded, long_run).ok());
  std::string far;
  for (int i = 0; i < 200; ++i) far += " far";
  const auto too_long = EncodePrompts(generator.tokenizer(), {far}, true);
  ASSERT_TRUE(too_long.ok()) << too_long.status();
  EXPECT_NE(CheckPrompts(*config, *too_long, long_run).message().find("a prompt of "),
            std::string::npos);
}

TEST_F(TextGeneratorTest, Beams_GiveSeveralTexts) {
  TextGenerator generator = Load();
  const auto texts =
      Texts(generator, {"Hello", "Bye"},
            {.tokens = {.max_new_tokens = 6, .num_beams = 3, .num_return_sequences = 2}});
  ASSERT_EQ(texts.size(), 4);
  EXPECT_NE(texts[0].text, texts[1].text);
}

// Here padding is a token with text.
TEST_F(TextGeneratorTest, BeamThatItsTokensEnd_HasNoPaddingInItsText) {
  TextGenerator generator = Load();
  const auto ids = generator.tokenizer().EncodeIds("Hello");
  ASSERT_TRUE(ids.ok()) << ids.status();
  const at::Tensor prompt = at::tensor(*ids, c10::kLong).unsqueeze(0);
  TextOptions options = {.tokens = {.max_new_tokens = 8,
                                    .eos_token_ids = {{}},
                                    .pad_token_id = generator.tokenizer().TokenToId("a"),
                                    .num_beams = 4,
                                    .num_return_sequences = 4}};
  ASSERT_TRUE(options.tokens.pad_token_id.has_value());
  int padded = 0;
  for (const int64_t divisor : {2, 3, 5, 7}) {
    options.tokens.ends_row = [divisor](const std::vector<int64_t>& generated) {
      return generated.back() % divisor == 0;
    };
    const Generated expected = Generate(*generator.model(), prompt, {}, options.tokens);
    const auto texts = Texts(generator, {"Hello"}, options);
    ASSERT_EQ(texts.size(), 4);
    for (size_t i = 0; i < texts.size(); ++i) {
      EXPECT_EQ(texts[i].num_new_tokens, expected.lengths[i]) << divisor << " " << i;
      padded += expected.lengths[i] < expected.tokens.size(1) ? 1 : 0;
    }
  }
  EXPECT_GT(padded, 0);
}

TEST_F(TextGeneratorTest, BeamThatIsNotThere_HasNoText) {
  TextGenerator generator = Load();
  const int64_t end = generator.tokenizer().TokenToId("<|endoftext|>").value_or(-1);
  TextOptions options = {
      .tokens = {.max_new_tokens = 1, .num_beams = 3, .num_return_sequences = 3}};
  options.tokens.pad_token_id = generator.tokenizer().TokenToId("a");
  options.tokens.rules.forced_eos_token_id = {end};
  const auto texts = Texts(generator, {"Hello"}, options);
  ASSERT_EQ(texts.size(), 3);
  EXPECT_EQ(texts[0].num_new_tokens, 1);
  for (const size_t i : {1, 2}) {
    EXPECT_EQ(texts[i].num_new_tokens, 0);
    EXPECT_EQ(texts[i].text, "");
  }
}

TEST_F(TextGeneratorTest, StopString_EndsABeam) {
  TextGenerator generator = Load();
  const TextOptions whole = {
      .tokens = {.max_new_tokens = 20, .num_beams = 3, .num_return_sequences = 3}};
  const std::string best = Texts(generator, {"Hello"}, whole)[0].text;
  ASSERT_GT(best.size(), 12);
  const std::string stop = best.substr(6, 3);
  for (const bool of_the_files : {false, true}) {
    TextOptions options = whole;
    (of_the_files ? options.tokens.stop_strings : options.stop) = {stop};
    const auto texts = Texts(generator, {"Hello"}, options);
    int stopped = 0;
    for (const GeneratedText& text : texts) {
      EXPECT_EQ(text.text.find(stop), std::string::npos) << text.text;
      if (text.reason != GeneratedText::Reason::kStopString) continue;
      ++stopped;
      // The beam has ended there: no token comes after the string.
      EXPECT_LT(text.num_new_tokens, 20);
    }
    EXPECT_GT(stopped, 0);
  }
}

TEST_F(TextGeneratorTest, StopStringThatIsASpecialToken_EndsABeam) {
  TextGenerator generator = Load();
  const auto special = generator.tokenizer().TokenToId("<|endoftext|>");
  ASSERT_TRUE(special.has_value());
  TextOptions options = {.tokens = {.max_new_tokens = 5, .eos_token_ids = {{}}, .num_beams = 2},
                         .stop = {"<|endoftext|>"}};
  options.tokens.rules.sequence_bias = {{{*special}, 100.0}};
  const auto texts = Texts(generator, {"Hello"}, options);
  EXPECT_EQ(texts[0].reason, GeneratedText::Reason::kStopString);
  EXPECT_EQ(texts[0].num_new_tokens, 1);
}

// For example the newline of Llama 2, which is a byte that others could follow.
TEST(EndsAtStopString, ByteThatMayBeABeginning_IsText) {
  const auto tokenizer =
      Tokenizer::FromFile(testing_support::TestdataPath("generation/tokenizer_fallback.json"));
  ASSERT_TRUE(tokenizer.ok()) << tokenizer.status();
  const int64_t byte = tokenizer->TokenToId("<0x61>").value_or(-1);
  const int64_t other = tokenizer->TokenToId("b").value_or(-1);
  ASSERT_GE(byte, 0);
  ASSERT_GE(other, 0);
  const auto ends = EndsAtStopString(*tokenizer, {"ba"});
  EXPECT_FALSE(ends({byte}));
  EXPECT_FALSE(ends({byte, other}));
  EXPECT_TRUE(ends({byte, other, byte}));
}

TEST_F(TextGeneratorTest, WhatIsWrong_IsNamed) {
  TextGenerator generator = Load();
  EXPECT_NE(generator.Generate({"a", ""}, {}).status().message().find("prompt 1 has no token"),
            std::string::npos);
  EXPECT_NE(generator.Generate({}, {}).status().message().find("there is no prompt"),
            std::string::npos);
  EXPECT_NE(generator.Generate({"a"}, {.tokens = {.max_new_tokens = 500}})
                .status()
                .message()
                .find("more than the 128 positions"),
            std::string::npos);
  EXPECT_NE(
      generator
          .Generate({"a", "b"}, {.tokens = {.max_new_tokens = std::numeric_limits<int64_t>::max()}})
          .status()
          .message()
          .find("prompt 0, of"),
      std::string::npos);
  EXPECT_NE(
      generator
          .Generate({"a"}, {.tokens = {.do_sample = true, .num_return_sequences = 2'000'000'000}})
          .status()
          .message()
          .find("room for 1048576 each"),
      std::string::npos);
  ASSERT_TRUE(RemoveTree(folder_.Path("tokenizer.json")).ok());
  EXPECT_NE(TextGenerator::FromFolder(folder_.path()).status().message().find("tokenizer.json"),
            std::string::npos);
}

}  // namespace
}  // namespace muster::models
