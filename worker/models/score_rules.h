#ifndef MUSTER_WORKER_MODELS_SCORE_RULES_H_
#define MUSTER_WORKER_MODELS_SCORE_RULES_H_

#include <cstdint>
#include <map>
#include <optional>
#include <vector>

#include "ATen/core/Tensor.h"

namespace muster::models {

// What changes the scores of the next token before one is chosen. A rule at its default value does
// nothing.
struct ScoreRules {
  // What is added to the score of the last token of a sequence where the row ends with the tokens
  // before it.
  std::map<std::vector<int64_t>, double> sequence_bias = {};
  // The score of every token that the prompt holds is multiplied by it if positive, else divided:
  // above 1 the row keeps to its prompt.
  double encoder_repetition_penalty = 1;
  // The score of every token that the row holds is divided by it if positive, else multiplied
  // (Keskar et al., 2019).
  double repetition_penalty = 1;
  // No n-gram of this size comes twice; 0: no rule.
  int64_t no_repeat_ngram_size = 0;
  // No n-gram of this size comes that the prompt holds; 0: no rule.
  int64_t encoder_no_repeat_ngram_size = 0;
  // None of these sequences of tokens comes; an end token alone is no such sequence.
  std::vector<std::vector<int64_t>> bad_words_ids = {};
  // End tokens cannot come before a row has so many tokens, its prompt included, and ...
  int64_t min_length = 0;
  // ... before so many tokens have been generated.
  int64_t min_new_tokens = 0;
  // generate() fills these two in.
  std::vector<int64_t> end_tokens = {};
  int64_t max_new_tokens = 0;

  // What follows a prompt of one token.
  std::optional<int64_t> forced_bos_token_id = std::nullopt;
  // One of these is the last of max_new_tokens; empty: no rule.
  std::vector<int64_t> forced_eos_token_id = {};
  // Once more than `start` tokens have been generated, n of them more, the scores of end tokens
  // grow by (factor^n - 1) times what they are without their sign.
  struct LengthDecay {
    int64_t start = 0;
    double factor = 1;
  };
  std::optional<LengthDecay> exponential_decay_length_penalty = std::nullopt;
  // Never.
  std::vector<int64_t> suppress_tokens = {};
  // Not as the first token; behind one that forced_bos_token_id gives, not as the next.
  std::vector<int64_t> begin_suppress_tokens = {};

  // For sampling alone, applied in this order.
  double temperature = 1;
  // Of the 100 best tokens the most likely ones stay, for as long as their part of the entropy does
  // not exceed this share of it (Potraghloo et al., 2025); 0: no rule.
  double top_h = 0;
  // Only the k best tokens stay; 0: all.
  int64_t top_k = 0;
  // Only the most likely tokens stay whose probabilities together reach it (Holtzman et al., 2020).
  double top_p = 1;
  // Only tokens stay that are at least so likely, as a share of the best one's probability.
  double min_p = 0;
  // Only the tokens stay that are nearest to as likely as the entropy lets one expect and whose
  // probabilities together reach it (Meister et al., 2022).
  double typical_p = 1;
  // Only tokens stay that are at least so likely; 0: all.
  double epsilon_cutoff = 0;
  // Only tokens stay that are at least so likely, or, where the entropy is high, its square root
  // times exp(-entropy) (Hewitt et al., 2022); 0: all.
  double eta_cutoff = 0;

  // The scores become log-probabilities again, last of all. It counts in a beam search, whose sums
  // are of them.
  bool renormalize_logits = false;
};

// Throws c10::Error that names a rule whose number has no meaning.
void CheckRules(const ScoreRules& rules);

// The tokens of a row, without padding.
using Tokens = std::vector<int64_t>;
bool Contains(const Tokens& tokens, int64_t token);

// `scores` [rows, vocabulary] float32 after the rules that are not for sampling alone, in the order
// above. `rows`: what each row holds, prompt and generated tokens; of those `num_generated` are
// generated. Removed tokens get minus infinity. transformers lets padding count as tokens of the
// row; here it does not, so that a row says the same however much it is padded. Throws c10::Error
// for a forced token and one of a bad word that the vocabulary does not have.
at::Tensor ApplyRules(const ScoreRules& rules, const at::Tensor& scores,
                      const std::vector<Tokens>& rows, int64_t num_generated);

// `scores` after the rules for sampling. Each rule leaves the best token, or with `min_kept` so
// many of the best, but for top_h, which leaves one, and typical_p, which leaves the most typical
// ones.
at::Tensor ApplySamplingRules(const ScoreRules& rules, const at::Tensor& scores,
                              int64_t min_kept = 1);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_SCORE_RULES_H_
