#include "worker/models/text_generator.h"

#include <algorithm>
#include <utility>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/models/check_options.h"
#include "worker/models/generation_config.h"
#include "worker/models/score_rules.h"
#include "worker/models/stop_strings.h"
#include "worker/train/guard.h"

namespace muster::models {
namespace {

// Converts one row's tokens to text.
class TextRow {
 public:
  TextRow(StreamDecoder decoder, std::vector<std::string> stop)
      : decoder_(std::move(decoder)), stop_(std::move(stop)) {}

  // Returns the text to show after one more token.
  absl::StatusOr<std::string> Push(int64_t token) {
    ++num_tokens_;
    MUSTER_ASSIGN_OR_RETURN(const std::string text, decoder_.Push(token));
    return Show(stop_.Push(text));
  }
  // Counts a token without text.
  void Skip() { ++num_tokens_; }
  // Returns the remaining text to show.
  absl::StatusOr<std::string> Finish() {
    MUSTER_ASSIGN_OR_RETURN(const std::string text, decoder_.Finish());
    std::string shown = stop_.Push(text);
    shown += stop_.Finish();
    return Show(std::move(shown));
  }
  bool met_stop_string() const { return stop_.found(); }
  int64_t num_tokens() const { return num_tokens_; }
  const std::string& text() const { return text_; }

 private:
  std::string Show(std::string text) {
    text_ += text;
    return text;
  }

  StreamDecoder decoder_;
  StopStrings stop_;
  std::string text_;
  int64_t num_tokens_ = 0;
};

// Special tokens have no text: a stop string that is a special token is recognized by its id.
std::vector<int64_t> StopTokens(const Tokenizer& tokenizer,
                                const std::vector<std::string>& strings) {
  std::vector<int64_t> tokens;
  for (const std::string& string : strings) {
    const std::optional<int64_t> id = tokenizer.TokenToId(string);
    if (!id.has_value()) continue;
    const absl::StatusOr<std::string> text = tokenizer.Decode({*id});
    if (text.ok() && text->empty()) tokens.push_back(*id);
  }
  return tokens;
}

}  // namespace

std::function<bool(const std::vector<int64_t>&)> EndsAtStopString(
    Tokenizer tokenizer, std::vector<std::string> strings) {
  std::vector<int64_t> stop_tokens = StopTokens(tokenizer, strings);
  return [tokenizer = std::move(tokenizer), strings = std::move(strings),
          stop_tokens = std::move(stop_tokens)](const std::vector<int64_t>& generated) {
    if (generated.empty()) return false;
    if (Contains(stop_tokens, generated.back())) return true;
    TextRow row(tokenizer.Stream(), strings);
    for (const int64_t token : generated) {
      if (tokenizer.IdToToken(token).has_value()) ThrowIfError(row.Push(token).status());
    }
    // Bytes of an incomplete character count as text, too: the newline of Llama 2 is one.
    ThrowIfError(row.Finish().status());
    return row.met_stop_string();
  };
}

absl::StatusOr<TextGenerator> TextGenerator::FromFolder(const std::string& folder,
                                                        const LoadPretrainedOptions& options,
                                                        std::optional<bool> do_sample,
                                                        int64_t max_new_tokens) {
  // Read the small files first: errors in them are reported at once.
  MUSTER_ASSIGN_OR_RETURN(GenerateOptions defaults,
                          ReadGenerationConfig(folder, do_sample, max_new_tokens));
  MUSTER_ASSIGN_OR_RETURN(Tokenizer tokenizer, Tokenizer::FromFolder(folder));
  MUSTER_ASSIGN_OR_RETURN(CausalLm model, LoadCausalLm(folder, options));
  return TextGenerator(std::move(model), std::move(tokenizer), std::move(defaults));
}

TextGenerator::TextGenerator(CausalLm model, Tokenizer tokenizer, GenerateOptions defaults)
    : model_(std::move(model)), tokenizer_(std::move(tokenizer)), defaults_(std::move(defaults)) {}

absl::StatusOr<EncodedPrompts> EncodePrompts(const Tokenizer& tokenizer,
                                             const std::vector<std::string>& prompts,
                                             bool add_special_tokens) {
  std::vector<std::vector<int64_t>> rows;
  size_t longest = 0;
  for (size_t i = 0; i < prompts.size(); ++i) {
    absl::StatusOr<std::vector<int64_t>> ids = tokenizer.EncodeIds(prompts[i], add_special_tokens);
    if (!ids.ok()) {
      return absl::Status(ids.status().code(),
                          absl::StrCat("prompt ", i, ": ", ids.status().message()));
    }
    if (ids->empty()) {
      return absl::InvalidArgumentError(
          absl::StrCat("prompt ", i, " has no token: give it some text"));
    }
    longest = std::max(longest, ids->size());
    rows.push_back(*std::move(ids));
  }
  if (rows.empty()) return absl::InvalidArgumentError("there is no prompt: pass one at least");
  const auto count = static_cast<int64_t>(rows.size());
  EncodedPrompts out = {.ids = at::zeros({count, static_cast<int64_t>(longest)}, c10::kLong),
                        .mask = at::zeros({count, static_cast<int64_t>(longest)}, c10::kLong),
                        .lengths = {}};
  for (int64_t row = 0; row < count; ++row) {
    const size_t padding = longest - rows[row].size();
    auto* const ids = out.ids[row].mutable_data_ptr<int64_t>();
    auto* const mask = out.mask[row].mutable_data_ptr<int64_t>();
    std::copy(rows[row].begin(), rows[row].end(), ids + padding);
    std::fill(mask + padding, mask + longest, 1);
    out.lengths.push_back(static_cast<int64_t>(rows[row].size()));
  }
  return out;
}

namespace {

constexpr size_t kMostTexts = 1 << 20;

size_t TextsPerPrompt(const GenerateOptions& options) {
  return static_cast<size_t>(std::max<int64_t>(1, options.num_return_sequences));
}

}  // namespace

int64_t NewTokens(const ModelConfig& config, const EncodedPrompts& prompts,
                  const TextOptions& options) {
  if (!options.shorten_to_context) return options.tokens.max_new_tokens;
  const int64_t room = ContextLength(config) - prompts.ids.size(1);
  return std::clamp<int64_t>(room, 1, options.tokens.max_new_tokens);
}

absl::Status CheckPrompts(const ModelConfig& config, const EncodedPrompts& prompts,
                          const TextOptions& options) {
  const std::vector<int64_t>& lengths = prompts.lengths;
  const auto longest = std::max_element(lengths.begin(), lengths.end());
  GenerateOptions tokens = options.tokens;
  tokens.max_new_tokens = NewTokens(config, prompts, options);
  MUSTER_RETURN_IF_ERROR(
      CheckContext(config,
                   lengths.size() == 1 ? "a prompt of"
                                       : absl::StrCat("prompt ", longest - lengths.begin(), ", of"),
                   *longest, tokens));
  const size_t per_prompt = TextsPerPrompt(tokens);
  if (per_prompt <= kMostTexts / lengths.size()) return absl::OkStatus();
  return absl::InvalidArgumentError(absl::StrCat("num_return_sequences is ", per_prompt, "; ",
                                                 lengths.size(), " prompts have room for ",
                                                 kMostTexts / lengths.size(), " each"));
}

absl::StatusOr<std::vector<GeneratedText>> TextGenerator::Generate(
    const std::vector<std::string>& prompts, const TextOptions& options) {
  MUSTER_ASSIGN_OR_RETURN(const EncodedPrompts encoded,
                          EncodePrompts(tokenizer_, prompts, options.add_special_tokens));
  return GenerateEncoded(encoded, options);
}

absl::StatusOr<std::vector<GeneratedText>> TextGenerator::GenerateEncoded(
    const EncodedPrompts& encoded, const TextOptions& options) {
  MUSTER_RETURN_IF_ERROR(CheckPrompts(model_->config(), encoded, options));
  const size_t num_prompts = encoded.lengths.size();
  GenerateOptions tokens = options.tokens;
  tokens.max_new_tokens = NewTokens(model_->config(), encoded, options);
  std::vector<std::string> stop = options.stop;
  stop.insert(stop.end(), tokens.stop_strings.begin(), tokens.stop_strings.end());
  tokens.stop_strings.clear();
  const size_t per_prompt = TextsPerPrompt(tokens);
  std::vector<TextRow> rows;
  for (size_t i = 0; i < num_prompts * per_prompt; ++i) {
    rows.emplace_back(tokenizer_.Stream(), stop);
  }
  const std::vector<int64_t> end_tokens =
      tokens.eos_token_ids.value_or(Common(model_->config()).eos_token_ids);
  const std::vector<int64_t> stop_tokens = StopTokens(tokenizer_, stop);
  std::vector<bool> met_end(rows.size(), false), met_stop_token(rows.size(), false);
  const auto at_string = EndsAtStopString(tokenizer_, stop);
  std::vector<std::vector<int64_t>> taken(rows.size());
  // Takes a row's next token; returns whether the row continues.
  const auto take = [&](size_t row, int64_t token) {
    if (Contains(end_tokens, token)) met_end[row] = true;
    taken[row].push_back(token);
    if (Contains(stop_tokens, token)) {
      met_stop_token[row] = true;
      rows[row].Skip();
      return false;
    }
    // A vocabulary that is padded to a round size has ids without text.
    if (!tokenizer_.IdToToken(token).has_value()) {
      rows[row].Skip();
      return !met_end[row];
    }
    absl::StatusOr<std::string> text = rows[row].Push(token);
    ThrowIfError(text.status());
    if (options.on_text != nullptr && !text->empty()) options.on_text(row, *text);
    // Text that is held back until the next token may already contain a string.
    const bool is_held = text->empty() && !stop.empty() && at_string(taken[row]);
    return !met_end[row] && !is_held && !rows[row].met_stop_string();
  };
  std::vector<bool> is_done(rows.size(), false);
  const auto caller = tokens.on_tokens;
  const bool has_beams = tokens.num_beams > 1;
  if (has_beams && !stop.empty()) {
    tokens.ends_row = [&at_string,
                       caller = std::move(tokens.ends_row)](const std::vector<int64_t>& generated) {
      return at_string(generated) || (caller != nullptr && caller(generated));
    };
  }
  if (!has_beams) {
    tokens.on_tokens = [&](const std::vector<int64_t>& next, std::vector<bool>& ended) {
      if (caller != nullptr) caller(next, ended);
      for (size_t row = 0; row < next.size(); ++row) {
        if (is_done[row]) continue;
        is_done[row] = !take(row, next[row]) || ended[row];
        ended[row] = is_done[row];
      }
    };
  }
  MUSTER_RETURN_IF_ERROR(Guard([&] {
    const Generated got = models::Generate(*model_, encoded.ids, encoded.mask, tokens);
    if (!has_beams) return;
    for (size_t row = 0; row < rows.size(); ++row) {
      const at::Tensor ids = got.tokens[static_cast<int64_t>(row)].contiguous();
      const int64_t* const data = ids.const_data_ptr<int64_t>();
      for (int64_t i = 0; i < got.lengths[row] && take(row, data[i]); ++i) {
      }
    }
  }));
  std::vector<GeneratedText> out;
  for (size_t row = 0; row < rows.size(); ++row) {
    MUSTER_ASSIGN_OR_RETURN(const std::string rest, rows[row].Finish());
    if (options.on_text != nullptr && !rest.empty()) options.on_text(row, rest);
    using Reason = GeneratedText::Reason;
    out.push_back({.text = rows[row].text(),
                   .reason = rows[row].met_stop_string() || met_stop_token[row]
                                 ? Reason::kStopString
                             : met_end[row] ? Reason::kEndToken
                                            : Reason::kMaxTokens,
                   .num_prompt_tokens = encoded.lengths[row / per_prompt],
                   .num_new_tokens = rows[row].num_tokens()});
  }
  return out;
}

}  // namespace muster::models
