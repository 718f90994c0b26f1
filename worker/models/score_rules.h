#ifndef MUSTER_WORKER_MODELS_SCORE_RULES_H_
#define MUSTER_WORKER_MODELS_SCORE_RULES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster::models {

// The rules that change the scores of the next token before one is chosen. A rule at its default
// value does nothing.
struct ScoreRules {
  // For each sequence, the number that is added to the score of its last token if the row ends with
  // the tokens before it.
  std::map<std::vector<int64_t>, double> sequence_bias = {};
  // The score of every token in the prompt is multiplied by this if positive, else divided: values
  // above 1 keep the row close to its prompt.
  double encoder_repetition_penalty = 1;
  // The score of every token in the row is divided by this if positive, else multiplied (Keskar et
  // al., 2019).
  double repetition_penalty = 1;
  // No n-gram of this size occurs twice; 0: no rule.
  int64_t no_repeat_ngram_size = 0;
  // No n-gram of this size from the prompt occurs; 0: no rule.
  int64_t encoder_no_repeat_ngram_size = 0;
  // None of these token sequences occurs; a sequence that is a single end token is ignored.
  std::vector<std::vector<int64_t>> bad_words_ids = {};
  // End tokens cannot occur before a row has this many tokens, including its prompt, and ...
  int64_t min_length = 0;
  // ... before this many tokens have been generated.
  int64_t min_new_tokens = 0;
  // generate() fills these two in.
  std::vector<int64_t> end_tokens = {};
  int64_t max_new_tokens = 0;

  // The token after a prompt of one token.
  std::optional<int64_t> forced_bos_token_id = std::nullopt;
  // The last of max_new_tokens is one of these; empty: no rule.
  std::vector<int64_t> forced_eos_token_id = {};
  // Once n more than `start` tokens have been generated, the scores of end tokens grow by (factor^n
  // - 1) times their absolute values.
  struct LengthDecay {
    int64_t start = 0;
    double factor = 1;
  };
  std::optional<LengthDecay> exponential_decay_length_penalty = std::nullopt;
  // Tokens that never occur.
  std::vector<int64_t> suppress_tokens = {};
  // Tokens that do not occur first or, after a token from forced_bos_token_id, next.
  std::vector<int64_t> begin_suppress_tokens = {};

  // Only for sampling, applied in this order.
  double temperature = 1;
  // Of the 100 best tokens, keeps the most likely ones as long as their contribution to the entropy
  // does not exceed this share of it (Potraghloo et al., 2025); 0: no rule.
  double top_h = 0;
  // Keeps only the k best tokens; 0: all.
  int64_t top_k = 0;
  // Keeps only the most likely tokens whose probabilities add up to this (Holtzman et al., 2020).
  double top_p = 1;
  // Keeps only tokens with at least this share of the best one's probability.
  double min_p = 0;
  // Keeps only the tokens whose information content is nearest to the entropy and whose
  // probabilities add up to this (Meister et al., 2022).
  double typical_p = 1;
  // Keeps only tokens with at least this probability; 0: all.
  double epsilon_cutoff = 0;
  // Keeps only tokens with at least this probability or, if the entropy is high, at least its
  // square root times exp(-entropy) (Hewitt et al., 2022); 0: all.
  double eta_cutoff = 0;

  // Finally converts the scores to log-probabilities again. Matters in a beam search, which adds
  // them up.
  bool renormalize_logits = false;
};

// Throws a c10::Error that names a rule with a meaningless number.
void CheckRules(const ScoreRules& rules);

// The tokens of a row, without padding.
using Tokens = std::vector<int64_t>;
bool Contains(const Tokens& tokens, int64_t token);

// Returns `scores` [rows, vocabulary] float32 after the rules that are not only for sampling, in
// the order above. `rows`: the prompt and generated tokens of each row; `num_generated` of them are
// generated. Removed tokens get minus infinity. transformers counts padding as tokens of the row;
// this function does not, so that a row's output does not depend on its padding. Throws c10::Error
// for a forced token or a token of a bad word that is not in the vocabulary.
at::Tensor ApplyRules(const ScoreRules& rules, const at::Tensor& scores,
                      const std::vector<Tokens>& rows, int64_t num_generated);

// Returns `scores` after the rules for sampling. Each rule keeps at least the `min_kept` best
// tokens, except top_h, which keeps at least one, and typical_p, which keeps the most typical ones.
at::Tensor ApplySamplingRules(const ScoreRules& rules, const at::Tensor& scores,
                              int64_t min_kept = 1);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_SCORE_RULES_H_
