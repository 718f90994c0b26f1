#include "worker/text/pre_tokenizers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/text/byte_alphabet.h"
#include "worker/text/components.h"
#include "worker/text/settings.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;

// What happens to the matches at which a text is divided.
enum class Behavior { kRemoved, kIsolated, kMergedWithPrevious, kMergedWithNext, kContiguous };

const std::vector<absl::string_view>& BehaviorNames() {
  static const auto* const names = new std::vector<absl::string_view>{
      "Removed", "Isolated", "MergedWithPrevious", "MergedWithNext", "Contiguous"};
  return *names;
}

// Joins pieces according to the behavior; the result is how the text is divided.
void Join(Behavior behavior, std::vector<Piece>& pieces) {
  if (behavior == Behavior::kIsolated) return;
  std::vector<Piece> joined;
  joined.reserve(pieces.size());
  bool previous_match = false;
  switch (behavior) {
    case Behavior::kRemoved:
      for (const Piece& piece : pieces) {
        if (!piece.match) joined.push_back(piece);
      }
      break;
    case Behavior::kContiguous:
    case Behavior::kMergedWithPrevious:
      for (const Piece& piece : pieces) {
        const bool joins = behavior == Behavior::kContiguous ? piece.match == previous_match
                                                             : piece.match && !previous_match;
        if (joins && !joined.empty()) {
          joined.back().end = piece.end;
        } else {
          joined.push_back(piece);
        }
        previous_match = piece.match;
      }
      break;
    case Behavior::kMergedWithNext:
      for (auto piece = pieces.rbegin(); piece != pieces.rend(); ++piece) {
        if (piece->match && !previous_match && !joined.empty()) {
          joined.back().begin = piece->begin;
        } else {
          joined.push_back(*piece);
        }
        previous_match = piece->match;
      }
      std::reverse(joined.begin(), joined.end());
      break;
    case Behavior::kIsolated:
      break;
  }
  pieces = std::move(joined);
}

// Divides spans where `find` (text, pieces) -> status finds something.
template <typename Find>
absl::Status SplitSpans(SplitText& split, Behavior behavior, Find find) {
  std::vector<Span> spans;
  spans.reserve(split.spans.size());
  std::vector<Piece> pieces;
  for (const Span& span : split.spans) {
    if (span.added_id >= 0) {
      spans.push_back(span);
      continue;
    }
    pieces.clear();
    MUSTER_RETURN_IF_ERROR(find(split.TextOf(span), pieces));
    Join(behavior, pieces);
    for (const Piece& piece : pieces) {
      if (piece.begin == piece.end) continue;
      const uint32_t begin = span.begin + piece.begin;
      const uint32_t end = span.begin + piece.end;
      spans.push_back({begin, end, split.aligned.OriginalOf(begin, end)});
    }
  }
  split.spans = std::move(spans);
  return absl::OkStatus();
}

// Matches single characters.
template <typename Is>
absl::Status FindCharacters(absl::string_view text, std::vector<Piece>& pieces, Is is) {
  uint32_t done = 0;
  for (size_t at = 0; at < text.size();) {
    const auto begin = static_cast<uint32_t>(at);
    if (!is(NextCharacter(text, at))) continue;
    if (done < begin) pieces.push_back({done, begin, false});
    done = static_cast<uint32_t>(at);
    pieces.push_back({begin, done, true});
  }
  if (done < text.size()) pieces.push_back({done, static_cast<uint32_t>(text.size()), false});
  return absl::OkStatus();
}

template <typename Is>
absl::Status SplitAtCharacters(SplitText& split, Behavior behavior, Is is) {
  return SplitSpans(split, behavior, [&](absl::string_view text, std::vector<Piece>& pieces) {
    return FindCharacters(text, pieces, is);
  });
}

// Rewrites every span that is not an added token: `write` (span, out) appends its replacement.
template <typename Write>
void RewriteSpans(SplitText& split, Write write) {
  AlignedText out;
  out.text.reserve(split.aligned.text.size() * 2);
  out.ranges.reserve(split.aligned.text.size() * 2);
  for (Span& span : split.spans) {
    const auto begin = static_cast<uint32_t>(out.text.size());
    if (span.added_id >= 0) {
      out.Append(split.aligned, span.begin, span.end);
    } else {
      write(span, out);
    }
    span.begin = begin;
    span.end = static_cast<uint32_t>(out.text.size());
  }
  split.aligned = std::move(out);
}

// Puts `prefix` before a span; it stands for the same as the span's first byte.
void AppendPrefixed(const SplitText& split, const Span& span, absl::string_view prefix,
                    AlignedText& out) {
  out.Append(prefix, split.aligned.ranges[span.begin]);
  out.Append(split.aligned, span.begin, span.end);
}

// Some pre-tokenizers double a text, and a file may have many.
absl::Status SplitChecked(const PreTokenizer& part, SplitText& split) {
  MUSTER_RETURN_IF_ERROR(part.Split(split));
  const size_t original = split.spans.empty() ? 0 : split.spans.back().original.end;
  if (split.aligned.text.size() <= MaxGrownBytes(original)) return absl::OkStatus();
  return absl::ResourceExhaustedError(absl::StrCat("the pre-tokenizers make a text of ", original,
                                                   " bytes longer than ", MaxGrownBytes(original)));
}

class Sequence final : public PreTokenizer {
 public:
  explicit Sequence(std::vector<std::unique_ptr<PreTokenizer>> parts) : parts_(std::move(parts)) {
    if (parts_.empty() || parts_.back()->WithoutByteAlphabet() == nullptr) return;
    // No part before the last one may have written bytes in the alphabet already.
    for (size_t i = 0; i + 1 < parts_.size(); ++i) {
      if (parts_[i]->WithoutByteAlphabet() != nullptr) return;
      head_.parts.push_back(parts_[i].get());
    }
    head_.parts.push_back(parts_.back()->WithoutByteAlphabet());
  }

  absl::Status Split(SplitText& split) const override {
    for (const auto& part : parts_) MUSTER_RETURN_IF_ERROR(SplitChecked(*part, split));
    return absl::OkStatus();
  }

  const PreTokenizer* WithoutByteAlphabet() const override {
    return head_.parts.empty() ? nullptr : &head_;
  }

 private:
  class Head final : public PreTokenizer {
   public:
    absl::Status Split(SplitText& split) const override {
      for (const PreTokenizer* const part : parts) {
        MUSTER_RETURN_IF_ERROR(SplitChecked(*part, split));
      }
      return absl::OkStatus();
    }
    std::vector<const PreTokenizer*> parts;
  };

  const std::vector<std::unique_ptr<PreTokenizer>> parts_;
  Head head_;
};

class SplitAt final : public PreTokenizer {
 public:
  SplitAt(std::unique_ptr<Pattern> pattern, Behavior behavior, bool invert)
      : pattern_(std::move(pattern)), behavior_(behavior), invert_(invert) {}

  absl::Status Split(SplitText& split) const override {
    return SplitSpans(split, behavior_,
                      [&](absl::string_view text, std::vector<Piece>& pieces) -> absl::Status {
                        MUSTER_RETURN_IF_ERROR(pattern_->Find(text, pieces));
                        for (Piece& piece : pieces) piece.match = piece.match != invert_;
                        return absl::OkStatus();
                      });
  }

 private:
  const std::unique_ptr<Pattern> pattern_;
  const Behavior behavior_;
  const bool invert_;
};

class ByteLevel final : public PreTokenizer {
 public:
  // `words` is null unless the text is to be divided.
  ByteLevel(std::unique_ptr<Pattern> words, bool add_prefix_space)
      : head_(std::move(words), add_prefix_space) {}

  absl::Status Split(SplitText& split) const override {
    MUSTER_RETURN_IF_ERROR(head_.Split(split));
    RewriteSpans(split, [&](const Span& span, AlignedText& out) {
      for (uint32_t i = span.begin; i < span.end; ++i) {
        out.Append(CharacterOfByte(static_cast<unsigned char>(split.aligned.text[i])),
                   split.aligned.ranges[i]);
      }
    });
    return absl::OkStatus();
  }

  const PreTokenizer* WithoutByteAlphabet() const override { return &head_; }

 private:
  class Head final : public PreTokenizer {
   public:
    Head(std::unique_ptr<Pattern> words, bool add_prefix_space)
        : words_(std::move(words)), add_prefix_space_(add_prefix_space) {}

    absl::Status Split(SplitText& split) const override {
      if (add_prefix_space_) {
        RewriteSpans(split, [&](const Span& span, AlignedText& out) {
          const bool has_one = split.aligned.text[span.begin] == ' ';
          AppendPrefixed(split, span, has_one ? "" : " ", out);
        });
      }
      if (words_ == nullptr) return absl::OkStatus();
      return SplitSpans(split, Behavior::kIsolated,
                        [&](absl::string_view text, std::vector<Piece>& pieces) {
                          return words_->Find(text, pieces);
                        });
    }

   private:
    const std::unique_ptr<Pattern> words_;
    const bool add_prefix_space_;
  };

  const Head head_;
};

class Metaspace final : public PreTokenizer {
 public:
  enum class Scheme { kFirst, kNever, kAlways };
  Metaspace(std::string replacement, Scheme scheme, bool split)
      : replacement_(std::move(replacement)), scheme_(scheme), split_(split) {}

  absl::Status Split(SplitText& split) const override {
    RewriteSpans(split, [&](const Span& span, AlignedText& out) {
      const absl::string_view text = split.TextOf(span);
      const bool marked = text[0] == ' ' || absl::StartsWith(text, replacement_);
      const bool wanted =
          scheme_ == Scheme::kAlways || (scheme_ == Scheme::kFirst && span.original.begin == 0);
      if (wanted && !marked) out.Append(replacement_, split.aligned.ranges[span.begin]);
      for (uint32_t i = span.begin; i < span.end; ++i) {
        if (split.aligned.text[i] == ' ') {
          out.Append(replacement_, split.aligned.ranges[i]);
        } else {
          out.Append(split.aligned, i, i + 1);
        }
      }
    });
    if (!split_) return absl::OkStatus();
    size_t at = 0;
    const char32_t mark = NextCharacter(replacement_, at);
    return SplitAtCharacters(split, Behavior::kMergedWithNext,
                             [&](char32_t c) { return c == mark; });
  }

 private:
  const std::string replacement_;
  const Scheme scheme_;
  const bool split_;
};

// Divides into runs of word characters, and of characters that are neither these nor blanks.
class Whitespace final : public PreTokenizer {
 public:
  absl::Status Split(SplitText& split) const override {
    return SplitSpans(
        split, Behavior::kRemoved, [](absl::string_view text, std::vector<Piece>& pieces) {
          const auto kind_of = [](char32_t c) { return IsWord(c) ? 1 : IsWhitespace(c) ? 0 : 2; };
          for (size_t at = 0; at < text.size();) {
            const auto begin = static_cast<uint32_t>(at);
            const int kind = kind_of(NextCharacter(text, at));
            for (size_t next = at; next < text.size(); at = next) {
              if (kind_of(NextCharacter(text, next)) != kind) break;
            }
            pieces.push_back({begin, static_cast<uint32_t>(at), kind == 0});
          }
          return absl::OkStatus();
        });
  }
};

class WhitespaceSplit final : public PreTokenizer {
 public:
  absl::Status Split(SplitText& split) const override {
    return SplitAtCharacters(split, Behavior::kRemoved, IsWhitespace);
  }
};

class Bert final : public PreTokenizer {
 public:
  absl::Status Split(SplitText& split) const override {
    MUSTER_RETURN_IF_ERROR(SplitAtCharacters(split, Behavior::kRemoved, IsWhitespace));
    return SplitAtCharacters(split, Behavior::kIsolated, IsPunctuation);
  }
};

class Digits final : public PreTokenizer {
 public:
  explicit Digits(bool individual)
      : behavior_(individual ? Behavior::kIsolated : Behavior::kContiguous) {}
  absl::Status Split(SplitText& split) const override {
    return SplitAtCharacters(split, behavior_, IsNumeric);
  }

 private:
  const Behavior behavior_;
};

class Punctuation final : public PreTokenizer {
 public:
  explicit Punctuation(Behavior behavior) : behavior_(behavior) {}
  absl::Status Split(SplitText& split) const override {
    return SplitAtCharacters(split, behavior_, IsPunctuation);
  }

 private:
  const Behavior behavior_;
};

class CharDelimiterSplit final : public PreTokenizer {
 public:
  explicit CharDelimiterSplit(char32_t delimiter) : delimiter_(delimiter) {}
  absl::Status Split(SplitText& split) const override {
    return SplitAtCharacters(split, Behavior::kRemoved,
                             [&](char32_t c) { return c == delimiter_; });
  }

 private:
  const char32_t delimiter_;
};

// Divides where the script changes. A blank belongs to every script; as in the tokenizers library,
// blanks before the first other character are dropped.
class UnicodeScripts final : public PreTokenizer {
 public:
  absl::Status Split(SplitText& split) const override {
    return SplitSpans(split, Behavior::kIsolated,
                      [](absl::string_view text, std::vector<Piece>& pieces) {
                        int last = -1;
                        for (size_t at = 0; at < text.size();) {
                          const auto begin = static_cast<uint32_t>(at);
                          const int script = ScriptOf(NextCharacter(text, at));
                          if (script != 0 && last != script) {
                            if (!pieces.empty()) pieces.back().end = begin;
                            pieces.push_back({begin, begin, false});
                          }
                          if (script != 0) last = script;
                        }
                        if (!pieces.empty()) pieces.back().end = static_cast<uint32_t>(text.size());
                        return absl::OkStatus();
                      });
  }
};

class FixedLength final : public PreTokenizer {
 public:
  explicit FixedLength(int64_t length) : length_(length) {}
  absl::Status Split(SplitText& split) const override {
    return SplitSpans(split, Behavior::kIsolated,
                      [&](absl::string_view text, std::vector<Piece>& pieces) {
                        for (size_t at = 0; at < text.size();) {
                          const auto begin = static_cast<uint32_t>(at);
                          for (int64_t i = 0; i < length_ && at < text.size(); ++i) {
                            NextCharacter(text, at);
                          }
                          pieces.push_back({begin, static_cast<uint32_t>(at), true});
                        }
                        return absl::OkStatus();
                      });
  }

 private:
  const int64_t length_;
};

using Made = absl::StatusOr<std::unique_ptr<PreTokenizer>>;

char32_t CharacterOf(const std::string& text) {
  size_t at = 0;
  return NextCharacter(text, at);
}

Made MakeSplit(Settings& settings) {
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<Pattern> pattern, MakePattern(settings));
  const auto behavior = static_cast<Behavior>(settings.Choice("behavior", BehaviorNames()));
  return std::make_unique<SplitAt>(std::move(pattern), behavior, settings.Bool("invert"));
}

Made MakeByteLevel(Settings& settings) {
  const bool add_prefix_space = settings.Bool("add_prefix_space");
  settings.Bool("trim_offsets");  // the post-processor's
  std::unique_ptr<Pattern> words;
  if (settings.Bool("use_regex", true)) {
    MUSTER_ASSIGN_OR_RETURN(words, Pattern::Regex(kGpt2Words));
  }
  return std::make_unique<ByteLevel>(std::move(words), add_prefix_space);
}

Made MakeMetaspace(Settings& settings) {
  const std::string replacement = settings.Character("replacement");
  auto scheme = static_cast<Metaspace::Scheme>(
      settings.Choice("prepend_scheme", {"first", "never", "always"}, static_cast<size_t>(2)));
  // Files from before prepend_scheme; str_rep repeats the replacement.
  const bool has_scheme = settings.Find("prepend_scheme") != nullptr;
  if (!settings.Bool("add_prefix_space", true)) {
    if (has_scheme && scheme != Metaspace::Scheme::kNever) {
      return settings.Wrong("add_prefix_space", "is false, but prepend_scheme is not \"never\"");
    }
    scheme = Metaspace::Scheme::kNever;
  }
  settings.Ignore("str_rep");
  return std::make_unique<Metaspace>(replacement, scheme, settings.Bool("split", true));
}

Made MakeFixedLength(Settings& settings) {
  const int64_t length = settings.Count("length", int64_t{1} << 31, 5);
  if (length == 0) return settings.Wrong("length", "must be at least 1");
  return std::make_unique<FixedLength>(length);
}

Made MakeDelimiter(Settings& settings) {
  return std::make_unique<CharDelimiterSplit>(CharacterOf(settings.Character("delimiter")));
}

const ComponentKind<PreTokenizer>& Kind() {
  static const auto* const kind = new ComponentKind<PreTokenizer>{
      .makers =
          {
              {"Split", MakeSplit},
              {"ByteLevel", MakeByteLevel},
              {"Metaspace", MakeMetaspace},
              {"Whitespace", [](Settings&) -> Made { return std::make_unique<Whitespace>(); }},
              {"WhitespaceSplit",
               [](Settings&) -> Made { return std::make_unique<WhitespaceSplit>(); }},
              {"BertPreTokenizer", [](Settings&) -> Made { return std::make_unique<Bert>(); }},
              {"Digits",
               [](Settings& s) -> Made {
                 return std::make_unique<Digits>(s.Bool("individual_digits"));
               }},
              {"Punctuation",
               [](Settings& s) -> Made {
                 return std::make_unique<Punctuation>(
                     static_cast<Behavior>(s.Choice("behavior", BehaviorNames(), 1)));
               }},
              {"CharDelimiterSplit", MakeDelimiter},
              {"Delimiter", MakeDelimiter},
              {"UnicodeScripts",
               [](Settings&) -> Made { return std::make_unique<UnicodeScripts>(); }},
              {"FixedLength", MakeFixedLength},
          },
      .parts = "pretokenizers",
      .sequence = [](std::vector<std::unique_ptr<PreTokenizer>> parts)
          -> std::unique_ptr<PreTokenizer> { return std::make_unique<Sequence>(std::move(parts)); },
  };
  return *kind;
}

}  // namespace

Made MakePreTokenizer(const Json& json, const std::string& path) {
  if (json.is_null()) return std::unique_ptr<PreTokenizer>();
  return MakeComponent(Kind(), json, path);
}

}  // namespace muster::text
