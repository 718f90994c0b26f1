#include "worker/text/model.h"

#include <limits>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/bpe.h"
#include "worker/text/settings.h"
#include "worker/text/trie.h"
#include "worker/text/unicode.h"
#include "worker/text/unigram.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;

class NoScratch final : public Model::Scratch {};

absl::Status NoUnknownToken(const std::string& token) {
  return absl::FailedPreconditionError(
      absl::StrCat("a word is not in the vocabulary, and neither is the unknown token \"",
                   Printable(token), "\""));
}

// Splits off the longest piece with which a word begins, then the longest with which the rest
// begins, and so on.
class WordPiece final : public Model {
 public:
  WordPiece(Vocabulary vocabulary, std::string unk_token, std::string prefix, int64_t most)
      : vocabulary_(std::move(vocabulary)),
        unk_token_(std::move(unk_token)),
        unk_id_(vocabulary_.Id(unk_token_)),
        most_characters_(most) {
    std::vector<std::pair<absl::string_view, uint32_t>> entries;
    vocabulary_.ForEach(
        [&](absl::string_view text, uint32_t id) { entries.emplace_back(text, id); });
    trie_ = Trie(std::move(entries));
    continuing_ = trie_.Walk(prefix);
  }

  absl::Status Tokenize(absl::string_view word, Scratch&,
                        std::vector<Token>& tokens) const override {
    const size_t first = tokens.size();
    bool bad = word.size() > static_cast<size_t>(most_characters_) &&
               CountCharacters(word) > static_cast<size_t>(most_characters_);
    for (size_t begin = 0; begin < word.size() && !bad;) {
      Token longest;
      uint32_t node = begin == 0 ? Trie::kRoot : continuing_;
      for (size_t end = begin; end < word.size() && node != Trie::kNowhere;) {
        node = trie_.Step(node, static_cast<unsigned char>(word[end++]));
        if (node == Trie::kNowhere || trie_.Value(node) == Trie::kNoValue) continue;
        longest = {trie_.Value(node), static_cast<uint32_t>(begin), static_cast<uint32_t>(end)};
      }
      bad = longest.end == 0;
      tokens.push_back(longest);
      begin = longest.end;
    }
    if (!bad) return absl::OkStatus();
    if (!unk_id_.has_value()) return NoUnknownToken(unk_token_);
    tokens.resize(first);
    tokens.push_back({*unk_id_, 0, static_cast<uint32_t>(word.size())});
    return absl::OkStatus();
  }

  std::unique_ptr<Scratch> NewScratch() const override { return std::make_unique<NoScratch>(); }
  const Vocabulary& vocabulary() const override { return vocabulary_; }

 private:
  const Vocabulary vocabulary_;
  const std::string unk_token_;
  const std::optional<uint32_t> unk_id_;
  const int64_t most_characters_;
  Trie trie_;
  uint32_t continuing_;  // the trie's node where pieces inside of a word begin
};

// Looks up whole words.
class WordLevel final : public Model {
 public:
  WordLevel(Vocabulary vocabulary, std::string unk_token)
      : vocabulary_(std::move(vocabulary)),
        unk_token_(std::move(unk_token)),
        unk_id_(vocabulary_.Id(unk_token_)) {}

  absl::Status Tokenize(absl::string_view word, Scratch&,
                        std::vector<Token>& tokens) const override {
    const std::optional<uint32_t> id = vocabulary_.Id(word);
    if (!id.has_value() && !unk_id_.has_value()) return NoUnknownToken(unk_token_);
    tokens.push_back({id.has_value() ? *id : *unk_id_, 0, static_cast<uint32_t>(word.size())});
    return absl::OkStatus();
  }

  std::unique_ptr<Scratch> NewScratch() const override { return std::make_unique<NoScratch>(); }
  const Vocabulary& vocabulary() const override { return vocabulary_; }

 private:
  const Vocabulary vocabulary_;
  const std::string unk_token_;
  const std::optional<uint32_t> unk_id_;
};

absl::StatusOr<Vocabulary> ReadVocabulary(Settings& settings) {
  const Json* const vocab = settings.Find("vocab");
  MUSTER_RETURN_IF_ERROR(settings.status());
  if (vocab == nullptr) return settings.Wrong("vocab", "is missing");
  return Vocabulary::FromJson(*vocab, settings.PathOf("vocab"));
}

// Determines the type for files from before `type`.
std::string GuessType(Settings& settings) {
  if (settings.Find("merges") != nullptr) return "BPE";
  if (settings.Find("continuing_subword_prefix") != nullptr) return "WordPiece";
  const Json* const vocab = settings.Find("vocab");
  return vocab != nullptr && vocab->is_array() ? "Unigram" : "WordLevel";
}

}  // namespace

absl::StatusOr<std::unique_ptr<Model>> MakeModel(const Json& json, const std::string& path) {
  Settings settings(json, path);
  MUSTER_RETURN_IF_ERROR(settings.status());
  const std::optional<std::string> named = settings.MaybeString("type");
  const std::string type = named.has_value() ? *named : GuessType(settings);
  MUSTER_RETURN_IF_ERROR(settings.status());
  std::unique_ptr<Model> model;
  if (type == "BPE") {
    MUSTER_ASSIGN_OR_RETURN(model, MakeBpe(settings));
  } else if (type == "Unigram") {
    MUSTER_ASSIGN_OR_RETURN(model, MakeUnigram(settings));
  } else if (type == "WordPiece") {
    std::string unk = settings.String("unk_token");
    std::string prefix = settings.String("continuing_subword_prefix");
    const int64_t most =
        settings.Count("max_input_chars_per_word", std::numeric_limits<int32_t>::max());
    MUSTER_ASSIGN_OR_RETURN(Vocabulary vocabulary, ReadVocabulary(settings));
    model =
        std::make_unique<WordPiece>(std::move(vocabulary), std::move(unk), std::move(prefix), most);
  } else if (type == "WordLevel") {
    std::string unk = settings.String("unk_token");
    MUSTER_ASSIGN_OR_RETURN(Vocabulary vocabulary, ReadVocabulary(settings));
    model = std::make_unique<WordLevel>(std::move(vocabulary), std::move(unk));
  } else {
    return settings.NotSupported(absl::StrCat("type '", Printable(type), "'"));
  }
  MUSTER_RETURN_IF_ERROR(settings.Finish());
  return model;
}

}  // namespace muster::text
