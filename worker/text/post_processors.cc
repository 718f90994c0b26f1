#include "worker/text/post_processors.h"

#include <algorithm>
#include <limits>
#include <map>
#include <utility>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/byte_alphabet.h"
#include "worker/text/components.h"
#include "worker/text/encoding_ops.h"
#include "worker/text/settings.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;

constexpr size_t kMaxPieces = 1024;
constexpr int64_t kMaxId = std::numeric_limits<int32_t>::max();

// Calls `act` with the part and its windows.
template <typename Act>
void WithWindows(Encoding& part, Act act) {
  act(part);
  for (Encoding& window : part.overflowing) act(window);
}

void SetTypeIds(Encoding& part, int64_t type_id) { part.type_ids.assign(part.size(), type_id); }

// Removes the blanks at the ends of tokens from their ranges.
void TrimOffsets(Encoding& part, bool add_prefix_space) {
  const auto is_blank = [](char32_t c) { return c == kByteAlphabet[' '] || IsWhitespace(c); };
  for (size_t i = 0; i < part.size(); ++i) {
    const std::string& token = part.tokens[i];
    int64_t leading = 0;
    for (size_t at = 0; at < token.size() && is_blank(NextCharacter(token, at));) ++leading;
    int64_t trailing = 0;
    for (size_t end = token.size(); end > 0 && is_blank(PreviousCharacter(token, end));) ++trailing;
    Encoding::Offsets& offsets = part.offsets[i];
    if (leading > 0) {
      // One blank at the start of the text is the one that was added there.
      const bool is_first = i == 0 || offsets.begin == 0;
      if (is_first && add_prefix_space && leading == 1) leading = 0;
      offsets.begin = std::min(offsets.begin + leading, offsets.end);
    }
    if (trailing > 0 && offsets.end >= trailing) {
      offsets.end = std::max(offsets.end - trailing, offsets.begin);
    }
  }
}

struct SpecialToken {
  std::vector<int64_t> ids;
  std::vector<std::string> tokens;
};

Encoding EncodingOf(const SpecialToken& special, int64_t type_id) {
  Encoding encoding;
  encoding.ids = special.ids;
  encoding.tokens = special.tokens;
  encoding.type_ids.assign(special.ids.size(), type_id);
  encoding.offsets.assign(special.ids.size(), {});
  encoding.special_tokens_mask.assign(special.ids.size(), 1);
  encoding.attention_mask.assign(special.ids.size(), 1);
  return encoding;
}

class Sequence final : public PostProcessor {
 public:
  explicit Sequence(std::vector<std::unique_ptr<PostProcessor>> parts) : parts_(std::move(parts)) {}
  int64_t AddedTokens(bool pair) const override {
    int64_t sum = 0;
    for (const auto& part : parts_) sum += part->AddedTokens(pair);
    return sum;
  }
  void Process(std::vector<Encoding>& parts, bool add_special_tokens) const override {
    for (const auto& part : parts_) part->Process(parts, add_special_tokens);
  }

 private:
  const std::vector<std::unique_ptr<PostProcessor>> parts_;
};

class ByteLevel final : public PostProcessor {
 public:
  ByteLevel(bool trim_offsets, bool add_prefix_space)
      : trim_offsets_(trim_offsets), add_prefix_space_(add_prefix_space) {}
  int64_t AddedTokens(bool) const override { return 0; }
  void Process(std::vector<Encoding>& parts, bool) const override {
    if (!trim_offsets_) return;
    for (Encoding& part : parts) {
      WithWindows(part, [&](Encoding& one) { TrimOffsets(one, add_prefix_space_); });
    }
  }

 private:
  const bool trim_offsets_;
  const bool add_prefix_space_;
};

class Template final : public PostProcessor {
 public:
  struct Piece {
    int sequence = -1;  // 0 or 1; -1: the special token
    SpecialToken special;
    int64_t type_id = 0;
  };

  Template(std::vector<Piece> single, std::vector<Piece> pair)
      : single_(std::move(single)), pair_(std::move(pair)) {}

  int64_t AddedTokens(bool pair) const override {
    int64_t sum = 0;
    for (const Piece& piece : pair ? pair_ : single_) {
      sum += static_cast<int64_t>(piece.special.ids.size());
    }
    return sum;
  }

  void Process(std::vector<Encoding>& parts, bool add_special_tokens) const override {
    // In the tokenizers library, the tokens that earlier processors have added count as one more
    // text, for which it fails.
    std::vector<Encoding> out;
    for (const Piece& piece : parts.size() >= 2 ? pair_ : single_) {
      if (piece.sequence < 0) {
        if (add_special_tokens) out.push_back(EncodingOf(piece.special, piece.type_id));
        continue;
      }
      Encoding part = parts[std::min<size_t>(piece.sequence, parts.size() - 1)];
      // Windows keep their type ids, as in the tokenizers library.
      SetTypeIds(part, piece.type_id);
      out.push_back(std::move(part));
    }
    parts = std::move(out);
  }

 private:
  const std::vector<Piece> single_;
  const std::vector<Piece> pair_;
};

// [CLS] A [SEP], and for pairs B [SEP]; RoBERTa puts one more separator before B.
class BertLike final : public PostProcessor {
 public:
  struct Parts {
    SpecialToken cls;
    SpecialToken sep;
    bool roberta = false;
    bool trim_offsets = false;
    bool add_prefix_space = false;
  };
  explicit BertLike(Parts parts) : parts_(std::move(parts)) {}

  int64_t AddedTokens(bool pair) const override {
    if (!pair) return 2;
    return parts_.roberta ? 4 : 3;
  }

  void Process(std::vector<Encoding>& parts, bool add_special_tokens) const override {
    for (size_t i = 0; i < parts.size(); ++i) {
      const int64_t type_id = parts_.roberta || i == 0 ? 0 : 1;
      WithWindows(parts[i], [&](Encoding& one) {
        if (parts_.trim_offsets) TrimOffsets(one, parts_.add_prefix_space);
        if (parts_.roberta && (add_special_tokens || &one == &parts[i])) SetTypeIds(one, 0);
        if (!add_special_tokens) return;
        Encoding whole;
        if (i == 0) {
          whole = EncodingOf(parts_.cls, type_id);
        } else if (parts_.roberta) {
          whole = EncodingOf(parts_.sep, type_id);
        }
        std::vector<Encoding> windows = std::move(one.overflowing);
        one.overflowing.clear();
        Append(whole, one);
        Append(whole, EncodingOf(parts_.sep, type_id));
        one = std::move(whole);
        one.overflowing = std::move(windows);
      });
    }
  }

 private:
  const Parts parts_;
};

using Made = absl::StatusOr<std::unique_ptr<PostProcessor>>;

absl::StatusOr<std::map<std::string, SpecialToken>> ReadSpecialTokens(Settings& settings) {
  std::map<std::string, SpecialToken> tokens;
  const Json* const field = settings.Find("special_tokens");
  if (field == nullptr) return tokens;
  if (!field->is_object()) return settings.Wrong("special_tokens", "must be an object");
  for (const auto& [name, value] : field->items()) {
    Settings token(value, absl::StrCat(settings.PathOf("special_tokens"), ".", Printable(name)));
    token.Ignore("id");
    SpecialToken special;
    for (const Json& id : token.List("ids")) {
      const std::optional<int64_t> number = WholeNumber(id, kMaxId);
      if (!number.has_value()) return token.Wrong("ids", "must be whole numbers below 2^31");
      special.ids.push_back(*number);
    }
    for (const Json& text : token.List("tokens")) {
      if (!text.is_string()) return token.Wrong("tokens", "must be texts");
      special.tokens.push_back(text.get<std::string>());
    }
    MUSTER_RETURN_IF_ERROR(token.Finish());
    if (special.ids.size() != special.tokens.size() || special.ids.size() > kMaxPieces) {
      return token.Wrong("tokens", "must be as many as the ids, and not too many");
    }
    tokens.emplace(name, std::move(special));
  }
  return tokens;
}

absl::StatusOr<std::vector<Template::Piece>> ReadPieces(
    Settings& settings, absl::string_view name,
    const std::map<std::string, SpecialToken>& special_tokens) {
  std::vector<Template::Piece> pieces;
  for (const Json& json : settings.List(name)) {
    const std::string path = absl::StrCat(settings.PathOf(name), "[", pieces.size(), "]");
    Settings outer(json, path);
    const Json* const sequence = outer.Find("Sequence");
    const Json* const special = outer.Find("SpecialToken");
    MUSTER_RETURN_IF_ERROR(outer.Finish());
    if ((sequence == nullptr) == (special == nullptr)) {
      return absl::InvalidArgumentError(
          absl::StrCat(path, ": must have either Sequence or SpecialToken"));
    }
    Settings inner(sequence != nullptr ? *sequence : *special, path);
    Template::Piece piece;
    piece.type_id = inner.Id("type_id");
    if (sequence != nullptr) {
      piece.sequence = static_cast<int>(inner.Choice("id", {"A", "B"}));
    } else {
      const std::string id = inner.String("id");
      const auto found = special_tokens.find(id);
      if (inner.ok() && found == special_tokens.end()) {
        return inner.Wrong("id", absl::StrCat("\"", Printable(id), "\" is not in special_tokens"));
      }
      if (found != special_tokens.end()) piece.special = found->second;
    }
    MUSTER_RETURN_IF_ERROR(inner.Finish());
    pieces.push_back(std::move(piece));
    if (pieces.size() > kMaxPieces) return settings.Wrong(name, "has too many pieces");
  }
  return pieces;
}

Made MakeTemplate(Settings& settings) {
  MUSTER_ASSIGN_OR_RETURN(const auto special_tokens, ReadSpecialTokens(settings));
  MUSTER_ASSIGN_OR_RETURN(auto single, ReadPieces(settings, "single", special_tokens));
  MUSTER_ASSIGN_OR_RETURN(auto pair, ReadPieces(settings, "pair", special_tokens));
  const auto uses = [](const std::vector<Template::Piece>& pieces, int sequence) {
    return std::any_of(pieces.begin(), pieces.end(),
                       [&](const Template::Piece& piece) { return piece.sequence == sequence; });
  };
  if (settings.ok() && uses(single, 1)) {
    return settings.Wrong("single", "uses sequence B, which a single text does not have");
  }
  return std::make_unique<Template>(std::move(single), std::move(pair));
}

SpecialToken ReadPair(Settings& settings, absl::string_view name) {
  const std::vector<Json>& pair = settings.List(name);
  if (pair.size() != 2 || !pair[0].is_string()) return {};
  const std::optional<int64_t> id = WholeNumber(pair[1], kMaxId);
  if (!id.has_value()) return {};
  return {{*id}, {pair[0].get<std::string>()}};
}

Made MakeBertLike(Settings& settings, bool roberta) {
  BertLike::Parts parts;
  parts.roberta = roberta;
  parts.cls = ReadPair(settings, "cls");
  parts.sep = ReadPair(settings, "sep");
  MUSTER_RETURN_IF_ERROR(settings.status());
  if (parts.cls.ids.empty()) return settings.Wrong("cls", "must be [token, id]");
  if (parts.sep.ids.empty()) return settings.Wrong("sep", "must be [token, id]");
  if (roberta) {
    parts.trim_offsets = settings.Bool("trim_offsets");
    parts.add_prefix_space = settings.Bool("add_prefix_space");
  }
  return std::make_unique<BertLike>(std::move(parts));
}

Made MakeByteLevel(Settings& settings) {
  const bool add_prefix_space = settings.Bool("add_prefix_space");
  settings.Ignore("use_regex");  // the pre-tokenizer's
  return std::make_unique<ByteLevel>(settings.Bool("trim_offsets"), add_prefix_space);
}

const ComponentKind<PostProcessor>& Kind() {
  static const auto* const kind = new ComponentKind<PostProcessor>{
      .makers =
          {
              {"TemplateProcessing", MakeTemplate},
              {"ByteLevel", MakeByteLevel},
              {"BertProcessing", [](Settings& s) { return MakeBertLike(s, false); }},
              {"RobertaProcessing", [](Settings& s) { return MakeBertLike(s, true); }},
          },
      .parts = "processors",
      .sequence =
          [](std::vector<std::unique_ptr<PostProcessor>> parts) -> std::unique_ptr<PostProcessor> {
        return std::make_unique<Sequence>(std::move(parts));
      },
      // More parts would multiply the tokens; no file in use has more than two.
      .most_parts = 8,
  };
  return *kind;
}

}  // namespace

Made MakePostProcessor(const Json& json, const std::string& path) {
  if (json.is_null()) return std::unique_ptr<PostProcessor>();
  return MakeComponent(Kind(), json, path);
}

}  // namespace muster::text
