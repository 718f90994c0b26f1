#include "worker/models/generate.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <map>
#include <memory>
#include <set>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "tests/testdata/golden.h"
#include "worker/models/beam_search.h"
#include "worker/models/prefill.h"
#include "worker/models/pretrained.h"

namespace muster::models {
namespace {

CausalLm Recorded(const std::string& name) {
  const auto model = LoadCausalLm(testing_support::GoldenPath("hf_generate/" + name));
  EXPECT_TRUE(model.ok()) << model.status();
  return *model;
}

at::Tensor Ids(std::vector<int64_t> ids) { return at::tensor(ids, c10::kLong).unsqueeze(0); }

std::string ErrorOf(const std::function<void()>& function) {
  try {
    function();
  } catch (const c10::Error& error) {
    return error.what_without_backtrace();
  }
  return "";
}

constexpr const char* kFamilies[] = {"gpt2_shared", "llama_rope_llama3_shared", "mixtral_4_shared",
                                     "qwen2_sliding_shared"};

// Generation with a cache, token by token, equals a forward pass over the whole.
TEST(Generate, WithACache_SaysWhatAForwardPassOverTheWholeSays) {
  for (const char* const family : kFamilies) {
    SCOPED_TRACE(family);
    CausalLm model = Recorded(family);
    const at::Tensor prompt = Ids({5, 9, 2, 40, 17, 8});
    const Generated got =
        Generate(*model, prompt, {}, {.max_new_tokens = 8, .output_logits = true});
    const at::NoGradGuard no_grad;
    const at::Tensor whole = at::cat({prompt, got.tokens}, 1);
    const at::Tensor logits = model->forward({.input_ids = whole}).logits.narrow(1, 5, 8);
    EXPECT_TRUE(at::allclose(got.logits, logits, 1e-4, 1e-4));
    EXPECT_TRUE(at::equal(got.tokens, logits.argmax(-1)));
  }
}

// Chunks that divide windows and padding; the last one is shorter.
TEST(Generate, PromptInChunks_SaysWhatItSaysInOnePass) {
  const at::Tensor ids =
      at::tensor({0, 0, 0, 0, 0, 7, 8, 1, 2, 3, 4, 5, 9, 6, 11, 13}, c10::kLong).view({2, 8});
  const at::Tensor mask =
      at::tensor({0, 0, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}, c10::kLong).view({2, 8});
  for (const char* const family : kFamilies) {
    CausalLm model = Recorded(family);
    for (const at::Tensor& padding : {mask, at::Tensor()}) {
      GenerateOptions options = {.max_new_tokens = 6, .output_logits = true};
      EXPECT_EQ(options.prefill_chunk_size, kPrefillChunkSize);
      options.prefill_chunk_size = 0;
      const Generated whole = Generate(*model, ids, padding, options);
      options.prefill_chunk_size = 8;
      EXPECT_TRUE(at::equal(Generate(*model, ids, padding, options).logits, whole.logits));
      for (const int64_t most : {1, 3, 5, 7}) {
        SCOPED_TRACE(testing::Message()
                     << family << (padding.defined() ? ", padded" : "") << ", chunks of " << most);
        options.prefill_chunk_size = most;
        const Generated got = Generate(*model, ids, padding, options);
        EXPECT_TRUE(at::equal(got.tokens, whole.tokens));
        EXPECT_TRUE(at::allclose(got.logits, whole.logits, 1e-5, 1e-5));
        GenerateOptions beams = {.max_new_tokens = 6, .num_beams = 3};
        beams.prefill_chunk_size = 0;
        const at::Tensor best = Generate(*model, ids, padding, beams).tokens;
        beams.prefill_chunk_size = most;
        EXPECT_TRUE(at::equal(Generate(*model, ids, padding, beams).tokens, best));
      }
    }
  }
}

// The positions depend on the length of the prompt, which differs for a chunk.
TEST(Generate, StretchedPositionsInChunks_AreThoseOfOnePass) {
  DecoderConfig config;
  config.vocab_size = 40;
  config.max_positions = 256;
  config.hidden_size = config.intermediate_size = 32;
  config.num_layers = 2;
  config.num_heads = config.num_key_value_heads = 2;
  config.head_dim = 16;
  config.sliding_windows.assign(2, 0);
  config.rope.kind = RopeConfig::Kind::kDynamic;
  config.rope.factor = 4;
  config.rope.original_max_positions = 8;
  CausalLm model(std::dynamic_pointer_cast<CausalLmImpl>(MakeModel(config).ptr()));
  const at::Tensor prompt = at::arange(0, 20).unsqueeze(0);
  GenerateOptions options = {.max_new_tokens = 1, .output_logits = true};
  options.prefill_chunk_size = 0;
  const at::Tensor whole = Generate(*model, prompt, {}, options).logits;
  options.prefill_chunk_size = 3;
  EXPECT_TRUE(at::equal(Generate(*model, prompt, {}, options).logits, whole));
}

TEST(Generate, PaddedRow_SaysWhatItSaysAlone) {
  for (const char* const family : kFamilies) {
    SCOPED_TRACE(family);
    CausalLm model = Recorded(family);
    const at::Tensor ids = at::tensor({0, 0, 0, 7, 8, 1, 2, 3, 4, 5}, c10::kLong).view({2, 5});
    const at::Tensor mask = at::tensor({0, 0, 0, 1, 1, 1, 1, 1, 1, 1}, c10::kLong).view({2, 5});
    for (const bool sample : {false, true}) {
      // Rules that look at the row, and draws, ignore padding, too.
      const GenerateOptions options = {
          .max_new_tokens = 6,
          .rules = {.repetition_penalty = 1.3, .no_repeat_ngram_size = 2},
          .do_sample = sample,
          .seed = 3};
      const at::Tensor together = Generate(*model, ids, mask, options).tokens;
      EXPECT_TRUE(at::equal(together[0], Generate(*model, Ids({7, 8}), {}, options).tokens[0]));
    }
  }
}

// Every token except one is an end token, and no end token may come yet.
TEST(Generate, TokensThatRulesRemove_EndNoBeam) {
  CausalLm model = Recorded("gpt2_shared");
  std::vector<int64_t> ends;
  for (int64_t token = 0; token < Common(model->config()).vocab_size; ++token) {
    if (token != 7) ends.push_back(token);
  }
  const Generated got = Generate(*model, Ids({1, 2, 3}), {},
                                 {.max_new_tokens = 4,
                                  .rules = {.min_new_tokens = 9},
                                  .eos_token_ids = ends,
                                  .pad_token_id = 0,
                                  .num_beams = 3,
                                  .num_return_sequences = 2});
  EXPECT_TRUE(at::equal(got.tokens, at::tensor({7, 7, 7, 7, 0, 0, 0, 0}, c10::kLong).view({2, 4})));
  EXPECT_EQ(got.lengths, (std::vector<int64_t>{4, 0}));
  EXPECT_TRUE(std::isfinite(got.scores[0].item<float>()));
  EXPECT_EQ(got.scores[1].item<float>(), -std::numeric_limits<float>::infinity());
}

// Two candidates are left in the first step, one of them the last token of the vocabulary; eight
// are drawn.
TEST(Generate, DrawnBeams_AreNotDrawnTwice) {
  CausalLm model = Recorded("gpt2_shared");
  const int64_t last = Common(model->config()).vocab_size - 1;
  for (const std::vector<int64_t>& ends : {std::vector<int64_t>{}, std::vector<int64_t>{last}}) {
    const Generated got = Generate(*model, Ids({1, 2, 3}), {},
                                   {.max_new_tokens = 3,
                                    .rules = {.sequence_bias = {{{last}, 100.0}}, .top_k = 1},
                                    .eos_token_ids = ends,
                                    .pad_token_id = 0,
                                    .do_sample = true,
                                    .num_beams = 4,
                                    .num_return_sequences = 4});
    std::set<std::vector<int64_t>> rows;
    for (int64_t row = 0; row < 4; ++row) {
      const at::Tensor tokens = got.tokens[row].contiguous();
      const int64_t* const begin = tokens.const_data_ptr<int64_t>();
      rows.insert({begin, begin + tokens.numel()});
    }
    EXPECT_EQ(rows.size(), 4u) << ends.size();
  }
}

TEST(Generate, RulesThatLeaveNoToken_AreAnError) {
  CausalLm model = Recorded("gpt2_shared");
  std::vector<int64_t> all;
  for (int64_t token = 0; token < Common(model->config()).vocab_size; ++token) all.push_back(token);
  for (const int64_t num_beams : {1, 3}) {
    for (const bool sample : {false, true}) {
      const std::string error = ErrorOf([&] {
        Generate(*model, Ids({1, 2, 3}), {},
                 {.rules = {.min_new_tokens = 2},
                  .eos_token_ids = all,
                  .do_sample = sample,
                  .num_beams = num_beams});
      });
      EXPECT_NE(error.find("the rules leave no token for new token 0 of row 0"), std::string::npos)
          << error;
    }
  }
}

TEST(Generate, Seed_DeterminesWhatIsDrawn) {
  CausalLm model = Recorded("gpt2_shared");
  const auto draw = [&](uint64_t seed) {
    return Generate(*model, Ids({1, 2, 3}), {},
                    {.max_new_tokens = 20, .do_sample = true, .seed = seed})
        .tokens;
  };
  EXPECT_TRUE(at::equal(draw(7), draw(7)));
  EXPECT_FALSE(at::equal(draw(7), draw(8)));
}

// Compares the shares of 4000 draws of one token with its probabilities.
TEST(Generate, Draws_FollowTheProbabilities) {
  CausalLm model = Recorded("gpt2_shared");
  constexpr int64_t kDraws = 4000;
  const at::Tensor prompt = Ids({1, 2, 3}).repeat({kDraws, 1});
  const GenerateOptions options = {
      .max_new_tokens = 1, .rules = {.temperature = 2, .top_k = 5}, .do_sample = true};
  const at::Tensor tokens = Generate(*model, prompt, {}, options).tokens.flatten();
  const at::Tensor expected = NextTokenLogprobs(*model, Ids({1, 2, 3}), {}, options.rules).exp()[0];
  for (int64_t token = 0; token < expected.numel(); ++token) {
    const double p = expected[token].item<double>();
    const double share = static_cast<double>(tokens.eq(token).sum().item<int64_t>()) / kDraws;
    EXPECT_NEAR(share, p, 5 * std::sqrt(p * (1 - p) / kDraws) + 1e-9) << token;
  }
}

TEST(Generate, Seed_DeterminesWhichBeamsAreDrawn) {
  CausalLm model = Recorded("gpt2_shared");
  const auto draw = [&](const at::Tensor& prompt, uint64_t seed) {
    return Generate(*model, prompt, {},
                    {.max_new_tokens = 12,
                     .rules = {.temperature = 3},
                     .do_sample = true,
                     .seed = seed,
                     .num_beams = 3})
        .tokens;
  };
  const at::Tensor row = Ids({1, 2, 3});
  EXPECT_TRUE(at::equal(draw(row, 7), draw(row, 7)));
  EXPECT_FALSE(at::equal(draw(row, 7), draw(row, 8)));
  // The output of a row does not depend on the others.
  const at::Tensor both = draw(at::cat({row, Ids({9, 9, 9})}), 7);
  EXPECT_TRUE(at::equal(both[0], draw(row, 7)[0]));
}

TEST(Generate, RowThatItsTokensEnd_GetsNoMore) {
  CausalLm model = Recorded("gpt2_shared");
  const auto third = [](const std::vector<int64_t>& generated) { return generated.size() == 3; };
  for (const int64_t num_beams : {1, 3}) {
    const GenerateOptions options = {
        .max_new_tokens = 9, .eos_token_ids = {{}}, .num_beams = num_beams, .ends_row = third};
    EXPECT_EQ(Generate(*model, Ids({1, 2, 3}), {}, options).tokens.size(1), 3);
  }
}

TEST(Generate, OnTokens_SeesEveryTokenAndCanEndARow) {
  CausalLm model = Recorded("gpt2_shared");
  const at::Tensor prompt = at::tensor({1, 2, 3, 4}, c10::kLong).view({2, 2});
  std::vector<std::vector<int64_t>> seen;
  const Generated got =
      Generate(*model, prompt, {},
               {.max_new_tokens = 5,
                .pad_token_id = 0,
                .on_tokens = [&](const std::vector<int64_t>& tokens, std::vector<bool>& ended) {
                  seen.push_back(tokens);
                  if (seen.size() == 2) ended[0] = true;
                }});
  ASSERT_EQ(seen.size(), 5);
  EXPECT_EQ(got.lengths, (std::vector<int64_t>{2, 5}));
  for (int64_t step = 0; step < 5; ++step) {
    EXPECT_EQ(seen[step][1], got.tokens[1][step].item<int64_t>());
    if (step >= 2) {
      EXPECT_EQ(seen[step][0], 0);
    }
  }
}

TEST(Generate, ModelInTraining_IsInTrainingAfterwards) {
  CausalLm model = Recorded("gpt2_shared");
  model->train();
  Generate(*model, Ids({1}), {}, {.max_new_tokens = 1});
  EXPECT_TRUE(model->is_training());
}

TEST(Generate, PartInAnotherMode_KeepsIt) {
  CausalLm model = Recorded("gpt2_shared");
  const auto modes = [&] {
    std::vector<bool> modes;
    for (const auto& part : model->modules()) modes.push_back(part->is_training());
    return modes;
  };
  model->eval();
  const at::Tensor expected = NextTokenLogprobs(*model, Ids({1, 2, 3}), {}, {});
  for (const bool root : {true, false}) {
    SCOPED_TRACE(root);
    model->train(root);
    // A part that has parts, one of which has the root's mode again.
    const auto parts = model->modules(/*include_self=*/false);
    const auto part = std::find_if(parts.begin(), parts.end(), [](const auto& candidate) {
      return !candidate->children().empty();
    });
    ASSERT_NE(part, parts.end());
    (*part)->train(!root);
    (*part)->children().back()->train(root);
    const std::vector<bool> before = modes();
    EXPECT_TRUE(at::equal(NextTokenLogprobs(*model, Ids({1, 2, 3}), {}, {}), expected));
    EXPECT_EQ(modes(), before);
    Generate(*model, Ids({1}), {}, {.max_new_tokens = 1});
    EXPECT_EQ(modes(), before);
  }
}

TEST(Generate, WhatHasNoMeaning_IsNamed) {
  CausalLm model = Recorded("gpt2_shared");
  const auto error = [&](const at::Tensor& ids, const at::Tensor& mask, GenerateOptions options) {
    return ErrorOf([&] { Generate(*model, ids, mask, options); });
  };
  const at::Tensor prompt = Ids({1, 2});
  const std::pair<std::string, const char*> cases[] = {
      {error({}, {}, {}), "the prompt is empty"},
      {error(at::zeros({1, 0}, c10::kLong), {}, {}), "the prompt is empty"},
      {error(prompt, Ids({1, 0}), {}), "row 0 of the prompt is padded on the right"},
      {error(prompt, Ids({0, 0}), {}), "row 0 of the prompt is padding alone"},
      {error(prompt, Ids({1}), {}), "attention_mask has the shape"},
      {error(Ids({1, 120}), {}, {}), "token 120 is beyond the vocabulary of 120"},
      {error(Ids({1, -1}), {}, {}), "token -1 is beyond the vocabulary of 120"},
      {error(prompt, {}, {.max_new_tokens = 63}),
       "a prompt of 2 tokens and 63 new ones are more than the 64 positions of the model"},
      {error(prompt, {}, {.max_new_tokens = std::numeric_limits<int64_t>::max()}),
       "9223372036854775807 new ones are more than the 64 positions of the model"},
      {error(prompt, {}, {.max_new_tokens = 0}), "max_new_tokens is 0"},
      {error(prompt, {}, {.num_return_sequences = 2}), "num_return_sequences is 2"},
      {error(prompt, {}, {.rules = {.temperature = 0.5}}), "set do_sample too"},
      {error(prompt, {}, {.rules = {.typical_p = 0.5}}), "set do_sample too"},
      {error(prompt, {}, {.rules = {.sequence_bias = {{{1, 120}, 2.0}}}}),
       "sequence_bias names token 120"}};
  for (const auto& [got, want] : cases) {
    EXPECT_NE(got.find(want), std::string::npos) << "'" << got << "' does not contain " << want;
  }
}

TEST(Generate, VocabularyOfOneToken_IsSaidInEveryWay) {
  DecoderConfig config;
  config.vocab_size = config.hidden_size = config.intermediate_size = config.num_layers = 1;
  config.num_heads = config.num_key_value_heads = 1;
  config.head_dim = 2;
  config.max_positions = 5;
  config.sliding_windows = {1};
  const TextModel made = MakeModel(config);
  CausalLm model(std::dynamic_pointer_cast<CausalLmImpl>(made.ptr()));
  const std::vector<GenerateOptions> ways = {{.rules = {.repetition_penalty = 2}},
                                             {.num_beams = 3, .num_return_sequences = 1},
                                             {.rules = {.temperature = 0.5,
                                                        .top_h = 0.5,
                                                        .top_k = 5,
                                                        .top_p = 0.5,
                                                        .min_p = 0.5,
                                                        .typical_p = 0.5,
                                                        .epsilon_cutoff = 0.5,
                                                        .eta_cutoff = 0.5},
                                              .do_sample = true},
                                             {.do_sample = true, .num_beams = 2}};
  for (GenerateOptions options : ways) {
    options.max_new_tokens = 3;
    const at::Tensor tokens = Generate(*model, Ids({0, 0}), {}, options).tokens;
    EXPECT_TRUE(at::equal(tokens, at::zeros({1, 3}, c10::kLong))) << tokens;
    options.eos_token_ids = {0};
    options.rules.min_new_tokens = 1;
    EXPECT_NE(ErrorOf([&] {
                Generate(*model, Ids({0, 0}), {}, options);
              }).find("the rules leave no token"),
              std::string::npos);
  }
}

TEST(Generate, LogitsThatAreNotNumbers_AreAnErrorNotTokens) {
  CausalLm model = Recorded("gpt2_shared");
  {
    const at::NoGradGuard no_grad;
    model->parameters()[0].fill_(std::nan(""));
  }
  EXPECT_NE(
      ErrorOf([&] { Generate(*model, Ids({1})); }).find("new token 0 of row 0 are not numbers"),
      std::string::npos);
}

// The best score belongs to a token, but none can be drawn, and beams have no sums.
TEST(Generate, InfiniteLogits_AreAnErrorWhereProbabilitiesCount) {
  CausalLm model = Recorded("gpt2_shared");
  {
    const at::NoGradGuard no_grad;
    model->named_parameters()["transformer.ln_f.weight"].fill_(0);
    model->named_parameters()["transformer.ln_f.bias"].fill_(1);
    // The head's weight, too. No row contains the token.
    model->named_parameters()["transformer.wte.weight"][7].fill_(
        std::numeric_limits<float>::infinity());
  }
  const auto error = [&](bool sample, int64_t num_beams) {
    return ErrorOf([&] {
      Generate(*model, Ids({1, 2}), {},
               {.max_new_tokens = 1, .do_sample = sample, .num_beams = num_beams});
    });
  };
  EXPECT_EQ(error(false, 1), "");
  EXPECT_NE(error(true, 1).find("the probabilities of new token 0 of row 0 are not numbers"),
            std::string::npos)
      << error(true, 1);
  for (const bool sample : {false, true}) {
    EXPECT_NE(error(sample, 2).find("logits for new token 0 of row 0 are not numbers"),
              std::string::npos)
        << error(sample, 2);
  }
}

TEST(Generate, TemperatureThatMakesScoresInfinite_IsAnErrorNotTheLastToken) {
  CausalLm model = Recorded("gpt2_shared");
  const auto error = [&](int64_t num_beams) {
    return ErrorOf([&] {
      Generate(*model, Ids({1}), {},
               {.rules = {.temperature = 1e-40}, .do_sample = true, .num_beams = num_beams});
    });
  };
  EXPECT_NE(error(1).find("the probabilities of new token 0 of row 0 are not numbers"),
            std::string::npos)
      << error(1);
  EXPECT_NE(error(2).find("temperature"), std::string::npos) << error(2);
}

TEST(Generate, PenaltyThatMakesAScoreInfinite_IsAnErrorWhereATokenIsDrawn) {
  CausalLm model = Recorded("gpt2_shared");
  for (const int64_t num_beams : {1, 3}) {
    GenerateOptions options = {.max_new_tokens = 4,
                               .eos_token_ids = std::vector<int64_t>{5},
                               .pad_token_id = 0,
                               .num_beams = num_beams};
    options.rules.min_new_tokens = 1;
    options.rules.exponential_decay_length_penalty =
        ScoreRules::LengthDecay{.start = 0, .factor = 1e39};
    // It ends the text.
    EXPECT_EQ(Generate(*model, Ids({1, 2}), {}, options).tokens[0][1].item<int64_t>(), 5);
    options.do_sample = true;
    const std::string error = ErrorOf([&] { Generate(*model, Ids({1, 2}), {}, options); });
    EXPECT_NE(error.find("the probabilities of new token 1 of row 0 are not numbers"),
              std::string::npos)
        << error;
  }
}

// Nothing may follow token 7, with which the first row has ended.
TEST(Generate, EndedRowThatHasNothingLeft_IsNoError) {
  CausalLm model = Recorded("gpt2_shared");
  const at::Tensor prompts = at::tensor({1, 2, 3, 4}, c10::kLong).view({2, 2});
  GenerateOptions options = {
      .max_new_tokens = 3, .eos_token_ids = {{}}, .pad_token_id = 0, .do_sample = true};
  options.rules.sequence_bias = {{{2, 7}, 1e3}, {{4, 8}, 1e3}, {{8, 8}, 1e3}};
  for (int64_t token = 0; token < Common(model->config()).vocab_size; ++token) {
    options.rules.bad_words_ids.push_back({7, token});
  }
  options.on_tokens = [](const std::vector<int64_t>&, std::vector<bool>& ended) {
    ended[0] = true;
  };
  EXPECT_TRUE(at::equal(Generate(*model, prompts, {}, options).tokens,
                        at::tensor({7, 0, 0, 8, 8, 8}, c10::kLong).view({2, 3})));
}

TEST(Beams, DrawnCandidates_RunOnByTheirSumsAndEndByTheirPlaces) {
  Beams beams({.max_new_tokens = 9, .num_beams = 2}, {0});
  // The second of the end tokens is not among the first two that were drawn.
  EXPECT_EQ(beams.Step({{.beam = 0, .token = 5, .sum = -3},
                        {.beam = 0, .token = 0, .sum = -4},
                        {.beam = 0, .token = 6, .sum = -1},
                        {.beam = 0, .token = 0, .sum = -0.5},
                        {.beam = 0, .token = 7, .sum = -2}}),
            (std::vector<int64_t>{0, 0}));
  ASSERT_EQ(beams.running().size(), 2);
  EXPECT_EQ(beams.running()[0].tokens, (std::vector<int64_t>{6}));
  EXPECT_EQ(beams.running()[1].tokens, (std::vector<int64_t>{7}));
  ASSERT_EQ(beams.finished().size(), 1);
  EXPECT_EQ(beams.finished()[0].score, -4);
}

// Compares a beam search with all possible sequences, if the beam is wide enough to lose none.
TEST(Beams, WideEnough_FindTheBestSequenceOfAll) {
  constexpr int64_t kVocabulary = 3, kLength = 3;
  // In addition to the end token 0.
  const auto ends = [](const std::vector<int64_t>& tokens) {
    return tokens.size() == 2 && tokens[0] == 1 && tokens[1] == 2;
  };
  // Scores that depend on the last two tokens.
  const auto score = [](const std::vector<int64_t>& tokens, int64_t token) {
    const int64_t last = tokens.empty() ? 2 : tokens.back();
    return -0.1 - static_cast<double>((last * 7 + token * 5 + tokens.size() * 3) % 11) / 10;
  };
  const GenerateOptions options = {.max_new_tokens = kLength,
                                   .num_beams = 27,
                                   .length_penalty = 1,
                                   .early_stopping = EarlyStopping::kNever,
                                   .ends_row = ends};
  Beams beams(options, {0});
  while (!beams.is_done()) {
    std::vector<Beams::Candidate> candidates;
    for (size_t beam = 0; beam < beams.running().size(); ++beam) {
      const auto& running = beams.running()[beam];
      for (int64_t token = 0; token < kVocabulary; ++token) {
        candidates.push_back({.beam = static_cast<int64_t>(beam),
                              .token = token,
                              .sum = running.score + score(running.tokens, token)});
      }
    }
    std::sort(candidates.begin(), candidates.end(),
              [](const auto& a, const auto& b) { return a.sum > b.sum; });
    beams.Step(candidates);
  }
  double best = -std::numeric_limits<double>::infinity();
  const std::function<void(std::vector<int64_t>, double)> extend = [&](std::vector<int64_t> tokens,
                                                                       double sum) {
    const bool ended =
        !tokens.empty() && (tokens.back() == 0 || tokens.size() == kLength || ends(tokens));
    if (ended) {
      best = std::max(best, sum / static_cast<double>(tokens.size()));
      return;
    }
    for (int64_t token = 0; token < kVocabulary; ++token) {
      std::vector<int64_t> longer = tokens;
      longer.push_back(token);
      extend(longer, sum + score(tokens, token));
    }
  };
  extend({}, 0);
  EXPECT_DOUBLE_EQ(beams.finished().front().score, best);
}

}  // namespace
}  // namespace muster::models
