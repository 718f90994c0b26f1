#include "worker/models/score_rules.h"

#include <gtest/gtest.h>

#include <cmath>

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

TEST(ApplyRules, MinNewTokens_RemovesEndTokensUntilThen) {
  const ScoreRules rules = {.min_new_tokens = 2, .end_tokens = {0, 2, 99}};
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1, 1}), {{1}}, 1)), (Ids{0, 2}));
  EXPECT_EQ(Removed(ApplyRules(rules, Row({1, 1, 1}), {{1}}, 2)), (Ids{}));
}

TEST(ApplySamplingRules, TopK_KeepsTheBest) {
  EXPECT_EQ(Removed(ApplySamplingRules({.top_k = 2}, Row({3, 1, 2, 0}))), (Ids{1, 3}));
  EXPECT_EQ(Removed(ApplySamplingRules({.top_k = 9}, Row({3, 1, 2, 0}))), (Ids{}));
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

TEST(CheckRules, NumbersWithoutMeaning_AreNamed) {
  const std::pair<ScoreRules, const char*> cases[] = {
      {{.repetition_penalty = 0}, "repetition_penalty is 0"},
      {{.no_repeat_ngram_size = -1}, "no_repeat_ngram_size is -1"},
      {{.min_new_tokens = -1}, "min_new_tokens is -1"},
      {{.temperature = 0}, "temperature is 0"},
      {{.top_k = -1}, "top_k is -1"},
      {{.top_p = std::nan("")}, "top_p is nan"},
      {{.min_p = 2}, "min_p is 2"}};
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
