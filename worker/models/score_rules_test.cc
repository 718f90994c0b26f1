#include "worker/models/score_rules.h"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"

namespace muster::models {
namespace {

at::Tensor Row(std::vector<double> scores) { return at::tensor(scores, c10::kFloat).unsqueeze(0); }

std::vector<int64_t> Removed(const at::Tensor& scores) {
  std::vector<int64_t> removed;
  for (int64_t i = 0; i < scores.size(1); ++i) {
    if (std::isinf(scores[0][i].item<double>())) removed.push_back(i);
  }
  return removed;
}

using Ids = std::vector<int64_t>;

TEST(ApplyRules, RepetitionPenalty_MakesWhatTheRowHoldsLessLikely) {
  const at::Tensor got = ApplyRules({.repetition_penalty = 2}, Row({4, -4, 4, -4}), {{0, 1, 0}}, 0);
  EXPECT_TRUE(at::equal(got, Row({2, -8, 4, -4})));
}

TEST(ApplyRules, RowsOfDifferentLengths_AreEachTheirOwn) {
  const at::Tensor scores = at::tensor({4., 4., 4., 4.}, c10::kFloat).view({2, 2});
  const at::Tensor got = ApplyRules({.repetition_penalty = 2}, scores, {{0, 1, 1}, {1}}, 0);
  EXPECT_TRUE(at::equal(got.flatten(), at::tensor({2., 2., 4., 2.}, c10::kFloat)));
}

TEST(ApplyRules, NoRepeatNgram_RemovesWhatWouldCompleteOne) {
  const at::Tensor scores = Row({1, 1, 1, 1, 1});
  const std::vector<Tokens> rows = {{1, 2, 3, 1, 2}};
  EXPECT_EQ(Removed(ApplyRules({.no_repeat_ngram_size = 3}, scores, rows, 0)), (Ids{3}));
  EXPECT_EQ(Removed(ApplyRules({.no_repeat_ngram_size = 1}, scores, rows, 0)), (Ids{1, 2, 3}));
  EXPECT_EQ(Removed(ApplyRules({.no_repeat_ngram_size = 9}, scores, rows, 0)), (Ids{}));
}

// The encoder of a decoder is its prompt.
TEST(ApplyRules, EncoderRepetitionPenalty_MakesWhatThePromptHoldsMoreLikely) {
  const at::Tensor got =
      ApplyRules({.encoder_repetition_penalty = 2}, Row({4, -4, 4, -4}), {{0, 1, 0, 2}}, 1);
  EXPECT_TRUE(at::equal(got, Row({8, -2, 4, -4})));
  // For a token that both rules affect, they cancel out.
  EXPECT_TRUE(at::equal(
      ApplyRules({.encoder_repetition_penalty = 2, .repetition_penalty = 2}, Row({4, 4}), {{0}}, 0),
      Row({4, 4})));
  // One row has ended, and contains only its prompt and an end token.
  const at::Tensor two = at::cat({Row({4, 4}), Row({4, 4})});
  const at::Tensor after =
      ApplyRules({.encoder_repetition_penalty = 2}, two, {{0, 1}, {0, 1, 1, 1}}, 3);
  EXPECT_TRUE(at::equal(after[1], Row({8, 4})[0]));
}

TEST(ApplyRules, EncoderNoRepeatNgram_RemovesWhatWouldCompleteOneOfThePrompt) {
  const at::Tensor scores = Row({1, 1, 1, 1, 1});
  const std::vector<Tokens> rows = {{1, 2, 3, 0, 1, 4, 1}};
  EXPECT_EQ(Removed(ApplyRules({.encoder_no_repeat_ngram_size = 2}, scores, rows, 3)), (Ids{2}));
  EXPECT_EQ(Removed(ApplyRules({.no_repeat_ngram_size = 2}, scores, rows, 3)), (Ids{2, 4}));
  EXPECT_EQ(Removed(ApplyRules({.encoder_no_repeat_ngram_size = 9}, scores, rows, 3)), (Ids{}));
}

TEST(ApplyRules, MinNewTokens_RemovesEndTokensUntilThen) {
  const ScoreRules rules = {.min_new_tokens = 2, .end_tokens = {0, 2, 99}};
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1, 1}), {{1}}, 1)), (Ids{0, 2}));
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1, 1}), {{1}}, 2)), (Ids{}));
}

TEST(ApplyRules, BadWords_AreNeverCompleted) {
  const at::Tensor scores = Row({1, 1, 1, 1, 1});
  const ScoreRules rules = {.bad_words_ids = {{0}, {1, 2}, {3, 1, 4}, {2}}, .end_tokens = {2}};
  EXPECT_EQ(Removed(ApplyRules(rules, scores, {{3}}, 0)), (Ids{0}));
  EXPECT_EQ(Removed(ApplyRules(rules, scores, {{3, 1}}, 0)), (Ids{0, 2}));
  EXPECT_EQ(Removed(ApplyRules(rules, scores, {{2, 3, 1}}, 0)), (Ids{0, 2, 4}));
  // A word that is longer than the row is not looked for, as in transformers.
  EXPECT_EQ(Removed(ApplyRules(rules, scores, {{1}}, 0)), (Ids{0}));
  EXPECT_THROW(ApplyRules({.bad_words_ids = {{5}}}, scores, {{3}}, 0), c10::Error);
  EXPECT_THROW(CheckRules({.bad_words_ids = {{}}}), c10::Error);
}

TEST(ApplyRules, MinLength_CountsThePrompt) {
  const ScoreRules rules = {.min_length = 3, .end_tokens = {0, 99}};
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1}), {{1, 1}}, 0)), (Ids{0}));
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1}), {{1, 1, 1}}, 1)), (Ids{}));
}

TEST(ApplyRules, ForcedTokens_LeaveNoChoice) {
  const ScoreRules rules = {
      .max_new_tokens = 4, .forced_bos_token_id = 1, .forced_eos_token_id = {0, 2}};
  const at::Tensor scores = at::ones({2, 3});
  const at::Tensor first = ApplyRules(rules, scores, {{2}, {2, 2}}, 0);
  EXPECT_EQ(Removed(first.narrow(0, 0, 1)), (Ids{0, 2}));
  EXPECT_EQ(Removed(first.narrow(0, 1, 1)), (Ids{}));
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1, 1}), {{2, 2, 2}}, 2)), (Ids{}));
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1, 1}), {{2, 2, 2, 2}}, 3)), (Ids{1}));
  EXPECT_THROW(ApplyRules({.forced_bos_token_id = 3}, Row({1, 1, 1}), {{2}}, 0), c10::Error);
}

TEST(ApplyRules, SuppressedTokens_AreRemoved) {
  const ScoreRules rules = {.suppress_tokens = {0, -1, 99}, .begin_suppress_tokens = {1}};
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1, 1}), {{2}}, 0)), (Ids{0, 1}));
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1, 1}), {{2, 2}}, 1)), (Ids{0}));
  // A forced token does not count as the beginning.
  ScoreRules forced = rules;
  forced.forced_bos_token_id = 2;
  EXPECT_EQ(Removed(ApplyRules(forced, Row({1, 1, 1}), {{2, 2}}, 1)), (Ids{0, 1}));
}

TEST(ApplyRules, LengthDecay_RaisesEndTokensFromThenOn) {
  const ScoreRules rules = {.end_tokens = {0, 1, 99},
                            .exponential_decay_length_penalty = {{.start = 1, .factor = 2}}};
  EXPECT_TRUE(at::equal(ApplyRules(rules, Row({3, -2, 5}), {{2}}, 1), Row({3, -2, 5})));
  EXPECT_TRUE(at::equal(ApplyRules(rules, Row({3, -2, 5}), {{2}}, 3), Row({12, 4, 5})));
  // An end token that cannot come yet does not come.
  ScoreRules early = rules;
  early.min_new_tokens = 9;
  EXPECT_EQ(Removed(ApplyRules(early, Row({3, -2, 5}), {{2}}, 3)), (Ids{0, 1}));
}

TEST(ApplySamplingRules, TopK_KeepsTheBest) {
  EXPECT_EQ(Removed(ApplySamplingRules({.top_k = 2}, Row({3, 1, 2, 0}))), (Ids{1, 3}));
  EXPECT_EQ(Removed(ApplySamplingRules({.top_k = 9}, Row({3, 1, 2, 0}))), (Ids{}));
}

TEST(ApplySamplingRules, TopH_KeepsTheLikeliestWhosePartOfTheEntropyIsSmall) {
  // Parts 0.306, 0.347, 0.230, 0.150 of an entropy of 1.033.
  const at::Tensor scores = Row({std::log(0.25), std::log(0.6), std::log(0.1), std::log(0.05)});
  EXPECT_EQ(Removed(ApplySamplingRules({.top_h = 0.7}, scores)), (Ids{2, 3}));
  EXPECT_EQ(Removed(ApplySamplingRules({.top_h = 0.01}, scores)), (Ids{0, 2, 3}));
  // Removed tokens do not count.
  const double gone = -std::numeric_limits<double>::infinity();
  EXPECT_EQ(Removed(ApplySamplingRules({.top_h = 0.9}, Row({gone, 2, 1, gone}))), (Ids{0, 2, 3}));
  // Never more than 100, even if the share is 1.
  const at::Tensor many = at::arange(120, c10::kFloat).mul(-0.01).unsqueeze(0);
  EXPECT_GE(Removed(ApplySamplingRules({.top_h = 1}, many)).size(), 20);
}

TEST(ApplySamplingRules, TopP_KeepsTheMostLikelyThatReachIt) {
  const at::Tensor scores = Row({std::log(0.5), std::log(0.25), std::log(0.15), std::log(0.1)});
  EXPECT_EQ(Removed(ApplySamplingRules({.top_p = 0.7}, scores)), (Ids{2, 3}));
  EXPECT_EQ(Removed(ApplySamplingRules({.top_p = 1e-9}, scores)), (Ids{1, 2, 3}));
}

TEST(ApplySamplingRules, MinP_IsAShareOfTheBest) {
  const at::Tensor scores = Row({std::log(0.5), std::log(0.26), std::log(0.24)});
  EXPECT_EQ(Removed(ApplySamplingRules({.min_p = 0.5}, scores)), (Ids{2}));
}

TEST(ApplySamplingRules, TypicalP_KeepsWhatIsAsLikelyAsTheEntropyLetsOneExpect) {
  const at::Tensor scores = Row({std::log(0.6), std::log(0.25), std::log(0.1), std::log(0.05)});
  // An entropy of 1.03: 0.25 is nearest to exp(-1.03), 0.6 next.
  EXPECT_EQ(Removed(ApplySamplingRules({.typical_p = 0.2}, scores)), (Ids{0, 2, 3}));
  EXPECT_EQ(Removed(ApplySamplingRules({.typical_p = 0.5}, scores)), (Ids{2, 3}));
}

TEST(ApplySamplingRules, Cutoffs_LeaveTheBest) {
  const at::Tensor scores = Row({std::log(0.6), std::log(0.25), std::log(0.1), std::log(0.05)});
  EXPECT_EQ(Removed(ApplySamplingRules({.epsilon_cutoff = 0.2}, scores)), (Ids{2, 3}));
  EXPECT_EQ(Removed(ApplySamplingRules({.epsilon_cutoff = 0.9}, scores)), (Ids{1, 2, 3}));
  // The entropy of 1.03 makes it sqrt(0.12) * exp(-1.03) = 0.124, and 0.12 is less.
  EXPECT_EQ(Removed(ApplySamplingRules({.eta_cutoff = 0.12}, scores)), (Ids{2, 3}));
  // sqrt(0.9) * exp(-1.03) = 0.339.
  EXPECT_EQ(Removed(ApplySamplingRules({.eta_cutoff = 0.9}, scores)), (Ids{1, 2, 3}));
}

// This keeps enough for one sequence of a beam search to continue beside the end tokens.
TEST(ApplySamplingRules, SoManyOfTheBest_Stay) {
  const at::Tensor scores = Row({std::log(0.6), std::log(0.25), std::log(0.1), std::log(0.05)});
  for (const ScoreRules& rules :
       {ScoreRules{.top_k = 1}, ScoreRules{.top_p = 0.1}, ScoreRules{.min_p = 1},
        ScoreRules{.epsilon_cutoff = 0.9}, ScoreRules{.eta_cutoff = 0.9}}) {
    EXPECT_EQ(Removed(ApplySamplingRules(rules, scores, 2)), (Ids{2, 3}));
  }
  EXPECT_EQ(Removed(ApplySamplingRules({.typical_p = 0.1}, scores, 9)), (Ids{}));
}

TEST(ApplyRules, SequenceBias_CountsForWhatWouldCompleteASequence) {
  const ScoreRules rules = {.sequence_bias = {{{0}, 1.0}, {{3, 1}, 2.0}, {{2, 3, 1}, -5.0}},
                            .repetition_penalty = 2};
  // Applied before the repetition penalty.
  EXPECT_TRUE(at::equal(ApplyRules(rules, Row({4, 4, 4, 4}), {{0, 3}}, 0), Row({2.5, 6, 4, 2})));
  // A row that is no longer than the sequence before the last token does not count, as in
  // transformers.
  EXPECT_TRUE(at::equal(ApplyRules(rules, Row({4, 4, 4, 4}), {{3}}, 0), Row({5, 4, 4, 2})));
  EXPECT_TRUE(at::equal(ApplyRules(rules, Row({4, 4, 4, 4}), {{1, 2, 3}}, 0), Row({5, 0.5, 2, 2})));
  EXPECT_THROW(CheckRules({.sequence_bias = {{{}, 1.0}}}), c10::Error);
}

TEST(CheckRules, NumbersWithoutMeaning_AreNamed) {
  const std::pair<ScoreRules, const char*> cases[] = {
      {{.repetition_penalty = 0}, "repetition_penalty is 0"},
      {{.no_repeat_ngram_size = -1}, "no_repeat_ngram_size is -1"},
      {{.min_new_tokens = -1}, "min_new_tokens is -1"},
      {{.temperature = 0}, "temperature is 0"},
      {{.top_h = 1.5}, "top_h is 1.5"},
      {{.top_k = -1}, "top_k is -1"},
      {{.top_p = std::nan("")}, "top_p is nan"},
      {{.min_p = 2}, "min_p is 2"},
      {{.typical_p = 0}, "typical_p is 0"},
      {{.epsilon_cutoff = 1}, "epsilon_cutoff is 1"},
      {{.eta_cutoff = -1}, "eta_cutoff is -1"}};
  for (const auto& [rules, message] : cases) {
    try {
      CheckRules(rules);
      ADD_FAILURE() << message;
    } catch (const c10::Error& error) {
      EXPECT_NE(std::string(error.what()).find(message), std::string::npos) << error.what();
    }
  }
}

}  // namespace
}  // namespace muster::models
