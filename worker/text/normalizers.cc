#include "worker/text/normalizers.h"

#include <algorithm>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/status_macros.h"
#include "worker/text/byte_alphabet.h"
#include "worker/text/charsmap.h"
#include "worker/text/components.h"
#include "worker/text/pattern.h"
#include "worker/text/settings.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using Json = nlohmann::json;

// Keeps the characters for which `keep` is true, each as `map` returns it.
template <typename Keep, typename Map>
void FilterAndMap(AlignedText& text, ByteRange original, Keep keep, Map map) {
  AlignedText out;
  out.text.reserve(text.text.size());
  out.ranges.reserve(text.text.size());
  Rewriter rewriter(text, 0, text.text.size(), original, out);
  for (size_t at = 0; at < text.text.size();) {
    const char32_t c = NextCharacter(text.text, at);
    if (keep(c)) {
      rewriter.Put(map(c), 0);
    } else {
      rewriter.Skip(1);
    }
  }
  text = std::move(out);
}

size_t MostBytes(ByteRange original) { return MaxGrownBytes(original.end - original.begin); }

absl::Status TooLong(ByteRange original) {
  return absl::ResourceExhaustedError(absl::StrCat("the normalizers make a text of ",
                                                   original.end - original.begin,
                                                   " bytes longer than ", MostBytes(original)));
}

class Sequence final : public Normalizer {
 public:
  explicit Sequence(std::vector<std::unique_ptr<Normalizer>> parts) : parts_(std::move(parts)) {}
  absl::Status Normalize(AlignedText& text, ByteRange original) const override {
    for (const auto& part : parts_) {
      MUSTER_RETURN_IF_ERROR(part->Normalize(text, original));
      // Some parts double a text.
      if (text.text.size() > MostBytes(original)) return TooLong(original);
    }
    return absl::OkStatus();
  }

 private:
  const std::vector<std::unique_ptr<Normalizer>> parts_;
};

class Prepend final : public Normalizer {
 public:
  explicit Prepend(std::string prepended) : prepended_(std::move(prepended)) {}
  absl::Status Normalize(AlignedText& text, ByteRange) const override {
    if (text.text.empty()) return absl::OkStatus();
    AlignedText out;
    out.Append(prepended_, text.ranges[0]);
    out.Append(text, 0, text.text.size());
    text = std::move(out);
    return absl::OkStatus();
  }

 private:
  const std::string prepended_;
};

class Replace final : public Normalizer {
 public:
  Replace(std::unique_ptr<Pattern> pattern, std::string content)
      : pattern_(std::move(pattern)), content_(std::move(content)) {}

  absl::Status Normalize(AlignedText& text, ByteRange original) const override {
    std::vector<Piece> pieces;
    MUSTER_RETURN_IF_ERROR(pattern_->Find(text.text, pieces));
    if (std::none_of(pieces.begin(), pieces.end(), [](const Piece& p) { return p.match; })) {
      return absl::OkStatus();
    }
    if (pieces.size() * content_.size() + text.text.size() > MostBytes(original)) {
      return TooLong(original);
    }
    AlignedText out;
    for (const Piece& piece : pieces) {
      if (!piece.match) {
        out.Append(text, piece.begin, piece.end);
      } else {
        // The new text stands for the last character that it replaces.
        out.Append(content_, piece.end > 0 ? text.ranges[piece.end - 1]
                                           : ByteRange{original.begin, original.begin});
      }
    }
    text = std::move(out);
    return absl::OkStatus();
  }

 private:
  const std::unique_ptr<Pattern> pattern_;
  const std::string content_;
};

// NFC, NFD, NFKC and NFKD with the alignment of the tokenizers library: the decomposition of a
// character stands for it, and a composition of several for the first of them.
class UnicodeForm final : public Normalizer {
 public:
  UnicodeForm(bool compatibility, bool compose)
      : compatibility_(compatibility), compose_(compose) {}

  absl::Status Normalize(AlignedText& text, ByteRange original) const override {
    if (!Changes(text.text)) return absl::OkStatus();
    std::vector<Mark> marks = Decomposed(text.text);
    if (compose_) marks = Composed(marks);
    AlignedText out;
    out.text.reserve(text.text.size());
    out.ranges.reserve(text.text.size());
    Rewriter rewriter(text, 0, text.text.size(), original, out);
    for (const Mark& mark : marks) rewriter.Put(mark.character, mark.change);
    text = std::move(out);
    return absl::OkStatus();
  }

 private:
  struct Mark {
    char32_t character;
    int64_t change;  // as for Rewriter::Put
    int combining_class;
  };

  bool Changes(absl::string_view text) const {
    const bool composition = compose_ && !compatibility_;
    for (size_t at = 0; at < text.size();) {
      if (static_cast<unsigned char>(text[at]) < 0x80) {
        ++at;
        continue;
      }
      const char32_t c = NextCharacter(text, at);
      if (!(composition ? IsInertInComposition(c) : IsInertInNormalization(c))) return true;
    }
    return false;
  }

  std::vector<Mark> Decomposed(absl::string_view text) const {
    std::vector<Mark> marks;
    marks.reserve(text.size());
    size_t sorted = 0;
    const auto sort_from = [&] {
      std::stable_sort(
          marks.begin() + static_cast<ptrdiff_t>(sorted), marks.end(),
          [](const Mark& a, const Mark& b) { return a.combining_class < b.combining_class; });
      sorted = marks.size();
    };
    for (size_t at = 0; at < text.size();) {
      const char32_t c = NextCharacter(text, at);
      int64_t change = 0;
      for (const char32_t part : Decompose(c, compatibility_)) {
        const int combining_class = CombiningClass(part);
        if (combining_class == 0) sort_from();
        marks.push_back({part, change, combining_class});
        change = 1;
      }
    }
    sort_from();
    return marks;
  }

  static std::vector<Mark> Composed(const std::vector<Mark>& marks) {
    std::vector<Mark> out;
    out.reserve(marks.size());
    constexpr size_t kNone = static_cast<size_t>(-1);
    size_t starter = kNone;  // in `out`
    // The class of the character between it and the end of `out`; -1: there is none.
    int last_class = -1;
    for (const Mark& mark : marks) {
      if (starter != kNone && last_class < mark.combining_class) {
        // One starter may join another only if nothing is between them.
        const char32_t composed = Compose(out[starter].character, mark.character);
        if (composed != 0) {
          out[starter].character = composed;
          out[starter].change += mark.change - 1;
          continue;
        }
      }
      if (mark.combining_class == 0) {
        starter = out.size();
        last_class = -1;
      } else if (starter != kNone) {
        last_class = mark.combining_class;
      }
      out.push_back(mark);
    }
    return out;
  }

  const bool compatibility_;
  const bool compose_;
};

class Nmt final : public Normalizer {
 public:
  absl::Status Normalize(AlignedText& text, ByteRange original) const override {
    FilterAndMap(
        text, original,
        [](char32_t c) {
          return !((c >= 0x01 && c <= 0x08) || c == 0x0B || (c >= 0x0E && c <= 0x1F) || c == 0x7F ||
                   c == 0x8F || c == 0x9F);
        },
        [](char32_t c) {
          const bool blank = c == 0x09 || c == 0x0A || c == 0x0C || c == 0x0D || c == 0x1680 ||
                             (c >= 0x200B && c <= 0x200F) || c == 0x2028 || c == 0x2029 ||
                             c == 0x2581 || c == 0xFEFF || c == 0xFFFD;
          return blank ? U' ' : c;
        });
    return absl::OkStatus();
  }
};

class Strip final : public Normalizer {
 public:
  Strip(bool left, bool right) : left_(left), right_(right) {}
  absl::Status Normalize(AlignedText& text, ByteRange) const override {
    size_t begin = 0;
    size_t end = text.text.size();
    for (size_t at = 0; left_ && begin < end; begin = at) {
      if (!IsWhitespace(NextCharacter(text.text, at))) break;
    }
    for (size_t at = end; right_ && end > begin; end = at) {
      if (!IsWhitespace(PreviousCharacter(text.text, at))) break;
    }
    AlignedText out;
    out.Append(text, begin, end);
    text = std::move(out);
    return absl::OkStatus();
  }

 private:
  const bool left_;
  const bool right_;
};

class StripAccents final : public Normalizer {
 public:
  absl::Status Normalize(AlignedText& text, ByteRange original) const override {
    FilterAndMap(
        text, original, [](char32_t c) { return !IsMark(c); }, [](char32_t c) { return c; });
    return absl::OkStatus();
  }
};

class Lowercased final : public Normalizer {
 public:
  absl::Status Normalize(AlignedText& text, ByteRange original) const override {
    AlignedText out;
    out.text.reserve(text.text.size());
    out.ranges.reserve(text.text.size());
    Rewriter rewriter(text, 0, text.text.size(), original, out);
    for (size_t at = 0; at < text.text.size();) {
      int64_t change = 0;
      for (const char32_t c : Lowercase(NextCharacter(text.text, at))) {
        rewriter.Put(c, change);
        change = 1;
      }
    }
    text = std::move(out);
    return absl::OkStatus();
  }
};

bool IsChinese(char32_t c) {
  return (c >= 0x4E00 && c <= 0x9FFF) || (c >= 0x3400 && c <= 0x4DBF) ||
         (c >= 0x20000 && c <= 0x2A6DF) || (c >= 0x2A700 && c <= 0x2B73F) ||
         (c >= 0x2B740 && c <= 0x2B81F) || (c >= 0x2B920 && c <= 0x2CEAF) ||
         (c >= 0xF900 && c <= 0xFAFF) || (c >= 0x2F800 && c <= 0x2FA1F);
}

class Bert final : public Normalizer {
 public:
  struct Parts {
    bool clean_text;
    bool handle_chinese_chars;
    bool strip_accents;
    bool lowercase;
  };
  explicit Bert(const Parts& parts) : parts_(parts) {}

  absl::Status Normalize(AlignedText& text, ByteRange original) const override {
    if (parts_.clean_text) {
      FilterAndMap(
          text, original,
          [](char32_t c) {
            const bool blank = c == '\t' || c == '\n' || c == '\r';
            return blank || !(c == 0 || c == 0xFFFD || IsControl(c));
          },
          [](char32_t c) { return IsWhitespace(c) ? U' ' : c; });
    }
    if (parts_.handle_chinese_chars) SetChineseApart(text, original);
    if (parts_.strip_accents) {
      MUSTER_RETURN_IF_ERROR(UnicodeForm(false, false).Normalize(text, original));
      FilterAndMap(
          text, original, [](char32_t c) { return !IsNonspacingMark(c); },
          [](char32_t c) { return c; });
    }
    return parts_.lowercase ? Lowercased().Normalize(text, original) : absl::OkStatus();
  }

 private:
  static void SetChineseApart(AlignedText& text, ByteRange original) {
    AlignedText out;
    Rewriter rewriter(text, 0, text.text.size(), original, out);
    bool any = false;
    for (size_t at = 0; at < text.text.size();) {
      const char32_t c = NextCharacter(text.text, at);
      if (!IsChinese(c)) {
        rewriter.Put(c, 0);
        continue;
      }
      any = true;
      rewriter.Put(' ', 0);
      rewriter.Put(c, 1);
      rewriter.Put(' ', 1);
    }
    if (any) text = std::move(out);
  }

  const Parts parts_;
};

class ByteLevel final : public Normalizer {
 public:
  absl::Status Normalize(AlignedText& text, ByteRange) const override {
    AlignedText out;
    for (size_t i = 0; i < text.text.size(); ++i) {
      out.Append(CharacterOfByte(static_cast<unsigned char>(text.text[i])), text.ranges[i]);
    }
    text = std::move(out);
    return absl::OkStatus();
  }
};

class Precompiled final : public Normalizer {
 public:
  explicit Precompiled(Charsmap map) : map_(std::move(map)) {}
  absl::Status Normalize(AlignedText& text, ByteRange original) const override {
    AlignedText out;
    Rewriter rewriter(text, 0, text.text.size(), original, out);
    const auto replace = [&](absl::string_view part) {
      const absl::optional<absl::string_view> found = map_.Find(part);
      if (!found.has_value()) return false;
      const auto removed = static_cast<int64_t>(CountCharacters(part));
      const auto added = static_cast<int64_t>(CountCharacters(*found));
      int64_t index = 0;
      for (size_t at = 0; at < found->size(); ++index) {
        const char32_t c = NextCharacter(*found, at);
        // The last ones are superfluous, or take what is left.
        const bool surplus = index >= removed;
        rewriter.Put(c, surplus ? 1 : index == added - 1 && added < removed ? added - removed : 0);
      }
      if (added == 0) rewriter.Skip(static_cast<size_t>(removed));
      return true;
    };
    for (const absl::string_view cluster : GraphemeClusters(text.text)) {
      if (cluster.size() < 6 && replace(cluster)) continue;
      for (size_t at = 0; at < cluster.size();) {
        const size_t begin = at;
        const char32_t c = NextCharacter(cluster, at);
        if (!replace(cluster.substr(begin, at - begin))) rewriter.Put(c, 0);
      }
    }
    text = std::move(out);
    return absl::OkStatus();
  }

 private:
  const Charsmap map_;
};

using Made = absl::StatusOr<std::unique_ptr<Normalizer>>;

Made MakeReplace(Settings& settings) {
  MUSTER_ASSIGN_OR_RETURN(std::unique_ptr<Pattern> pattern, MakePattern(settings));
  return std::make_unique<Replace>(std::move(pattern), settings.String("content"));
}

Made MakeBert(Settings& settings) {
  const bool lowercase = settings.Bool("lowercase");
  return std::make_unique<Bert>(
      Bert::Parts{.clean_text = settings.Bool("clean_text"),
                  .handle_chinese_chars = settings.Bool("handle_chinese_chars"),
                  .strip_accents = settings.MaybeBool("strip_accents").value_or(lowercase),
                  .lowercase = lowercase});
}

Made MakePrecompiled(Settings& settings) {
  absl::StatusOr<Charsmap> map = Charsmap::Parse(settings.String("precompiled_charsmap"));
  if (!map.ok()) return settings.Wrong("precompiled_charsmap", map.status().message());
  return std::make_unique<Precompiled>(*std::move(map));
}

const ComponentKind<Normalizer>& Kind() {
  static const auto* const kind = new ComponentKind<Normalizer>{
      .makers =
          {
              {"Prepend",
               [](Settings& s) -> Made { return std::make_unique<Prepend>(s.String("prepend")); }},
              {"Replace", MakeReplace},
              {"NFC", [](Settings&) -> Made { return std::make_unique<UnicodeForm>(false, true); }},
              {"NFD",
               [](Settings&) -> Made { return std::make_unique<UnicodeForm>(false, false); }},
              {"NFKC", [](Settings&) -> Made { return std::make_unique<UnicodeForm>(true, true); }},
              {"NFKD",
               [](Settings&) -> Made { return std::make_unique<UnicodeForm>(true, false); }},
              {"Nmt", [](Settings&) -> Made { return std::make_unique<Nmt>(); }},
              {"Strip",
               [](Settings& s) -> Made {
                 const bool left = s.Bool("strip_left");
                 return std::make_unique<Strip>(left, s.Bool("strip_right"));
               }},
              {"StripAccents", [](Settings&) -> Made { return std::make_unique<StripAccents>(); }},
              {"Lowercase", [](Settings&) -> Made { return std::make_unique<Lowercased>(); }},
              {"Bert", MakeBert},
              {"BertNormalizer", MakeBert},
              {"ByteLevel", [](Settings&) -> Made { return std::make_unique<ByteLevel>(); }},
              {"Precompiled", MakePrecompiled},
          },
      .parts = "normalizers",
      .sequence = [](std::vector<std::unique_ptr<Normalizer>> parts)
          -> std::unique_ptr<Normalizer> { return std::make_unique<Sequence>(std::move(parts)); },
  };
  return *kind;
}

}  // namespace

Made MakeNormalizer(const Json& json, const std::string& path) {
  if (json.is_null()) return std::unique_ptr<Normalizer>();
  return MakeComponent(Kind(), json, path);
}

}  // namespace muster::text
