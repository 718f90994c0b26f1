#ifndef MUSTER_WORKER_TEXT_TOKENIZER_CORE_H_
#define MUSTER_WORKER_TEXT_TOKENIZER_CORE_H_

#include <cstdint>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/strings/string_view.h"
#include "base/mutex.h"
#include "worker/text/added_tokens.h"
#include "worker/text/decoders.h"
#include "worker/text/encoding.h"
#include "worker/text/model.h"
#include "worker/text/normalizers.h"
#include "worker/text/post_processors.h"
#include "worker/text/pre_tokenizers.h"
#include "worker/text/tokenizer.h"

namespace muster::text {

// The combined parts of a tokenizer.json: the implementation of muster::Tokenizer. Immutable;
// thread-safe.
class TokenizerCore {
 public:
  // `path` begins the names of fields in messages; `more` tokens are added to the file's. Errors:
  // those of Tokenizer::FromFile.
  static absl::StatusOr<std::shared_ptr<TokenizerCore>> Make(
      const nlohmann::json& json, const std::string& path,
      const std::vector<AddedToken>& more = {});

  // Like Tokenizer's, but without padding.
  absl::StatusOr<Encoding> Encode(const TextInput& input, const EncodeOptions& options) const;
  absl::StatusOr<std::vector<int64_t>> EncodeIds(absl::string_view text,
                                                 bool add_special_tokens) const;

  DecodeChain NewChain() const { return decoder_.NewChain(); }
  // Pushes the token to the chain, unless it is special and those are skipped.
  absl::Status Push(DecodeChain& chain, int64_t id, bool skip_special_tokens) const;

  std::optional<int64_t> TokenToId(absl::string_view token) const;
  // nullptr: there is no such id.
  const std::string* IdToToken(int64_t id) const;
  int64_t VocabSize(bool with_added_tokens) const;

  const std::optional<Truncation>& truncation() const { return truncation_; }
  const std::optional<Padding>& padding() const { return padding_; }
  const SpecialTokens& special_tokens() const { return special_tokens_; }
  void set_special_tokens(SpecialTokens tokens) { special_tokens_ = std::move(tokens); }

 private:
  // The memory that one call needs, kept for the next one.
  struct Work {
    std::unique_ptr<Model::Scratch> scratch;
    std::vector<Token> tokens;
  };
  // Borrows a Work for a scope.
  class Borrowed;
  absl::StatusOr<SplitText> SplitWords(absl::string_view text) const;
  absl::Status TokenizeSpan(const SplitText& split, const Span& span, Work& work) const;
  absl::StatusOr<Encoding> EncodeOne(absl::string_view text, int64_t type_id) const;
  // How many special tokens the template adds to this input, and how many to a single text.
  struct AddedTokenCounts {
    int64_t here = 0, single = 0;
  };
  absl::Status Check(const Truncation& truncation, const AddedTokenCounts& added,
                     bool of_file) const;

  std::unique_ptr<Normalizer> normalizer_;
  std::unique_ptr<PreTokenizer> pre_tokenizer_;
  std::unique_ptr<Model> model_;
  std::unique_ptr<PostProcessor> post_processor_;
  AddedTokens added_tokens_;
  Decoder decoder_;
  // The parts that divide text into words and tokenize them: those of bytes, if there is such a
  // pair.
  const PreTokenizer* splitter_ = nullptr;
  const Model* reader_ = nullptr;
  std::optional<Truncation> truncation_;
  std::optional<Padding> padding_;
  SpecialTokens special_tokens_;

  mutable Mutex mu_;
  mutable std::vector<std::unique_ptr<Work>> idle_ ABSL_GUARDED_BY(mu_);
};

}  // namespace muster::text

#endif  // MUSTER_WORKER_TEXT_TOKENIZER_CORE_H_
