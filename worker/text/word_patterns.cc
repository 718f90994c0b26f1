#include "worker/text/word_patterns.h"

#include <array>

#include "worker/text/unicode.h"

namespace muster::text {
namespace {

enum Class : uint8_t { kOther, kLetter, kNumber, kSpace };

Class ComputeClass(char32_t c) {
  if (IsLetter(c)) return kLetter;
  if (IsNumeric(c)) return kNumber;
  return IsWhitespace(c) ? kSpace : kOther;
}

Class ClassOf(char32_t c) {
  static const auto* const plane = [] {
    auto* classes = new std::array<Class, 0x10000>;
    for (char32_t i = 0; i < 0x10000; ++i) (*classes)[i] = ComputeClass(i);
    return classes;
  }();
  return c < 0x10000 ? (*plane)[c] : ComputeClass(c);
}

bool IsNewline(char32_t c) { return c == '\r' || c == '\n'; }

// Reads a text character by character.
class Cursor {
 public:
  Cursor(absl::string_view text, size_t at) : text_(text), at_(at) { Read(); }

  bool ended() const { return at_ >= text_.size(); }
  size_t at() const { return at_; }
  char32_t character() const { return character_; }
  bool Is(Class wanted) const { return !ended() && class_ == wanted; }
  bool IsNewline() const { return !ended() && text::IsNewline(character_); }
  void Step() {
    at_ = next_;
    Read();
  }
  void SkipAll(Class skipped) {
    while (Is(skipped)) Step();
  }

 private:
  void Read() {
    if (ended()) return;
    next_ = at_;
    character_ = NextCharacter(text_, next_);
    class_ = ClassOf(character_);
  }

  const absl::string_view text_;
  size_t at_;
  size_t next_ = 0;
  char32_t character_ = 0;
  Class class_ = kOther;
};

// The bytes of 's, 't, 're, 've, 'm, 'll or 'd at `text[at]`, where an apostrophe is; 0: none.
size_t ContractionBytes(absl::string_view text, size_t at, bool any_case) {
  const auto letter = [&](size_t i) -> char {
    if (i >= text.size()) return '\0';
    const char c = text[i];
    return any_case && c >= 'A' && c <= 'Z' ? static_cast<char>(c - 'A' + 'a') : c;
  };
  switch (letter(at + 1)) {
    case 's':
    case 't':
    case 'm':
    case 'd':
      return 2;
    case 'r':
    case 'v':
      return letter(at + 2) == 'e' ? 3 : 0;
    case 'l':
      return letter(at + 2) == 'l' ? 3 : 0;
    default:
      // The long s, U+017F, is an s to who ignores case.
      return any_case && text.substr(at + 1, 2) == "\xC5\xBF" ? 3 : 0;
  }
}

// What `\s+(?!\S)|\s+` matches at `begin`, where a blank is.
size_t BlanksEnd(absl::string_view text, size_t begin) {
  Cursor cursor(text, begin);
  size_t last = begin;
  while (cursor.Is(kSpace)) {
    last = cursor.at();
    cursor.Step();
  }
  return cursor.ended() || last == begin ? cursor.at() : last;
}

size_t Gpt2WordEnd(absl::string_view text, size_t begin) {
  Cursor cursor(text, begin);
  if (cursor.character() == '\'') {
    if (const size_t bytes = ContractionBytes(text, begin, false); bytes > 0) return begin + bytes;
  }
  if (cursor.character() == ' ') cursor.Step();
  if (cursor.ended() || cursor.Is(kSpace)) return BlanksEnd(text, begin);
  cursor.SkipAll(ClassOf(cursor.character()));
  return cursor.at();
}

size_t Llama3WordEnd(absl::string_view text, size_t begin, int most_digits) {
  Cursor cursor(text, begin);
  if (cursor.character() == '\'') {
    if (const size_t bytes = ContractionBytes(text, begin, true); bytes > 0) return begin + bytes;
  }
  if (cursor.Is(kLetter)) {
    cursor.SkipAll(kLetter);
    return cursor.at();
  }
  if (cursor.Is(kNumber)) {
    for (int i = 0; i < most_digits && cursor.Is(kNumber); ++i) cursor.Step();
    return cursor.at();
  }
  if (!cursor.IsNewline()) {
    Cursor next = cursor;
    next.Step();
    if (next.Is(kLetter)) {
      next.SkipAll(kLetter);
      return next.at();
    }
    if (cursor.Is(kOther) || (cursor.character() == ' ' && next.Is(kOther))) {
      next.SkipAll(kOther);
      while (next.IsNewline()) next.Step();
      return next.at();
    }
  }
  size_t behind_newline = begin;
  for (Cursor blank = cursor; blank.Is(kSpace);) {
    const bool newline = blank.IsNewline();
    blank.Step();
    if (newline) behind_newline = blank.at();
  }
  return behind_newline > begin ? behind_newline : BlanksEnd(text, begin);
}

template <size_t (*kWordEnd)(absl::string_view, size_t)>
class WordPattern final : public Pattern {
 public:
  absl::Status Find(absl::string_view text, std::vector<Piece>& pieces) const override {
    for (size_t at = 0; at < text.size();) {
      const size_t end = kWordEnd(text, at);
      pieces.push_back({static_cast<uint32_t>(at), static_cast<uint32_t>(end), true});
      at = end;
    }
    return absl::OkStatus();
  }
};

template <int kMostDigits>
size_t Llama3End(absl::string_view text, size_t begin) {
  return Llama3WordEnd(text, begin, kMostDigits);
}

}  // namespace

std::unique_ptr<Pattern> KnownWordPattern(absl::string_view expression) {
  if (expression == kGpt2Words) return std::make_unique<WordPattern<Gpt2WordEnd>>();
  constexpr absl::string_view kLlama3 =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
      R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  if (expression == kLlama3) return std::make_unique<WordPattern<Llama3End<3>>>();
  constexpr absl::string_view kQwen2 =
      R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|)"
      R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";
  if (expression == kQwen2) return std::make_unique<WordPattern<Llama3End<1>>>();
  return nullptr;
}

}  // namespace muster::text
