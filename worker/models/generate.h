#ifndef MUSTER_WORKER_MODELS_GENERATE_H_
#define MUSTER_WORKER_MODELS_GENERATE_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "worker/models/score_rules.h"
#include "worker/models/text_model.h"

namespace muster::models {

enum class EarlyStopping {
  kWhenUnlikely,  // transformers' false: stop when no open sequence is likely to become better
  kWhenFull,      // true: stop as soon as num_beams sequences have ended
  kNever,         // "never": stop when no open sequence can become better
};

// How generate() goes on; names and meanings are transformers'.
struct GenerateOptions {
  int64_t max_new_tokens = 20;
  // `rules.end_tokens` and `rules.max_new_tokens` are filled in.
  ScoreRules rules = {};
  // What ends a row; by default the config's. An empty list: nothing does.
  std::optional<std::vector<int64_t>> eos_token_ids = std::nullopt;
  // Texts that end a row as soon as it has one. Texts need a tokenizer: TextGenerator takes them,
  // Generate() refuses them.
  std::vector<std::string> stop_strings = {};
  // What rows that have ended are filled with; by default the config's, else the first end token.
  std::optional<int64_t> pad_token_id = std::nullopt;

  // Draw the next token instead of taking the best one. Each row draws from a sequence of its own,
  // which `seed` and its index determine: what a row says does not depend on the other rows. With
  // beams, the tokens that may follow are drawn from those of all sequences of a row.
  bool do_sample = false;
  uint64_t seed = 0;

  // Beam search with more than 1.
  int64_t num_beams = 1;
  // Of each row: so many of the best beams, or so many draws.
  int64_t num_return_sequences = 1;
  double length_penalty = 1;
  EarlyStopping early_stopping = EarlyStopping::kWhenUnlikely;

  // Whether these generated tokens, of which the last one is new, end their row, as an end token
  // does. Of a beam search, asked for each sequence that may run on or become a result.
  std::function<bool(const std::vector<int64_t>& generated)> ends_row = nullptr;
  // Called after each step with the new token of every row (int64 [B] on the CPU; a row that has
  // ended gives the padding). A row that it marks as ended in `ended` gets no further token. Not
  // with beams, whose tokens can still change.
  std::function<void(const std::vector<int64_t>& tokens, std::vector<bool>& ended)> on_tokens =
      nullptr;
  // Keep the logits of every step.
  bool output_logits = false;
  // Run experts that no token chose as well: for processes that divide a model's parameters and
  // must stay in step. muster::generate sets it for prepared models.
  bool run_idle_experts = false;
  // Let prompt and new tokens be more than the positions that the model was trained for (with
  // rotary positions only).
  bool beyond_context = false;
};

struct Generated {
  // The tokens after the prompt, [B * num_return_sequences, n] int64 on the CPU; n: of the longest.
  at::Tensor tokens = {};
  // With beams: the sum of the log-probabilities over length^length_penalty, float32 [rows].
  at::Tensor scores = {};
  // With output_logits: of the same rows, [rows, n, vocabulary] float32 before any rule.
  at::Tensor logits = {};
};

// What comes after `input_ids` [B, T] int64. Rows of different lengths are padded on the left, with
// 0 in `attention_mask` ([B, T]; undefined: no padding); a padded row says what it says alone, but
// for rotary positions that are stretched by the longest row ("dynamic", "longrope"). The model is
// in evaluation mode meanwhile and keeps no gradients. Blocks. Not thread-safe for one model.
//
// A beam search whose rules leave fewer than num_return_sequences sequences gives empty ones, with
// a score of minus infinity, for the rest.
//
// Throws c10::Error that names an option that has no meaning, a prompt that is empty, padded on the
// right or too long for the model, logits that are not numbers, and a row for which the rules leave
// no token.
Generated Generate(CausalLmImpl& model, const at::Tensor& input_ids,
                   const at::Tensor& attention_mask = {}, const GenerateOptions& options = {});

// log_softmax [B, vocabulary] of the scores of the token after the prompt, after all rules.
at::Tensor NextTokenLogprobs(CausalLmImpl& model, const at::Tensor& input_ids,
                             const at::Tensor& attention_mask, const ScoreRules& rules);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_GENERATE_H_
