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

// The options of generate(); names and meanings are those of transformers.
struct GenerateOptions {
  int64_t max_new_tokens = 20;
  // Generate() fills in `rules.end_tokens` and `rules.max_new_tokens`.
  ScoreRules rules = {};
  // The tokens that end a row; by default the config's. An empty list: none.
  std::optional<std::vector<int64_t>> eos_token_ids = std::nullopt;
  // Texts that end a row as soon as it contains one. They need a tokenizer: TextGenerator accepts
  // them, Generate() refuses them.
  std::vector<std::string> stop_strings = {};
  // The token that pads finished rows; by default the config's, else the first end token.
  std::optional<int64_t> pad_token_id = std::nullopt;

  // Sample the next token instead of taking the best one. Each row draws from its own sequence,
  // determined by `seed` and its index, so its output does not depend on the other rows. With
  // beams, next tokens are drawn from the candidates of all sequences of a row.
  bool do_sample = false;
  uint64_t seed = 0;

  // More than 1: beam search.
  int64_t num_beams = 1;
  // How many of the best beams, or how many samples, to return for each row.
  int64_t num_return_sequences = 1;
  double length_penalty = 1;
  EarlyStopping early_stopping = EarlyStopping::kWhenUnlikely;

  // Returns whether these generated tokens, of which the last one is new, end their row, as an end
  // token does. In a beam search it is called for each sequence that may continue or become a
  // result.
  std::function<bool(const std::vector<int64_t>& generated)> ends_row = nullptr;
  // Called after each step with the new token of every row (int64 [B] on the CPU; padding for a
  // finished row). A row that it marks in `ended` gets no further token. Not with beams, whose
  // tokens can still change.
  std::function<void(const std::vector<int64_t>& tokens, std::vector<bool>& ended)> on_tokens =
      nullptr;
  // Keep the logits of every step.
  bool output_logits = false;
  // Also run experts that no token chose, for processes that share a sharded model and must stay in
  // step. muster::generate sets it for prepared models.
  bool run_idle_experts = false;
  // The most positions of a prompt that the model reads in one pass; 0: all of them. A longer
  // prompt is read in several passes, in which activations take less memory, and each of which uses
  // all weights: raise it if the weights come from a disk, or from a host to a fast GPU. See
  // PrefillChunk().
  int64_t prefill_chunk_size = 2048;
  // Let prompt and new tokens exceed the positions that the model was trained for (only with rotary
  // positions).
  bool beyond_context = false;
};

struct Generated {
  // The tokens after the prompt, [B * num_return_sequences, n] int64 on the CPU; n is that of the
  // longest row.
  at::Tensor tokens = {};
  // With beams: the sum of the log-probabilities over length^length_penalty, float32 [rows].
  at::Tensor scores = {};
  // With output_logits: the logits of the same rows, [rows, n, vocabulary] float32 before any rule.
  at::Tensor logits = {};
  // How many tokens each row has before its padding.
  std::vector<int64_t> lengths = {};
};

// Generates the continuation of `input_ids` [B, T] int64. Rows of different lengths are padded on
// the left, with 0 in `attention_mask` ([B, T]; undefined: no padding). A padded row gives the same
// output as alone, except with rotary positions that the longest row stretches ("dynamic",
// "longrope"). During the call the model is in evaluation mode and keeps no gradients. Blocks. Not
// thread-safe for one model.
//
// If the rules leave a beam search fewer than num_return_sequences sequences, the rest are empty,
// with a score of minus infinity.
//
// Throws a c10::Error that names the problem: a meaningless option, a prompt that is empty, padded
// on the right or too long for the model, logits that are not numbers (or infinite, where tokens
// are drawn or beams are searched), or a row for which the rules leave no token.
Generated Generate(CausalLmImpl& model, const at::Tensor& input_ids,
                   const at::Tensor& attention_mask = {}, const GenerateOptions& options = {});

// Returns log_softmax [B, vocabulary] of the scores of the token after the prompt, after all rules.
at::Tensor NextTokenLogprobs(CausalLmImpl& model, const at::Tensor& input_ids,
                             const at::Tensor& attention_mask, const ScoreRules& rules);

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_GENERATE_H_
