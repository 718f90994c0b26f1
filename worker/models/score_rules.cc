#include "worker/models/score_rules.h"

#include <algorithm>
#include <cmath>
#include <iterator>
#include <limits>
#include <optional>

#include "ATen/TensorOperators.h"
#include "ATen/ops/cumsum.h"
#include "ATen/ops/full.h"
#include "ATen/ops/gather.h"
#include "ATen/ops/log_softmax.h"
#include "ATen/ops/logsumexp.h"
#include "ATen/ops/ones.h"
#include "ATen/ops/scatter.h"
#include "ATen/ops/softmax.h"
#include "ATen/ops/sort.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/topk.h"
#include "ATen/ops/where.h"
#include "ATen/ops/zeros.h"

namespace muster::models {
namespace {

constexpr double kRemoved = -std::numeric_limits<double>::infinity();

at::Tensor Penalize(double penalty, const at::Tensor& scores, const std::vector<Tokens>& rows) {
  size_t longest = 0;
  for (const Tokens& row : rows) longest = std::max(longest, row.size());
  if (longest == 0) return scores;
  // Shorter rows repeat one of their own tokens, which changes nothing.
  std::vector<int64_t> flat;
  for (const Tokens& row : rows) {
    TORCH_CHECK(!row.empty(), "a row has no token");
    flat.insert(flat.end(), row.begin(), row.end());
    flat.insert(flat.end(), longest - row.size(), row.back());
  }
  const at::Tensor ids = at::tensor(flat, c10::kLong)
                             .view({static_cast<int64_t>(rows.size()), -1})
                             .to(scores.device());
  const at::Tensor held = scores.gather(1, ids);
  return scores.scatter(1, ids, at::where(held < 0, held * penalty, held / penalty));
}

void CheckToken(const char* rule, int64_t token, int64_t vocabulary) {
  TORCH_CHECK_VALUE(token >= 0 && token < vocabulary, rule, " names token ", token,
                    "; the vocabulary has ", vocabulary);
}

// A row that has ended, whose scores are ignored, has fewer generated tokens than `num_generated`.
Tokens PromptOf(const Tokens& row, int64_t num_generated) {
  if (num_generated >= static_cast<int64_t>(row.size())) return row;
  return {row.begin(), row.end() - num_generated};
}

// Returns the tokens that would complete an n-gram in `row` that occurs in `held`.
std::vector<int64_t> Completions(const Tokens& held, const Tokens& row, size_t size) {
  std::vector<int64_t> found;
  if (row.size() + 1 < size) return found;
  const auto last = row.end() - static_cast<int64_t>(size - 1);
  for (size_t begin = 0; begin + size <= held.size(); ++begin) {
    const auto at = held.begin() + static_cast<int64_t>(begin);
    if (std::equal(last, row.end(), at)) found.push_back(*(at + static_cast<int64_t>(size - 1)));
  }
  return found;
}

// Whether `row` ends with the sequence without its last token.
bool MayComplete(const std::vector<int64_t>& sequence, const Tokens& row) {
  return sequence.size() == 1 ||
         (row.size() >= sequence.size() &&
          std::equal(sequence.begin(), sequence.end() - 1,
                     row.end() - static_cast<int64_t>(sequence.size() - 1)));
}

// Returns the tokens that would complete one of the sequences.
std::vector<int64_t> BadWordEnds(const ScoreRules& rules, const Tokens& row, int64_t vocabulary) {
  std::vector<int64_t> found;
  for (const std::vector<int64_t>& word : rules.bad_words_ids) {
    for (const int64_t token : word) CheckToken("bad_words_ids", token, vocabulary);
    if (word.size() == 1 && Contains(rules.end_tokens, word[0])) continue;
    if (MayComplete(word, row)) found.push_back(word.back());
  }
  return found;
}

at::Tensor ApplyBias(const ScoreRules& rules, const at::Tensor& scores,
                     const std::vector<Tokens>& rows) {
  at::Tensor bias = at::zeros(scores.sizes(), c10::kFloat);
  auto values = bias.accessor<float, 2>();
  for (const auto& [sequence, value] : rules.sequence_bias) {
    for (const int64_t token : sequence) CheckToken("sequence_bias", token, scores.size(1));
    for (size_t row = 0; row < rows.size(); ++row) {
      if (!MayComplete(sequence, rows[row])) continue;
      values[static_cast<int64_t>(row)][sequence.back()] += static_cast<float>(value);
    }
  }
  return scores + bias.to(scores.device());
}

at::Tensor Remove(const at::Tensor& scores, const std::vector<std::vector<int64_t>>& tokens) {
  std::vector<int64_t> rows, columns;
  for (size_t row = 0; row < tokens.size(); ++row) {
    rows.insert(rows.end(), tokens[row].size(), static_cast<int64_t>(row));
    columns.insert(columns.end(), tokens[row].begin(), tokens[row].end());
  }
  if (rows.empty()) return scores;
  const auto index = [&scores](const std::vector<int64_t>& values) {
    return std::make_optional(at::tensor(values, c10::kLong).to(scores.device()));
  };
  return scores.index_put({index(rows), index(columns)}, at::full({}, kRemoved, scores.options()));
}

// Leaves a row only these tokens.
void Force(const char* rule, const std::vector<int64_t>& tokens, at::Tensor row) {
  row.fill_(kRemoved);
  for (const int64_t token : tokens) {
    CheckToken(rule, token, row.size(0));
    row[token].fill_(0);
  }
}

at::Tensor ApplyForcedTokens(const ScoreRules& rules, const at::Tensor& scores,
                             const std::vector<Tokens>& rows, int64_t num_generated) {
  const bool is_last =
      !rules.forced_eos_token_id.empty() && num_generated + 1 == rules.max_new_tokens;
  at::Tensor out;
  for (size_t i = 0; i < rows.size(); ++i) {
    const bool is_first = rules.forced_bos_token_id.has_value() && rows[i].size() == 1;
    if (!is_first && !is_last) continue;
    if (!out.defined()) out = scores.clone();
    at::Tensor row = out[static_cast<int64_t>(i)];
    if (is_first) Force("forced_bos_token_id", {*rules.forced_bos_token_id}, row);
    if (is_last) Force("forced_eos_token_id", rules.forced_eos_token_id, row);
  }
  return out.defined() ? out : scores;
}

at::Tensor ApplyLengthDecay(const ScoreRules& rules, const at::Tensor& scores,
                            int64_t num_generated) {
  const auto& decay = rules.exponential_decay_length_penalty;
  if (!decay.has_value() || num_generated <= decay->start) return scores;
  std::vector<int64_t> ends;
  for (const int64_t token : rules.end_tokens) {
    if (token >= 0 && token < scores.size(1)) ends.push_back(token);
  }
  if (ends.empty()) return scores;
  const double growth =
      std::pow(decay->factor, static_cast<double>(num_generated - decay->start)) - 1;
  const at::Tensor columns = at::tensor(ends, c10::kLong).to(scores.device());
  const at::Tensor held = scores.index_select(1, columns);
  // Removed tokens stay removed: infinity minus infinity is NaN.
  const at::Tensor grown = at::where(held == kRemoved, held, held + held.abs() * growth);
  return scores.index_copy(1, columns, grown);
}

// Returns [rows, 1]: the lowest of the best `count` scores of each row.
at::Tensor LeastOfBest(const at::Tensor& scores, int64_t count) {
  return std::get<0>(scores.topk(count, -1)).narrow(-1, count - 1, 1);
}

// Returns [rows, 1]; removed tokens do not count.
at::Tensor Entropy(const at::Tensor& logprobs) {
  return (logprobs * logprobs.exp()).nansum(-1, true).neg();
}

// Uses transformers' operations, so that sums are rounded in the same way, which matters at a share
// of 1.
at::Tensor KeepTopH(double share, const at::Tensor& scores) {
  constexpr int64_t kMost = 100;
  const auto [best, ids] = scores.topk(std::min(kMost, scores.size(1)), -1);
  const at::Tensor logits = best - best.logsumexp(-1, /*keepdim=*/true);
  const at::Tensor likely = at::softmax(logits, -1);
  const at::Tensor entropy =
      (logits.clamp_min(std::numeric_limits<float>::lowest()) * likely).sum(-1, true).neg();
  // From a removed token on, the sums are NaN, for which the comparison is false.
  const at::Tensor sums = (likely.neg() * likely.log()).cumsum(-1);
  at::Tensor kept = sums <= entropy * share;
  kept.narrow(-1, 0, 1).fill_(true);
  const at::Tensor removed = at::ones(scores.sizes(), kept.options());
  return scores.masked_fill(removed.scatter(-1, ids, kept.logical_not()), kRemoved);
}

at::Tensor KeepTypical(double mass, const at::Tensor& scores, int64_t kept) {
  const at::Tensor logprobs = at::log_softmax(scores, -1);
  const at::Tensor distance = (logprobs.neg() - Entropy(logprobs)).abs();
  const auto [sorted, order] = distance.sort(/*dim=*/-1, /*descending=*/false);
  const at::Tensor sums = at::softmax(scores.gather(-1, order), -1).cumsum(-1);
  // The token that reaches the mass stays.
  const at::Tensor last = (sums < mass).sum(-1, true).clamp_max(scores.size(1) - 1);
  at::Tensor removed = sorted > sorted.gather(-1, last);
  removed.narrow(-1, 0, kept).fill_(false);
  return scores.masked_fill(removed.scatter(-1, order, removed), kRemoved);
}

}  // namespace

bool Contains(const Tokens& tokens, int64_t token) {
  return std::find(tokens.begin(), tokens.end(), token) != tokens.end();
}

void CheckRules(const ScoreRules& rules) {
  TORCH_CHECK_VALUE(rules.repetition_penalty > 0, "repetition_penalty is ",
                    rules.repetition_penalty, "; it must be above 0 (1: none)");
  TORCH_CHECK_VALUE(rules.encoder_repetition_penalty > 0, "encoder_repetition_penalty is ",
                    rules.encoder_repetition_penalty, "; it must be above 0 (1: none)");
  TORCH_CHECK_VALUE(rules.encoder_no_repeat_ngram_size >= 0, "encoder_no_repeat_ngram_size is ",
                    rules.encoder_no_repeat_ngram_size, "; it must not be negative");
  TORCH_CHECK_VALUE(rules.no_repeat_ngram_size >= 0, "no_repeat_ngram_size is ",
                    rules.no_repeat_ngram_size, "; it must not be negative");
  TORCH_CHECK_VALUE(rules.min_new_tokens >= 0, "min_new_tokens is ", rules.min_new_tokens,
                    "; it must not be negative");
  TORCH_CHECK_VALUE(rules.min_length >= 0, "min_length is ", rules.min_length,
                    "; it must not be negative");
  for (const auto& [sequence, bias] : rules.sequence_bias) {
    TORCH_CHECK_VALUE(!sequence.empty(), "sequence_bias has a sequence without tokens");
    TORCH_CHECK_VALUE(std::isfinite(bias), "sequence_bias has a bias that is no number");
  }
  for (const std::vector<int64_t>& word : rules.bad_words_ids) {
    TORCH_CHECK_VALUE(!word.empty(), "bad_words_ids has a word without tokens");
  }
  if (const auto& decay = rules.exponential_decay_length_penalty) {
    TORCH_CHECK_VALUE(decay->start >= 0 && std::isfinite(decay->factor) && decay->factor > 0,
                      "exponential_decay_length_penalty is ", decay->start, ", ", decay->factor,
                      "; it must be a number of tokens and a factor above 0");
  }
  TORCH_CHECK_VALUE(rules.temperature > 0, "temperature is ", rules.temperature,
                    "; it must be above 0 (for the best token always, do not sample)");
  TORCH_CHECK_VALUE(rules.top_h >= 0 && rules.top_h <= 1, "top_h is ", rules.top_h,
                    "; it must be above 0 and at most 1 (0: no rule)");
  TORCH_CHECK_VALUE(rules.top_k >= 0, "top_k is ", rules.top_k, "; it must not be negative");
  TORCH_CHECK_VALUE(rules.top_p > 0 && rules.top_p <= 1, "top_p is ", rules.top_p,
                    "; it must be above 0 and at most 1");
  TORCH_CHECK_VALUE(rules.min_p >= 0 && rules.min_p <= 1, "min_p is ", rules.min_p,
                    "; it must be from 0 to 1");
  TORCH_CHECK_VALUE(rules.typical_p > 0 && rules.typical_p <= 1, "typical_p is ", rules.typical_p,
                    "; it must be above 0 and at most 1");
  TORCH_CHECK_VALUE(rules.epsilon_cutoff >= 0 && rules.epsilon_cutoff < 1, "epsilon_cutoff is ",
                    rules.epsilon_cutoff, "; it must be from 0 to below 1");
  TORCH_CHECK_VALUE(rules.eta_cutoff >= 0 && rules.eta_cutoff < 1, "eta_cutoff is ",
                    rules.eta_cutoff, "; it must be from 0 to below 1");
}

at::Tensor ApplyRules(const ScoreRules& rules, const at::Tensor& scores,
                      const std::vector<Tokens>& rows, int64_t num_generated) {
  at::Tensor out = scores;
  const int64_t vocabulary = scores.size(1);
  if (!rules.sequence_bias.empty()) out = ApplyBias(rules, out, rows);
  if (rules.encoder_repetition_penalty != 1) {
    std::vector<Tokens> prompts;
    for (const Tokens& row : rows) prompts.push_back(PromptOf(row, num_generated));
    out = Penalize(1 / rules.encoder_repetition_penalty, out, prompts);
  }
  if (rules.repetition_penalty != 1) out = Penalize(rules.repetition_penalty, out, rows);
  std::vector<std::vector<int64_t>> removed(rows.size()), suppressed(rows.size());
  const auto append = [vocabulary](const std::vector<int64_t>& tokens, std::vector<int64_t>* to) {
    std::copy_if(tokens.begin(), tokens.end(), std::back_inserter(*to),
                 [vocabulary](int64_t token) { return token >= 0 && token < vocabulary; });
  };
  for (size_t i = 0; i < rows.size(); ++i) {
    const auto length = static_cast<int64_t>(rows[i].size());
    if (rules.no_repeat_ngram_size > 0) {
      removed[i] = Completions(rows[i], rows[i], static_cast<size_t>(rules.no_repeat_ngram_size));
    }
    if (rules.encoder_no_repeat_ngram_size > 0) {
      append(Completions(PromptOf(rows[i], num_generated), rows[i],
                         static_cast<size_t>(rules.encoder_no_repeat_ngram_size)),
             &removed[i]);
    }
    append(BadWordEnds(rules, rows[i], vocabulary), &removed[i]);
    if (num_generated < rules.min_new_tokens || length < rules.min_length) {
      append(rules.end_tokens, &removed[i]);
    }
    append(rules.suppress_tokens, &suppressed[i]);
    const bool has_forced = rules.forced_bos_token_id.has_value() && length - num_generated == 1;
    if (num_generated == (has_forced ? 1 : 0)) append(rules.begin_suppress_tokens, &suppressed[i]);
  }
  out = ApplyForcedTokens(rules, Remove(out, removed), rows, num_generated);
  return Remove(ApplyLengthDecay(rules, out, num_generated), suppressed);
}

at::Tensor ApplySamplingRules(const ScoreRules& rules, const at::Tensor& scores, int64_t min_kept) {
  at::Tensor out = rules.temperature == 1 ? scores : scores / rules.temperature;
  const int64_t kept = std::min(min_kept, scores.size(1));
  if (rules.top_h > 0) out = KeepTopH(rules.top_h, out);
  if (const int64_t top_k = std::max(rules.top_k, kept); rules.top_k > 0 && top_k < out.size(1)) {
    out = out.masked_fill(out < LeastOfBest(out, top_k), kRemoved);
  }
  if (rules.top_p < 1) {
    const auto [sorted, order] = out.sort(/*dim=*/-1, /*descending=*/false);
    at::Tensor removed = at::softmax(sorted, -1).cumsum(-1) <= 1 - rules.top_p;
    removed.narrow(-1, removed.size(-1) - kept, kept).fill_(false);
    out = out.masked_fill(removed.scatter(-1, order, removed), kRemoved);
  }
  if (rules.min_p > 0) {
    const at::Tensor probabilities = at::softmax(out, -1);
    const at::Tensor best = std::get<1>(probabilities.topk(kept, -1));
    const at::Tensor removed = probabilities < probabilities.amax(-1, true) * rules.min_p;
    out = out.masked_fill(removed.scatter(-1, best, false), kRemoved);
  }
  if (rules.typical_p < 1) out = KeepTypical(rules.typical_p, out, kept);
  if (rules.epsilon_cutoff > 0) {
    const at::Tensor removed = at::softmax(out, -1) < rules.epsilon_cutoff;
    out = out.masked_fill(removed & (out < LeastOfBest(out, kept)), kRemoved);
  }
  if (rules.eta_cutoff > 0) {
    const at::Tensor least =
        (Entropy(at::log_softmax(out, -1)).neg().exp() * std::sqrt(rules.eta_cutoff))
            .clamp_max(rules.eta_cutoff);
    const at::Tensor removed = at::softmax(out, -1) < least;
    out = out.masked_fill(removed & (out < LeastOfBest(out, kept)), kRemoved);
  }
  return out;
}

}  // namespace muster::models
