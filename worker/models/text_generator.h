#ifndef MUSTER_WORKER_MODELS_TEXT_GENERATOR_H_
#define MUSTER_WORKER_MODELS_TEXT_GENERATOR_H_

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "ATen/core/Tensor.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "worker/models/generate.h"
#include "worker/models/model_config.h"
#include "worker/models/pretrained.h"
#include "worker/models/text_model.h"
#include "worker/text/tokenizer.h"

namespace muster::models {

struct TextOptions {
  GenerateOptions tokens = {};
  // A row, or a sequence of a beam search, ends before the first of these and of
  // tokens.stop_strings; only the output before it is returned. The prompt's own text does not
  // count. A special token also ends a row; inside a longer string it is not text.
  std::vector<std::string> stop = {};
  // If prompt and max_new_tokens exceed the model's positions: generate fewer new tokens instead of
  // failing.
  bool shorten_to_context = false;
  // Add the tokens that the tokenizer's template puts around a text (a beginning-of-text token).
  bool add_special_tokens = true;
  // Called with each piece of text as soon as it is final, never with a partial character. Not with
  // beams.
  std::function<void(size_t row, absl::string_view text)> on_text = nullptr;
};

struct GeneratedText {
  enum class Reason { kEndToken, kStopString, kMaxTokens };
  std::string text;
  Reason reason = Reason::kMaxTokens;
  int64_t num_prompt_tokens = 0;
  int64_t num_new_tokens = 0;
};

// Rows of tokens, padded on the left.
struct EncodedPrompts {
  at::Tensor ids, mask;
  std::vector<int64_t> lengths;  // without padding
};

// Encodes prompts. Errors: INVALID_ARGUMENT names a prompt that is not text or has no token.
absl::StatusOr<EncodedPrompts> EncodePrompts(const Tokenizer& tokenizer,
                                             const std::vector<std::string>& prompts,
                                             bool add_special_tokens);

// Returns the most tokens that are generated: max_new_tokens, or as many as fit into the context.
int64_t NewTokens(const ModelConfig& config, const EncodedPrompts& prompts,
                  const TextOptions& options);

// Returns INVALID_ARGUMENT for prompts, or numbers of texts, that Generate() would refuse for any
// weights, so that programs can report it before they load a large model.
absl::Status CheckPrompts(const ModelConfig& config, const EncodedPrompts& prompts,
                          const TextOptions& options);

// Returns a function for GenerateOptions::ends_row: whether the text of the generated tokens
// contains one of the strings, or the last token is one of them. Decodes all tokens in each call.
std::function<bool(const std::vector<int64_t>& generated)> EndsAtStopString(
    Tokenizer tokenizer, std::vector<std::string> strings);

// A model with its tokenizer. Not thread-safe.
class TextGenerator {
 public:
  // Loads a folder with config.json, weights, tokenizer.json and, if present,
  // generation_config.json, with `do_sample` instead of its own, and with `max_new_tokens` if it
  // has none. Blocks on the disk. Errors: as LoadCausalLm, Tokenizer::FromFolder and
  // ReadGenerationConfig.
  static absl::StatusOr<TextGenerator> FromFolder(
      const std::string& folder, const LoadPretrainedOptions& options = {},
      std::optional<bool> do_sample = std::nullopt,
      int64_t max_new_tokens = GenerateOptions().max_new_tokens);
  TextGenerator(CausalLm model, Tokenizer tokenizer, GenerateOptions defaults);

  // The options that the model's makers recommend.
  const GenerateOptions& defaults() const { return defaults_; }
  const Tokenizer& tokenizer() const { return tokenizer_; }
  CausalLm& model() { return model_; }

  // Generates the continuation of each prompt; with num_return_sequences > 1, that many for each,
  // one after another, where results that a beam search does not provide are empty. Errors:
  // INVALID_ARGUMENT names a prompt without tokens or an option; as Generate().
  absl::StatusOr<std::vector<GeneratedText>> Generate(const std::vector<std::string>& prompts,
                                                      const TextOptions& options);
  // The same for the result of EncodePrompts.
  absl::StatusOr<std::vector<GeneratedText>> GenerateEncoded(const EncodedPrompts& prompts,
                                                             const TextOptions& options);

 private:
  CausalLm model_;
  Tokenizer tokenizer_;
  GenerateOptions defaults_;
};

}  // namespace muster::models

#endif  // MUSTER_WORKER_MODELS_TEXT_GENERATOR_H_
