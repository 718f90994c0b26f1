#ifndef MUSTER_WORKER_TEXT_TOKENIZER_H_
#define MUSTER_WORKER_TEXT_TOKENIZER_H_

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "absl/types/span.h"
#include "worker/text/encoding.h"

namespace muster {

namespace text {
class TokenizerCore;
class DecodeChain;
}  // namespace text

struct EncodeOptions {
  bool add_special_tokens = true;  // those of the file's template, such as [CLS]
  // Unset: the file's setting, which usually is none.
  std::optional<Truncation> truncation = {};
  std::optional<Padding> padding = {};
  bool limits_of_file = true;  // false: unset means none, whatever the file says
};

// One element of a batch: one or two texts, which it borrows.
struct TextInput {
  TextInput(absl::string_view text) : text(text) {}   // NOLINT: implicit on purpose
  TextInput(const char* text) : text(text) {}         // NOLINT
  TextInput(const std::string& text) : text(text) {}  // NOLINT
  TextInput(absl::string_view text, absl::string_view pair) : text(text), pair(pair) {}

  absl::string_view text;
  std::optional<absl::string_view> pair;
};

// The tokens to which tokenizer_config.json and special_tokens_map.json give a role.
struct SpecialTokens {
  std::optional<std::string> bos;
  std::optional<std::string> eos;
  std::optional<std::string> unk;
  std::optional<std::string> sep;
  std::optional<std::string> pad;
  std::optional<std::string> cls;
  std::optional<std::string> mask;
};

// Decodes tokens into text as they arrive, for example from a generating model. The texts of all
// Push calls and of Finish, concatenated, equal Tokenizer::Decode of all ids; none ends within a
// character. Text is returned as soon as no later token can change it. Not thread-safe.
class StreamDecoder {
 public:
  StreamDecoder(StreamDecoder&&) noexcept;
  StreamDecoder& operator=(StreamDecoder&&) noexcept;
  ~StreamDecoder();

  // Returns the text that one more token makes final; often empty. Errors: those of
  // Tokenizer::Decode.
  absl::StatusOr<std::string> Push(int64_t id);
  // Returns the rest. Call nothing after it.
  absl::StatusOr<std::string> Finish();

 private:
  friend class Tokenizer;
  StreamDecoder(std::shared_ptr<const text::TokenizerCore> core, bool skip_special_tokens);

  std::shared_ptr<const text::TokenizerCore> core_;
  bool skip_special_tokens_;
  std::unique_ptr<text::DecodeChain> chain_;
};

// Converts text into a model's tokens and back, from a tokenizer.json as Hugging Face's tokenizers
// library writes it, with the same tokens as that library (docs/tokenizers.md).
//
//   auto tokenizer = muster::Tokenizer::FromFile("gpt2/tokenizer.json");
//   if (!tokenizer.ok()) return tokenizer.status();
//   auto encoding = tokenizer->Encode("Hello, world");
//   if (!encoding.ok()) return encoding.status();
//   auto text = tokenizer->Decode(encoding->ids);
//
// Needs no torch. Cheap to copy; copies share everything. Thread-safe. Nothing throws.
class Tokenizer {
 public:
  // Reads a tokenizer.json. Blocks on the disk. Errors: those of the system; INVALID_ARGUMENT: the
  // file is malformed; UNIMPLEMENTED: it has an unsupported component or setting, which would give
  // other tokens; both name the field. RESOURCE_EXHAUSTED: it is larger than 256 MiB or nested too
  // deep.
  static absl::StatusOr<Tokenizer> FromFile(const std::string& path);
  // The same for FOLDER/tokenizer.json, with what tokenizer_config.json, special_tokens_map.json
  // and added_tokens.json, if present, say about tokens; without tokenizer.json, for the files of
  // older folders (docs/tokenizers.md). NOT_FOUND says which files are missing. RESOURCE_EXHAUSTED:
  // a file other than tokenizer.json is larger than 16 MiB; FAILED_PRECONDITION: tokenizer.json is
  // a dangling link. A warning is logged if tokens get other ids than these files say.
  static absl::StatusOr<Tokenizer> FromFolder(const std::string& folder);
  // The same for the content of a tokenizer.json; `source` names it in messages.
  static absl::StatusOr<Tokenizer> FromJson(absl::string_view json, absl::string_view source);

  // Encodes a text. Errors: INVALID_ARGUMENT: the text is not UTF-8, or cannot be truncated as
  // requested; FAILED_PRECONDITION: a part of it is not in the vocabulary, which has no unknown
  // token; RESOURCE_EXHAUSTED: it is larger than 256 MiB, a regular expression of the file takes
  // too long, or memory is out.
  absl::StatusOr<Encoding> Encode(absl::string_view text, const EncodeOptions& options = {}) const;
  absl::StatusOr<Encoding> EncodePair(absl::string_view text, absl::string_view pair,
                                      const EncodeOptions& options = {}) const;
  // Encodes all inputs, on up to `threads` threads, or as many as the system gives; 0: one for each
  // core. Padding makes them equally long. An error says which text caused it.
  absl::StatusOr<std::vector<Encoding>> EncodeBatch(absl::Span<const TextInput> inputs,
                                                    const EncodeOptions& options = {},
                                                    int threads = 0) const;

  // Returns only the ids, without truncation and padding; faster.
  absl::StatusOr<std::vector<int64_t>> EncodeIds(absl::string_view text,
                                                 bool add_special_tokens = true) const;

  // Decodes ids into text. Errors: INVALID_ARGUMENT: an id is not in the vocabulary.
  absl::StatusOr<std::string> Decode(absl::Span<const int64_t> ids,
                                     bool skip_special_tokens = true) const;
  StreamDecoder Stream(bool skip_special_tokens = true) const;

  // nullopt: there is no such token.
  std::optional<int64_t> TokenToId(absl::string_view token) const;
  std::optional<std::string> IdToToken(int64_t id) const;
  // The number of tokens, with or without the added ones that the model itself lacks.
  int64_t VocabSize(bool with_added_tokens = true) const;

  const SpecialTokens& special_tokens() const;
  // The file's settings.
  const std::optional<Truncation>& truncation() const;
  const std::optional<Padding>& padding() const;

 private:
  explicit Tokenizer(std::shared_ptr<const text::TokenizerCore> core) : core_(std::move(core)) {}

  std::shared_ptr<const text::TokenizerCore> core_;
};

}  // namespace muster

#endif  // MUSTER_WORKER_TEXT_TOKENIZER_H_
