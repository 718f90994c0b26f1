#include "worker/text/pattern.h"

#include <unicode/uregex.h>
#include <unicode/utypes.h>

#include <utility>

#include "absl/base/call_once.h"
#include "absl/base/thread_annotations.h"
#include "absl/strings/str_cat.h"
#include "base/mutex.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/oniguruma.h"
#include "worker/text/pcre2_pattern.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

// The limit of one match, in units of 10,000 steps: about 0.1 s.
constexpr int32_t kMatchSteps = 1'000;
constexpr int32_t kMatchStackBytes = 64 << 20;

class LiteralPattern final : public Pattern {
 public:
  explicit LiteralPattern(std::string text) : text_(std::move(text)) {}

  absl::Status Find(absl::string_view text, std::vector<Piece>& pieces) const override {
    const auto size = static_cast<uint32_t>(text.size());
    if (text_.empty()) {
      // An empty pattern matches between all characters.
      for (size_t at = 0; at < text.size();) {
        const auto begin = static_cast<uint32_t>(at);
        pieces.push_back({begin, begin, true});
        NextCharacter(text, at);
        pieces.push_back({begin, static_cast<uint32_t>(at), false});
      }
      if (size > 0) pieces.push_back({size, size, true});
      return absl::OkStatus();
    }
    uint32_t done = 0;
    while (done < size) {
      const size_t found = text.find(text_, done);
      if (found == absl::string_view::npos) break;
      const auto begin = static_cast<uint32_t>(found);
      if (done < begin) pieces.push_back({done, begin, false});
      done = begin + static_cast<uint32_t>(text_.size());
      pieces.push_back({begin, done, true});
    }
    if (done < size) pieces.push_back({done, size, false});
    return absl::OkStatus();
  }

 private:
  const std::string text_;
};

// A compiled expression with the text on which it runs: for one thread at a time.
class Matcher {
 public:
  explicit Matcher(URegularExpression* expression) : expression_(expression) {}
  ~Matcher() { uregex_close(expression_); }
  Matcher(const Matcher&) = delete;
  Matcher& operator=(const Matcher&) = delete;

  std::unique_ptr<Matcher> Clone() const {
    UErrorCode error = U_ZERO_ERROR;
    URegularExpression* const copy = uregex_clone(expression_, &error);
    // Limits are not cloned.
    uregex_setTimeLimit(copy, kMatchSteps, &error);
    uregex_setStackLimit(copy, kMatchStackBytes, &error);
    return U_FAILURE(error) ? nullptr : std::make_unique<Matcher>(copy);
  }

  absl::Status Find(absl::string_view text, std::vector<Piece>& pieces) {
    SetUnits(text);
    UErrorCode error = U_ZERO_ERROR;
    const auto length = static_cast<int32_t>(units_.size());
    uregex_setText(expression_, units_.data(), length, &error);
    uint32_t done = 0;
    int32_t at = 0;
    int32_t last_end = -1;
    while (at <= length && uregex_find(expression_, at, &error) && U_SUCCESS(error)) {
      const int32_t begin = uregex_start(expression_, 0, &error);
      const int32_t end = uregex_end(expression_, 0, &error);
      if (begin == end && end == last_end) {
        // The next position is the next character, which may have two units.
        at = end + 1;
        if (at < length && bytes_[at] == bytes_[at - 1]) ++at;
        continue;
      }
      if (done < bytes_[begin]) pieces.push_back({done, bytes_[begin], false});
      done = bytes_[end];
      pieces.push_back({bytes_[begin], done, true});
      at = last_end = end;
    }
    if (U_FAILURE(error)) {
      return absl::ResourceExhaustedError(
          absl::StrCat("a regular expression gave up on a text of ", text.size(), " bytes (",
                       u_errorName(error), "): it needs too many steps or too much memory"));
    }
    if (done < text.size()) pieces.push_back({done, static_cast<uint32_t>(text.size()), false});
    return absl::OkStatus();
  }

  // Whether the memory is worth keeping: that of the largest texts is not.
  bool WorthKeeping() const { return units_.capacity() < (size_t{4} << 20); }

 private:
  void SetUnits(absl::string_view text) {
    units_.clear();
    bytes_.clear();
    for (size_t at = 0; at < text.size();) {
      const auto begin = static_cast<uint32_t>(at);
      const char32_t c = NextCharacter(text, at);
      bytes_.push_back(begin);
      if (c < 0x10000) {
        units_ += static_cast<char16_t>(c);
        continue;
      }
      units_ += static_cast<char16_t>(0xD7C0 + (c >> 10));
      units_ += static_cast<char16_t>(0xDC00 + (c & 0x3FF));
      bytes_.push_back(begin);
    }
    bytes_.push_back(static_cast<uint32_t>(text.size()));
  }

  URegularExpression* const expression_;
  std::u16string units_;
  // Where the character of each unit begins, and the end.
  std::vector<uint32_t> bytes_;
};

class IcuPattern final : public Pattern {
 public:
  explicit IcuPattern(std::unique_ptr<Matcher> matcher) : original_(std::move(matcher)) {}

  absl::Status Find(absl::string_view text, std::vector<Piece>& pieces) const override {
    if (text.empty()) return absl::OkStatus();
    std::unique_ptr<Matcher> matcher = Take();
    if (matcher == nullptr) return absl::ResourceExhaustedError("no memory for a match");
    const absl::Status status = matcher->Find(text, pieces);
    if (matcher->WorthKeeping()) Return(std::move(matcher));
    return status;
  }

 private:
  std::unique_ptr<Matcher> Take() const {
    {
      MutexLock lock(&mu_);
      if (!idle_.empty()) {
        std::unique_ptr<Matcher> matcher = std::move(idle_.back());
        idle_.pop_back();
        return matcher;
      }
    }
    return original_->Clone();
  }
  void Return(std::unique_ptr<Matcher> matcher) const {
    MutexLock lock(&mu_);
    idle_.push_back(std::move(matcher));
  }

  const std::unique_ptr<Matcher> original_;  // never run, only copied
  mutable Mutex mu_;
  mutable std::vector<std::unique_ptr<Matcher>> idle_ ABSL_GUARDED_BY(mu_);
};

std::u16string Utf16(absl::string_view text) {
  std::u16string units;
  for (size_t at = 0; at < text.size();) {
    const char32_t c = NextCharacter(text, at);
    if (c < 0x10000) {
      units += static_cast<char16_t>(c);
    } else {
      units += static_cast<char16_t>(0xD7C0 + (c >> 10));
      units += static_cast<char16_t>(0xDC00 + (c & 0x3FF));
    }
  }
  return units;
}

absl::Status Refused(absl::string_view expression, const absl::Status& why) {
  return absl::Status(why.code(), absl::StrCat("the regular expression \"", Printable(expression),
                                               "\" cannot be used: ", why.message()));
}

absl::StatusOr<IcuExpression> Translated(absl::string_view expression) {
  if (!IsValidUtf8(expression)) {
    return Refused(expression, absl::InvalidArgumentError("it is not UTF-8"));
  }
  absl::StatusOr<IcuExpression> translated = IcuFromOniguruma(expression);
  if (!translated.ok()) return Refused(expression, translated.status());
  return translated;
}

absl::StatusOr<std::unique_ptr<Pattern>> MakeIcuPattern(absl::string_view expression,
                                                        absl::string_view translated) {
  const std::u16string units = Utf16(translated);
  UErrorCode error = U_ZERO_ERROR;
  UParseError where;
  URegularExpression* const compiled =
      uregex_open(units.data(), static_cast<int32_t>(units.size()), 0, &where, &error);
  if (U_FAILURE(error)) {
    uregex_close(compiled);
    return Refused(expression,
                   absl::InvalidArgumentError(absl::StrCat("ICU says ", u_errorName(error))));
  }
  return std::make_unique<IcuPattern>(std::make_unique<Matcher>(compiled));
}

// PCRE2's pattern, and ICU's, which is made when it is first needed, for texts with characters that
// PCRE2 does not know.
class Pcre2OrIcu final : public Pattern {
 public:
  Pcre2OrIcu(std::unique_ptr<Pattern> by_pcre2, absl::string_view expression,
             absl::string_view translated)
      : by_pcre2_(std::move(by_pcre2)), expression_(expression), translated_(translated) {}

  absl::Status Find(absl::string_view text, std::vector<Piece>& pieces) const override {
    if (!HasNewerThanPcre2(text)) return by_pcre2_->Find(text, pieces);
    absl::call_once(once_, [this] { by_icu_ = MakeIcuPattern(expression_, translated_); });
    MUSTER_RETURN_IF_ERROR(by_icu_.status());
    return (*by_icu_)->Find(text, pieces);
  }

 private:
  const std::unique_ptr<Pattern> by_pcre2_;
  const std::string expression_;
  const std::string translated_;
  mutable absl::once_flag once_;
  mutable absl::StatusOr<std::unique_ptr<Pattern>> by_icu_;
};

}  // namespace

std::unique_ptr<Pattern> Pattern::Literal(std::string text) {
  return std::make_unique<LiteralPattern>(std::move(text));
}

absl::StatusOr<std::unique_ptr<Pattern>> Pattern::Regex(absl::string_view expression) {
  MUSTER_ASSIGN_OR_RETURN(const IcuExpression translated, Translated(expression));
  if (translated.for_pcre2) {
    if (auto pattern = MakePcre2Pattern(translated.text); pattern != nullptr) {
      return std::make_unique<Pcre2OrIcu>(std::move(pattern), expression, translated.text);
    }
  }
  return MakeIcuPattern(expression, translated.text);
}

absl::StatusOr<std::unique_ptr<Pattern>> Pattern::IcuRegex(absl::string_view expression) {
  MUSTER_ASSIGN_OR_RETURN(const IcuExpression translated, Translated(expression));
  return MakeIcuPattern(expression, translated.text);
}

absl::StatusOr<std::unique_ptr<Pattern>> MakePattern(Settings& settings) {
  static const auto* const kNothing = new nlohmann::json;
  const nlohmann::json* const field = settings.Find("pattern");
  Settings pattern(field == nullptr ? *kNothing : *field, settings.PathOf("pattern"));
  const std::optional<std::string> text = pattern.MaybeString("String");
  const std::optional<std::string> expression = pattern.MaybeString("Regex");
  MUSTER_RETURN_IF_ERROR(pattern.Finish());
  if (text.has_value() == expression.has_value()) {
    return settings.Wrong("pattern", "must have either String or Regex");
  }
  if (text.has_value()) return Pattern::Literal(*text);
  absl::StatusOr<std::unique_ptr<Pattern>> made = Pattern::Regex(*expression);
  if (made.ok()) return made;
  return absl::Status(made.status().code(),
                      absl::StrCat(settings.PathOf("pattern"), ": ", made.status().message()));
}

}  // namespace muster::text
