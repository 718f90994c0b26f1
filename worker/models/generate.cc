#include "worker/models/generate.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>
#include <set>
#include <utility>

#include "ATen/TensorOperators.h"
#include "ATen/ops/argmax.h"
#include "ATen/ops/cat.h"
#include "ATen/ops/cumsum.h"
#include "ATen/ops/full.h"
#include "ATen/ops/log_softmax.h"
#include "ATen/ops/searchsorted.h"
#include "ATen/ops/softmax.h"
#include "ATen/ops/stack.h"
#include "ATen/ops/tensor.h"
#include "ATen/ops/topk.h"
#include "ATen/ops/where.h"
#include "c10/core/InferenceMode.h"
#include "worker/models/beam_search.h"
#include "worker/models/check_options.h"
#include "worker/models/prompt.h"
#include "worker/models/score_rules.h"
#include "worker/train/guard.h"

namespace muster::models {
namespace {

// Puts all modules into evaluation mode while it lives, and restores the mode of each afterwards.
class ScopedEvaluation {
 public:
  explicit ScopedEvaluation(torch::nn::Module& model)
      : model_(model), was_training_(model.is_training()), any_was_training_(was_training_) {
    for (const auto& part : model_.modules(/*include_self=*/false)) {
      any_was_training_ = any_was_training_ || part->is_training();
      parts_.emplace_back(part, part->is_training());
    }
    if (any_was_training_) model_.eval();
  }
  ~ScopedEvaluation() {
    if (!any_was_training_) return;
    // train() sets all children, too: these come after their parents.
    model_.train(was_training_);
    for (const auto& [part, was_training] : parts_) {
      if (part->is_training() != was_training) part->train(was_training);
    }
  }
  ScopedEvaluation(const ScopedEvaluation&) = delete;
  ScopedEvaluation& operator=(const ScopedEvaluation&) = delete;

 private:
  torch::nn::Module& model_;
  const bool was_training_;
  bool any_was_training_;
  std::vector<std::pair<std::shared_ptr<torch::nn::Module>, bool>> parts_;
};

// The options, with the config's values for those that are not set.
struct Resolved {
  std::vector<int64_t> end_tokens;
  int64_t padding = 0;
};

Resolved Resolve(const CommonConfig& config, const GenerateOptions& options) {
  Resolved out = {.end_tokens = options.eos_token_ids.value_or(config.eos_token_ids)};
  if (options.pad_token_id.has_value()) {
    out.padding = *options.pad_token_id;
  } else if (config.pad_token_id.has_value()) {
    out.padding = *config.pad_token_id;
  } else if (!out.end_tokens.empty()) {
    out.padding = out.end_tokens.front();
  }
  return out;
}

void CheckAlone(const GenerateOptions& options) {
  CheckRules(options.rules);
  TORCH_CHECK_VALUE(options.max_new_tokens >= 1, "max_new_tokens is ", options.max_new_tokens,
                    "; it must be at least 1");
  TORCH_CHECK_VALUE(options.num_beams >= 1, "num_beams is ", options.num_beams,
                    "; it must be at least 1");
  const bool draws_several = options.do_sample && options.num_beams == 1;
  TORCH_CHECK_VALUE(options.num_return_sequences >= 1 &&
                        (draws_several || options.num_return_sequences <= options.num_beams),
                    "num_return_sequences is ", options.num_return_sequences,
                    "; it must be from 1 to num_beams, which is ", options.num_beams);
  TORCH_CHECK_VALUE(options.prefill_chunk_size >= 0, "prefill_chunk_size is ",
                    options.prefill_chunk_size, "; it must be at least 1, or 0 for no limit");
  TORCH_CHECK_VALUE(std::isfinite(options.length_penalty), "length_penalty is not a finite number");
  if (options.num_beams > 1) {
    TORCH_CHECK_VALUE(options.on_tokens == nullptr,
                      "on_tokens does not go with num_beams > 1, whose "
                      "tokens can still change");
    TORCH_CHECK_VALUE(!options.output_logits, "output_logits does not go with num_beams > 1");
  }
  if (!options.do_sample) {
    const ScoreRules& rules = options.rules;
    TORCH_CHECK_VALUE(
        rules.temperature == 1 && rules.top_h == 0 && rules.top_k == 0 && rules.top_p == 1 &&
            rules.min_p == 0 && rules.typical_p == 1 && rules.epsilon_cutoff == 0 &&
            rules.eta_cutoff == 0,
        "temperature, top_h, top_k, top_p, min_p, typical_p, epsilon_cutoff and eta_cutoff "
        "are for sampling: set do_sample too");
  }
}

void CheckWith(const ModelConfig& config, const at::Tensor& input_ids,
               const GenerateOptions& options) {
  CheckAlone(options);
  TORCH_CHECK_VALUE(options.stop_strings.empty(),
                    "stop_strings need the model's tokenizer: generate with a TextGenerator");
  const int64_t length = input_ids.defined() && input_ids.dim() == 2 ? input_ids.size(1) : 0;
  const absl::Status fits = CheckContext(config, "a prompt of", length, options);
  TORCH_CHECK_VALUE(fits.ok(), fits.message());
}

// Draws uniform numbers in [0, 1), for each row from its own sequence.
class Draws {
 public:
  Draws(uint64_t seed, int64_t rows) {
    for (int64_t row = 0; row < rows; ++row) {
      std::seed_seq mixed = {static_cast<uint32_t>(seed), static_cast<uint32_t>(seed >> 32),
                             static_cast<uint32_t>(row)};
      engines_.emplace_back(mixed);
    }
  }
  // Returns [rows, 1] float64.
  at::Tensor Next() {
    std::vector<double> numbers;
    // 53 bits, as many as a double has; the standard's distribution may return 1.
    for (auto& engine : engines_) {
      numbers.push_back(static_cast<double>(engine() >> 11) * 0x1.0p-53);
    }
    return at::tensor(numbers, c10::kDouble).unsqueeze(1);
  }

 private:
  std::vector<std::mt19937_64> engines_;
};

std::vector<int64_t> ToVector(const at::Tensor& ids) {
  const at::Tensor on_cpu = ids.cpu().contiguous();
  const int64_t* const data = on_cpu.const_data_ptr<int64_t>();
  return {data, data + on_cpu.numel()};
}

// `best`: the best score of each row, on the CPU. Infinite scores have a best one, but no
// probabilities.
void CheckScores(const at::Tensor& best, int64_t step, bool needs_finite = false) {
  const at::Tensor bad = needs_finite ? best.isfinite().logical_not() : best.isnan();
  TORCH_CHECK(!bad.any().item<bool>(), "the model's logits for new token ", step, " of row ",
              bad.to(c10::kLong).argmax().item<int64_t>(),
              " are not numbers: its weights or its type are at fault");
}

// Thrown if only tokens that a rule has removed are left.
void ThrowNoTokenLeft(int64_t step, size_t row) {
  TORCH_CHECK(false, "the rules leave no token for new token ", step, " of row ", row,
              ": lower min_new_tokens or min_length, raise no_repeat_ngram_size or temperature, or "
              "suppress fewer tokens");
}

// `has_probabilities`: whether the scores of the row can be turned into probabilities, from which a
// token is drawn.
void CheckProbabilities(bool has_probabilities, int64_t step, size_t row) {
  TORCH_CHECK(has_probabilities, "the probabilities of new token ", step, " of row ", row,
              " are not numbers, because a score is infinite: the model's weights or its type are "
              "at fault, temperature is too low, or a penalty is too strong");
}

// Returns [rows, 1]: the index of one drawn number of each row of `sums`, the running sums of
// probabilities.
at::Tensor Drawn(const at::Tensor& sums, Draws* draws) {
  const at::Tensor total = sums.narrow(-1, sums.size(-1) - 1, 1);
  return at::searchsorted(sums, draws->Next().to(sums.device()) * total, /*out_int32=*/false,
                          /*right=*/true)
      .clamp_max(sums.size(-1) - 1);
}

std::vector<int64_t> Choose(const GenerateOptions& options, const at::Tensor& scores, Draws* draws,
                            int64_t step, const std::vector<bool>& ended) {
  const auto [best, index] = scores.max(-1);
  const at::Tensor on_cpu = best.cpu();
  CheckScores(on_cpu, step);
  for (size_t row = 0; row < ended.size(); ++row) {
    const float score = on_cpu.const_data_ptr<float>()[row];
    if (!ended[row] && score == -std::numeric_limits<float>::infinity()) {
      ThrowNoTokenLeft(step, row);
    }
  }
  if (!options.do_sample) return ToVector(index);
  const at::Tensor sums =
      at::softmax(ApplySamplingRules(options.rules, scores), -1, c10::kDouble).cumsum(-1);
  const at::Tensor totals = sums.select(-1, sums.size(-1) - 1).cpu().contiguous();
  for (size_t row = 0; row < ended.size(); ++row) {
    CheckProbabilities(ended[row] || !std::isnan(totals.const_data_ptr<double>()[row]), step, row);
  }
  return ToVector(Drawn(sums, draws));
}

// Pads the rows, and sets their lengths.
Generated Padded(const std::vector<std::vector<int64_t>>& rows, int64_t padding) {
  size_t longest = 0;
  for (const auto& row : rows) longest = std::max(longest, row.size());
  std::vector<int64_t> flat, lengths;
  for (const auto& row : rows) {
    flat.insert(flat.end(), row.begin(), row.end());
    flat.insert(flat.end(), longest - row.size(), padding);
    lengths.push_back(static_cast<int64_t>(row.size()));
  }
  return {.tokens = at::tensor(flat, c10::kLong)
                        .view({static_cast<int64_t>(rows.size()), static_cast<int64_t>(longest)}),
          .lengths = std::move(lengths)};
}

// Greedy search and sampling.
Generated Walk(PromptReader& reader, const GenerateOptions& options, const Resolved& resolved) {
  const int64_t times = options.num_return_sequences;
  std::vector<Tokens> rows;
  for (const Tokens& prompt : reader.prompts()) rows.insert(rows.end(), times, prompt);
  const size_t num_rows = rows.size();
  std::vector<std::vector<int64_t>> generated(num_rows);
  std::vector<bool> ended(num_rows, false);
  std::vector<at::Tensor> logits;
  Draws draws(options.seed, static_cast<int64_t>(num_rows));
  at::Tensor scores = reader.ReadPrompt();
  if (times > 1) {
    reader.Repeat(times);
    scores = scores.repeat_interleave(times, 0);
  }
  for (int64_t step = 0;; ++step) {
    if (options.output_logits) logits.push_back(scores);
    std::vector<int64_t> next =
        Choose(options, ApplyRules(options.rules, scores, rows, step), &draws, step, ended);
    for (size_t row = 0; row < num_rows; ++row) {
      if (ended[row]) {
        next[row] = resolved.padding;
        continue;
      }
      rows[row].push_back(next[row]);
      generated[row].push_back(next[row]);
      ended[row] = Contains(resolved.end_tokens, next[row]) ||
                   (options.ends_row != nullptr && options.ends_row(generated[row]));
    }
    if (options.on_tokens != nullptr) options.on_tokens(next, ended);
    TORCH_CHECK(ended.size() == num_rows, "on_tokens changed the number of rows");
    const bool all = std::find(ended.begin(), ended.end(), false) == ended.end();
    if (all || step + 1 == options.max_new_tokens) break;
    scores = reader.ReadNext(next);
  }
  Generated out = Padded(generated, resolved.padding);
  if (options.output_logits) out.logits = at::stack(logits, 1);
  return out;
}

// Returns [rows, count]: indices drawn from `scores` without repetition.
at::Tensor DrawnOnce(const at::Tensor& scores, int64_t count, Draws* draws) {
  // A row without candidates has no probabilities.
  at::Tensor likely = at::softmax(scores, -1, c10::kDouble).nan_to_num(0);
  std::vector<at::Tensor> drawn;
  for (int64_t i = 0; i < count; ++i) {
    drawn.push_back(Drawn(likely.cumsum(-1), draws));
    likely.scatter_(-1, drawn.back(), 0);
  }
  return at::cat(drawn, -1);
}

// Returns the candidates for each row after its running sequences, without tokens that a rule has
// removed: the best ones, best first, or, with `draws`, as many drawn ones. `scores` [B * beams,
// vocabulary].
std::vector<std::vector<Beams::Candidate>> Candidates(const std::vector<Beams>& searches,
                                                      const at::Tensor& scores, int64_t num_beams,
                                                      Draws* draws, int64_t step) {
  const int64_t vocabulary = scores.size(1);
  std::vector<float> sums;
  for (const Beams& search : searches) {
    // A row that is done, or has fewer sequences than beams, is filled up with hopeless ones.
    for (int64_t beam = 0; beam < num_beams; ++beam) {
      const bool runs = beam < static_cast<int64_t>(search.running().size());
      sums.push_back(runs ? static_cast<float>(search.running()[beam].score)
                          : -std::numeric_limits<float>::infinity());
    }
  }
  const at::Tensor total = (scores + at::tensor(sums, c10::kFloat).to(scores.device()).unsqueeze(1))
                               .view({static_cast<int64_t>(searches.size()), -1});
  if (draws != nullptr) {
    const at::Tensor best = total.amax(-1).cpu();
    for (size_t row = 0; row < searches.size(); ++row) {
      // Minus infinity is allowed: nothing is left to draw.
      const bool has_probabilities =
          best.const_data_ptr<float>()[row] < std::numeric_limits<float>::infinity();
      CheckProbabilities(searches[row].is_done() || has_probabilities, step, row);
    }
  }
  const int64_t wanted = std::min(searches.at(0).num_candidates(), total.size(1));
  const at::Tensor index =
      draws == nullptr ? std::get<1>(total.topk(wanted, -1)) : DrawnOnce(total, wanted, draws);
  const at::Tensor values = total.gather(-1, index).cpu().contiguous();
  const std::vector<int64_t> places = ToVector(index);
  std::vector<std::vector<Beams::Candidate>> out(searches.size());
  for (size_t row = 0; row < searches.size(); ++row) {
    // If nothing is left in a row, draws repeat its last place.
    std::set<int64_t> drawn;
    for (int64_t i = 0; i < wanted; ++i) {
      const size_t at = row * static_cast<size_t>(wanted) + static_cast<size_t>(i);
      if (draws != nullptr && !drawn.insert(places[at]).second) continue;
      const Beams::Candidate candidate = {.beam = places[at] / vocabulary,
                                          .token = places[at] % vocabulary,
                                          .sum = values.const_data_ptr<float>()[at]};
      if (candidate.beam < static_cast<int64_t>(searches[row].running().size()) &&
          candidate.sum > -std::numeric_limits<double>::infinity()) {
        out[row].push_back(candidate);
      }
    }
  }
  return out;
}

Generated ReturnBest(const std::vector<Beams>& searches, const GenerateOptions& options,
                     const Resolved& resolved) {
  std::vector<std::vector<int64_t>> rows;
  std::vector<float> scores;
  for (const Beams& search : searches) {
    for (int64_t i = 0; i < options.num_return_sequences; ++i) {
      const bool is_there = i < static_cast<int64_t>(search.finished().size());
      rows.push_back(is_there ? search.finished()[i].tokens : std::vector<int64_t>());
      scores.push_back(is_there ? static_cast<float>(search.finished()[i].score)
                                : -std::numeric_limits<float>::infinity());
    }
  }
  Generated out = Padded(rows, resolved.padding);
  out.scores = at::tensor(scores, c10::kFloat);
  return out;
}

// Returns log-probabilities; rows in which nothing is left stay unchanged.
at::Tensor Renormalized(const at::Tensor& scores) {
  const at::Tensor out = at::log_softmax(scores, -1);
  return at::where(out.isnan(), scores, out);
}

Generated Search(PromptReader& reader, const GenerateOptions& options, const Resolved& resolved) {
  const std::vector<Tokens>& prompts = reader.prompts();
  std::vector<Beams> searches;
  for (size_t row = 0; row < prompts.size(); ++row) {
    searches.emplace_back(options, resolved.end_tokens);
  }
  Draws draws(options.seed, static_cast<int64_t>(prompts.size()));
  const auto min_kept = static_cast<int64_t>(std::max<size_t>(1, resolved.end_tokens.size())) + 1;
  at::Tensor logits = reader.ReadPrompt();
  int64_t num_beams = 1;
  for (int64_t step = 0;; ++step) {
    std::vector<Tokens> rows;
    for (size_t row = 0; row < prompts.size(); ++row) {
      for (int64_t beam = 0; beam < num_beams; ++beam) {
        Tokens tokens = prompts[row];
        if (beam < static_cast<int64_t>(searches[row].running().size())) {
          const auto& more = searches[row].running()[beam].tokens;
          tokens.insert(tokens.end(), more.begin(), more.end());
        }
        rows.push_back(std::move(tokens));
      }
    }
    CheckScores(logits.amax(-1).cpu(), step, /*needs_finite=*/true);
    at::Tensor scores = ApplyRules(options.rules, at::log_softmax(logits, -1), rows, step);
    // As in transformers, keep enough tokens for one sequence to continue.
    if (options.do_sample) scores = ApplySamplingRules(options.rules, scores, min_kept);
    if (options.rules.renormalize_logits) scores = Renormalized(scores);
    const auto candidates =
        Candidates(searches, scores, num_beams, options.do_sample ? &draws : nullptr, step);
    std::vector<int64_t> parents, tokens;
    bool done = true;
    for (size_t row = 0; row < searches.size(); ++row) {
      std::vector<int64_t> from = searches[row].Step(candidates[row]);
      if (searches[row].running().empty() && searches[row].finished().empty()) {
        ThrowNoTokenLeft(step, row);
      }
      done = done && searches[row].is_done();
      from.resize(options.num_beams, 0);
      for (int64_t beam = 0; beam < options.num_beams; ++beam) {
        parents.push_back(static_cast<int64_t>(row) * options.num_beams + from[beam]);
        const bool runs = beam < static_cast<int64_t>(searches[row].running().size());
        tokens.push_back(runs ? searches[row].running()[beam].tokens.back() : resolved.padding);
      }
    }
    if (done) return ReturnBest(searches, options, resolved);
    if (step == 0) {
      reader.Repeat(options.num_beams);
      num_beams = options.num_beams;
    } else {
      reader.Reorder(parents);
    }
    logits = reader.ReadNext(tokens);
  }
}

}  // namespace

absl::Status CheckContext(const ModelConfig& config, absl::string_view prompt, int64_t length,
                          const GenerateOptions& options) {
  const int64_t context = ContextLength(config);
  if (options.beyond_context || options.max_new_tokens <= context - length) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrCat(
      prompt, " ", length, " tokens and ", options.max_new_tokens, " new ones are more than the ",
      context, " positions of the model: shorten the prompt or lower max_new_tokens"));
}

absl::Status CheckOptions(const GenerateOptions& options) {
  return Guard([&] { CheckAlone(options); });
}

Generated Generate(CausalLmImpl& model, const at::Tensor& input_ids,
                   const at::Tensor& attention_mask, const GenerateOptions& options) {
  const CommonConfig& config = Common(model.config());
  CheckWith(model.config(), input_ids, options);
  const ScopedEvaluation evaluation(model);
  const c10::InferenceMode inference;
  const Resolved resolved = Resolve(config, options);
  GenerateOptions complete = options;
  complete.rules.end_tokens = resolved.end_tokens;
  complete.rules.max_new_tokens = options.max_new_tokens;
  // As in transformers, min_new_tokens replaces min_length.
  if (complete.rules.min_new_tokens > 0) complete.rules.min_length = 0;
  PromptReader reader(model, input_ids, attention_mask, options.max_new_tokens,
                      options.prefill_chunk_size, options.run_idle_experts);
  return options.num_beams > 1 ? Search(reader, complete, resolved)
                               : Walk(reader, complete, resolved);
}

at::Tensor NextTokenLogprobs(CausalLmImpl& model, const at::Tensor& input_ids,
                             const at::Tensor& attention_mask, const ScoreRules& rules) {
  CheckRules(rules);
  const ScopedEvaluation evaluation(model);
  const c10::InferenceMode inference;
  PromptReader reader(model, input_ids, attention_mask, /*room=*/0);
  const at::Tensor scores = ApplyRules(rules, reader.ReadPrompt(), reader.prompts(), 0);
  return at::log_softmax(ApplySamplingRules(rules, scores), -1);
}

}  // namespace muster::models
