#include "worker/text/oniguruma.h"

#include <cstdint>
#include <map>
#include <optional>
#include <set>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/ascii.h"
#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/status_macros.h"
#include "base/text.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

constexpr size_t kMaxExpressionBytes = 16 << 10;
constexpr int kMaxDepth = 50;
constexpr int64_t kMaxRepeat = 1000;
// The limit of nested repetitions, because ICU expands small ones, one inside another.
constexpr int64_t kMaxRepeatProduct = 1'000'000;

// The contents of ICU's brackets for Oniguruma's \w. Outside of brackets \w includes Latin-1's
// small digits (Oniguruma uses another table for Latin-1), inside of brackets it does not.
constexpr absl::string_view kWord =
    R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc}\x{B2}\x{B3}\x{B9}\x{BC}-\x{BE})";

// A user-perceived character (UAX #29), as in Oniguruma. ICU's own \X also joins the consonants of
// Indic conjuncts.
constexpr absl::string_view kCluster =
    R"((?-i:(?>\x{D}\x{A}|[\x{D}\x{A}\p{Grapheme_Cluster_Break=Control}])"
    R"(|\p{Grapheme_Cluster_Break=Prepend}*(?:)"
    R"(\p{Grapheme_Cluster_Break=L}*(?:\p{Grapheme_Cluster_Break=V}+)"
    R"(|\p{Grapheme_Cluster_Break=LV}\p{Grapheme_Cluster_Break=V}*)"
    R"(|\p{Grapheme_Cluster_Break=LVT})\p{Grapheme_Cluster_Break=T}*)"
    R"(|\p{Grapheme_Cluster_Break=L}+|\p{Grapheme_Cluster_Break=T}+)"
    R"(|\p{Regional_Indicator}{2})"
    R"(|\p{Extended_Pictographic}(?:\p{Grapheme_Cluster_Break=Extend}*\x{200D})"
    R"(\p{Extended_Pictographic})*)"
    R"(|[^\x{D}\x{A}\p{Grapheme_Cluster_Break=Control}]))"
    R"([\p{Grapheme_Cluster_Break=Extend}\x{200D}\p{Grapheme_Cluster_Break=SpacingMark}]*)))";
constexpr absl::string_view kWordInBrackets = R"(\p{Alphabetic}\p{M}\p{Nd}\p{Pc})";
constexpr absl::string_view kSpace = R"(\p{White_Space})";
constexpr absl::string_view kHexDigit = "0-9A-Fa-f";

// Names of [[:NAME:]] and \p{NAME} that ICU does not have, or that mean something else there, and
// the contents of brackets for them.
const std::map<absl::string_view, absl::string_view>& NamedSets() {
  static const auto* const sets = new std::map<absl::string_view, absl::string_view>{
      {"alnum", R"(\p{Alphabetic}\p{Nd})"},
      {"alpha", R"(\p{Alphabetic})"},
      {"any", R"(\x{0}-\x{10FFFF})"},
      {"ascii", R"(\x{0}-\x{7F})"},
      {"assigned", R"(\P{Cn})"},
      {"blank", R"(\p{Zs}\x{9})"},
      {"cntrl", R"(\p{Cc})"},
      {"digit", R"(\p{Nd})"},
      {"graph", R"(\p{L}\p{M}\p{N}\p{P}\p{S}\p{Cf}\p{Co})"},
      {"lower", R"(\p{Lowercase})"},
      {"print", R"(\p{L}\p{M}\p{N}\p{P}\p{S}\p{Cf}\p{Co}\p{Zs})"},
      {"punct", R"(\p{P}\p{S})"},
      {"space", kSpace},
      {"upper", R"(\p{Uppercase})"},
      {"word", kWordInBrackets},
      {"xdigit", kHexDigit},
  };
  return *sets;
}

std::string Set(bool negated, absl::string_view inside) {
  return absl::StrCat(negated ? "[^" : "[", inside, "]");
}

std::string Character(char32_t c) {
  if (c < 0x80 && absl::ascii_isalnum(static_cast<unsigned char>(c))) {
    return std::string(1, static_cast<char>(c));
  }
  return absl::StrFormat("\\x{%X}", static_cast<uint32_t>(c));
}

// Whether it is one of Unicode's general categories, in lower case: "l", "lu", ...
bool IsGeneralCategory(absl::string_view name) {
  static const auto* const names = new std::set<absl::string_view>{
      "c",  "cc", "cf", "cn", "co", "cs", "l",  "ll", "lm", "lo", "lt", "lu", "m",
      "mc", "me", "mn", "n",  "nd", "nl", "no", "p",  "pc", "pd", "pe", "pf", "pi",
      "po", "ps", "s",  "sc", "sk", "sm", "so", "z",  "zl", "zp", "zs"};
  return names->count(name) > 0;
}

// Whether it is a single "\p{NAME}" or "\P{NAME}".
bool IsOneProperty(absl::string_view inside) {
  return (absl::StartsWith(inside, "\\p{") || absl::StartsWith(inside, "\\P{")) &&
         inside.find('}') == inside.size() - 1;
}

// Whether the folding of some character has these two beside each other.
bool IsFolding(char first, char32_t second) {
  if (second >= 0x80) return true;
  const char pair[] = {absl::ascii_tolower(static_cast<unsigned char>(first)),
                       absl::ascii_tolower(static_cast<unsigned char>(second)), '\0'};
  for (const absl::string_view folding : {"ss", "st", "ff", "fi", "fl"}) {
    if (folding == pair) return true;
  }
  return false;
}

class Translator {
 public:
  explicit Translator(absl::string_view expression) : in_(expression) {}

  absl::StatusOr<IcuExpression> Run() {
    if (in_.size() > kMaxExpressionBytes) {
      return absl::InvalidArgumentError(absl::StrCat("an expression of ", in_.size(),
                                                     " bytes is longer than the ",
                                                     kMaxExpressionBytes, " allowed"));
    }
    while (at_ < in_.size()) MUSTER_RETURN_IF_ERROR(Next());
    CloseImplicit();
    if (!groups_.empty()) return Malformed("a parenthesis is not closed");
    return IcuExpression{std::move(out_), for_pcre2_};
  }

 private:
  static constexpr size_t kNone = std::string::npos;

  struct Group {
    size_t begin;   // in out_
    bool implicit;  // of an isolated option, which ends with the enclosing group
    bool dot_all;   // of the enclosing text
    bool extended;
    bool any_case;
  };

  // One element of a bracket expression: a character, or a set by the contents of its brackets.
  struct Item {
    std::optional<char32_t> character;
    std::string inside;
    bool negated = false;
  };

  static Item SetOf(bool negated, absl::string_view inside) {
    return {{}, std::string(inside), negated};
  }

  bool At(absl::string_view text) const { return absl::StartsWith(in_.substr(at_), text); }
  bool Take(absl::string_view text) {
    if (!At(text)) return false;
    at_ += text.size();
    return true;
  }

  absl::Status Malformed(absl::string_view why) const {
    return absl::InvalidArgumentError(
        absl::StrCat("at character ", CountCharacters(in_.substr(0, at_)) + 1, ": ", why));
  }
  absl::Status Unsupported(absl::string_view what) const {
    return absl::UnimplementedError(absl::StrCat(
        "at character ", CountCharacters(in_.substr(0, at_)) + 1, ": ", what, " is not supported"));
  }

  void Atom(absl::string_view text) {
    last_ = out_.size();
    absl::StrAppend(&out_, text);
  }
  void Literal(char32_t c) {
    // If case is ignored, ICU matches a sharp s with "ss" and a ligature with its letters.
    const bool behind_letter = last_ != kNone && last_ + 1 == out_.size();
    if (any_case_ && (c >= 0x80 || (behind_letter && IsFolding(out_[last_], c)))) {
      for_pcre2_ = false;
    }
    Atom(Character(c));
  }
  // Adds an expression that matches only a position, so that a repetition cannot split it.
  void Place(absl::string_view text) { Atom(absl::StrCat("(?:", text, ")")); }

  void CloseImplicit() {
    while (!groups_.empty() && groups_.back().implicit) Close();
  }
  void Close() {
    out_ += ')';
    last_ = groups_.back().begin;
    dot_all_ = groups_.back().dot_all;
    extended_ = groups_.back().extended;
    any_case_ = groups_.back().any_case;
    groups_.pop_back();
  }
  absl::Status Open(absl::string_view text, bool implicit) {
    if (groups_.size() >= kMaxDepth) return Unsupported("deeper nesting");
    groups_.push_back({out_.size(), implicit, dot_all_, extended_, any_case_});
    absl::StrAppend(&out_, text);
    last_ = kNone;
    return absl::OkStatus();
  }

  absl::Status Next() {
    const char c = in_[at_];
    switch (c) {
      case '\\':
        ++at_;
        return Escape();
      case '[': {
        ++at_;
        MUSTER_ASSIGN_OR_RETURN(const Item set, Bracket(0));
        Atom(Set(set.negated, set.inside));
        return absl::OkStatus();
      }
      case '(':
        ++at_;
        return Parenthesis();
      case ')':
        CloseImplicit();
        if (groups_.empty()) return Malformed("a parenthesis is closed that was not opened");
        ++at_;
        Close();
        return absl::OkStatus();
      case '|':
        ++at_;
        out_ += '|';
        last_ = kNone;
        return absl::OkStatus();
      case '.':
        ++at_;
        Atom(dot_all_ ? R"([\x{0}-\x{10FFFF}])" : R"([^\x{A}])");
        return absl::OkStatus();
      case '^':
        ++at_;
        Place(R"(\A|(?<=\x{A})(?!\z))");
        return absl::OkStatus();
      case '$':
        ++at_;
        Place(R"((?=\x{A}|\z))");
        return absl::OkStatus();
      case '?':
      case '*':
      case '+':
        return Repeat(std::string(1, c), 1);
      case '{':
        if (int64_t low = 0, high = 0; Interval(low, high)) return RepeatInterval(low, high);
        break;
      default:
        break;
    }
    if (extended_ && SkipExtended()) return absl::OkStatus();
    Literal(NextCharacter(in_, at_));
    return absl::OkStatus();
  }

  bool SkipExtended() {
    if (absl::ascii_isspace(static_cast<unsigned char>(in_[at_]))) {
      ++at_;
      return true;
    }
    if (in_[at_] != '#') return false;
    at_ = std::min(in_.find('\n', at_), in_.size());
    return true;
  }

  // Wraps the last element, so that another operator can follow.
  void WrapLast() {
    out_.insert(last_, "(?:");
    out_ += ')';
    repeated_at_ = kNone;
  }

  absl::Status Repeat(absl::string_view op, size_t length) {
    if (last_ == kNone) return Malformed("there is nothing to repeat");
    at_ += length;
    if (repeated_at_ == out_.size()) WrapLast();
    absl::StrAppend(&out_, op);
    if (length == 1 && At("?")) {
      ++at_;
      out_ += '?';
    } else if (length == 1 && At("+")) {
      ++at_;
      out_ += '+';
    }
    repeated_at_ = out_.size();
    return absl::OkStatus();
  }

  // Reads `{2}`, `{2,}`, `{,3}`, `{2,3}` at at_; high is -1 for no limit. Returns false for text
  // that is not an interval.
  bool Interval(int64_t& low, int64_t& high) const {
    size_t at = at_ + 1;
    const auto number = [&](int64_t& value) {
      const size_t begin = at;
      value = 0;
      while (at < in_.size() && absl::ascii_isdigit(static_cast<unsigned char>(in_[at])) &&
             at - begin < 9) {
        value = value * 10 + (in_[at++] - '0');
      }
      return at > begin;
    };
    const bool has_low = number(low);
    if (at >= in_.size()) return false;
    if (in_[at] == ',') {
      ++at;
      if (!number(high)) {
        if (!has_low) return false;
        high = -1;
      }
    } else {
      if (!has_low) return false;
      high = low;
    }
    return at < in_.size() && in_[at] == '}';
  }

  absl::Status RepeatInterval(int64_t low, int64_t high) {
    if (last_ == kNone) return Malformed("there is nothing to repeat");
    if (high >= 0 && low > high) return Malformed("the bounds of a repetition are reversed");
    const int64_t most = std::max(low, high);
    product_ *= std::max<int64_t>(most, 1);
    if (most > kMaxRepeat || product_ > kMaxRepeatProduct) {
      return Unsupported(absl::StrCat("a repetition of more than ", kMaxRepeat));
    }
    at_ = in_.find('}', at_) + 1;
    if (repeated_at_ == out_.size()) WrapLast();
    if (low == high) {
      absl::StrAppend(&out_, "{", low, "}");
      // "{2}?" makes it optional, not lazy.
      if (Take("?")) {
        WrapLast();
        out_ += '?';
      }
    } else {
      absl::StrAppend(&out_, "{", low, ",");
      if (high >= 0) absl::StrAppend(&out_, high);
      out_ += '}';
      if (Take("?")) out_ += '?';
    }
    // A '+' after it is another repetition, not "possessive".
    repeated_at_ = out_.size();
    return absl::OkStatus();
  }

  absl::Status Parenthesis() {
    if (!Take("?")) return Open("(?:", false);
    if (Take("#")) {
      const size_t end = in_.find(')', at_);
      if (end == absl::string_view::npos) return Malformed("a comment is not closed");
      at_ = end + 1;
      return absl::OkStatus();
    }
    for (const absl::string_view kind : {":", "=", "!", ">", "<=", "<!"}) {
      if (!Take(kind)) continue;
      // Compiled patterns of PCRE2 10.42 backtrack into some that are repeated.
      if (kind == ">") for_pcre2_ = false;
      return Open(absl::StrCat("(?", kind), false);
    }
    if (Take("<") || Take("'")) {
      const char end = in_[at_ - 1] == '<' ? '>' : '\'';
      const size_t close = in_.find(end, at_);
      if (close == absl::string_view::npos) return Malformed("the name of a group has no end");
      at_ = close + 1;
      return Open("(?:", false);
    }
    return Options();
  }

  absl::Status Options() {
    const bool dot_all = dot_all_;
    const bool extended = extended_;
    const bool any_case = any_case_;
    std::string on;
    std::string off;
    bool negative = false;
    for (; at_ < in_.size(); ++at_) {
      const char c = in_[at_];
      if (c == '-') {
        negative = true;
      } else if (c == 'i') {
        (negative ? off : on) = "i";
        any_case_ = !negative;
      } else if (c == 'm') {
        dot_all_ = !negative;
      } else if (c == 'x') {
        extended_ = !negative;
      } else {
        break;
      }
    }
    const bool isolated = At(")");
    if (!isolated && !At(":")) {
      return Unsupported(
          absl::StrCat("the group \"(?",
                       Printable(in_.substr(at_, std::min<size_t>(in_.size() - at_, 1))), "\""));
    }
    ++at_;
    MUSTER_RETURN_IF_ERROR(
        Open(absl::StrCat("(?", on, off.empty() ? "" : "-", off, ":"), isolated));
    groups_.back().dot_all = dot_all;
    groups_.back().extended = extended;
    groups_.back().any_case = any_case;
    return absl::OkStatus();
  }

  // Reads what follows a backslash, outside and inside of brackets.
  absl::StatusOr<Item> CommonEscape(bool in_brackets) {
    if (at_ >= in_.size()) return Malformed("a backslash stands at the end");
    const char32_t c = NextCharacter(in_, at_);
    switch (c) {
      case 't':
        return Item{U'\t', ""};
      case 'n':
        return Item{U'\n', ""};
      case 'r':
        return Item{U'\r', ""};
      case 'f':
        return Item{U'\f', ""};
      case 'v':
        return Item{U'\v', ""};
      case 'a':
        return Item{U'\a', ""};
      case 'e':
        return Item{U'\x1B', ""};
      case 's':
      case 'S':
        return SetOf(c == 'S', kSpace);
      case 'w':
      case 'W':
        return SetOf(c == 'W', in_brackets ? kWordInBrackets : kWord);
      case 'd':
      case 'D':
        return SetOf(c == 'D', R"(\p{Nd})");
      case 'h':
      case 'H':
        return SetOf(c == 'H', kHexDigit);
      case 'p':
      case 'P':
        return Property(c == 'P', in_brackets);
      case 'x':
      case 'u':
      case '0':
        return Number(c);
      default:
        break;
    }
    if (c < 0x80 && absl::ascii_isalnum(static_cast<unsigned char>(c))) {
      return Unsupported(absl::StrCat("\\", std::string(1, static_cast<char>(c))));
    }
    return Item{c, ""};
  }

  absl::StatusOr<Item> Number(char32_t kind) {
    const bool braces = kind == 'x' && Take("{");
    const int base = kind == '0' ? 8 : 16;
    const size_t most = braces ? 8 : kind == 'u' ? 4 : 2;
    const size_t begin = at_;
    uint32_t value = 0;
    while (at_ < in_.size() && at_ - begin < most) {
      const auto c = static_cast<unsigned char>(in_[at_]);
      if (base == 8 ? c < '0' || c > '7' : !absl::ascii_isxdigit(c)) break;
      value = value * base + (absl::ascii_isdigit(c) ? c - '0' : absl::ascii_tolower(c) - 'a' + 10);
      ++at_;
    }
    if (kind == 'u' && at_ - begin != 4) return Malformed("\\u needs four digits");
    if (at_ == begin && kind != '0') return Malformed("\\x needs digits");
    if (braces && !Take("}")) return Malformed("\\x{ is not closed");
    if (value > 0x10FFFF || (value >= 0xD800 && value < 0xE000)) {
      return Malformed("a number that is no character");
    }
    return Item{static_cast<char32_t>(value), ""};
  }

  absl::StatusOr<Item> Property(bool negated, bool in_brackets) {
    if (!Take("{")) return Malformed("\\p needs a name in braces");
    if (Take("^")) negated = !negated;
    const size_t close = in_.find('}', at_);
    if (close == absl::string_view::npos) return Malformed("the name of a property has no end");
    const absl::string_view name = in_.substr(at_, close - at_);
    std::string plain;
    for (const char c : name) {
      if (absl::ascii_isalnum(static_cast<unsigned char>(c))) {
        plain += absl::ascii_tolower(static_cast<unsigned char>(c));
      } else if (c != ' ' && c != '_' && c != '-') {
        return Unsupported(absl::StrCat("the property \"", Printable(name), "\""));
      }
    }
    at_ = close + 1;
    if (plain == "word" && !in_brackets) return SetOf(negated, kWord);
    // As a property, "punct" is ICU's: the symbols are in [[:punct:]] only.
    const auto set = plain == "punct" ? NamedSets().end() : NamedSets().find(plain);
    if (set != NamedSets().end()) return SetOf(negated, set->second);
    if (plain.empty()) return Malformed("\\p needs a name in braces");
    // PCRE2's scripts are those of Script_Extensions.
    if (!IsGeneralCategory(plain)) for_pcre2_ = false;
    return SetOf(negated, absl::StrCat("\\p{", name, "}"));
  }

  absl::Status Escape() {
    if (at_ >= in_.size()) return Malformed("a backslash stands at the end");
    switch (in_[at_]) {
      case 'A':
      case 'z':
        Atom(in_[at_++] == 'A' ? R"((?:\A))" : R"((?:\z))");
        return absl::OkStatus();
      case 'Z':
        ++at_;
        Place(R"((?=\x{A}?\z))");
        return absl::OkStatus();
      case 'b':
      case 'B': {
        const std::string word = Set(false, kWord);
        const bool boundary = in_[at_++] == 'b';
        Place(absl::StrCat("(?<=", word, boundary ? ")(?!" : ")(?=", word, ")|(?<!", word,
                           boundary ? ")(?=" : ")(?!", word, ")"));
        return absl::OkStatus();
      }
      case 'R':
        ++at_;
        Atom(R"((?>\x{D}\x{A}|[\x{A}-\x{D}\x{85}\x{2028}\x{2029}]))");
        return absl::OkStatus();
      case 'N':
        ++at_;
        Atom(R"([^\x{A}])");
        return absl::OkStatus();
      case 'O':
        ++at_;
        Atom(R"([\x{0}-\x{10FFFF}])");
        return absl::OkStatus();
      case 'X':
        ++at_;
        Atom(kCluster);
        for_pcre2_ = false;
        return absl::OkStatus();
      default:
        break;
    }
    const bool keeps_case = any_case_ && absl::ascii_tolower(in_[at_]) == 'p';
    MUSTER_ASSIGN_OR_RETURN(const Item item, CommonEscape(/*in_brackets=*/false));
    if (item.character.has_value()) {
      Literal(*item.character);
      return absl::OkStatus();
    }
    const std::string set = Set(item.negated, item.inside);
    // Among properties, "(?i)" changes only those in brackets.
    Atom(keeps_case ? absl::StrCat("(?-i:", set, ")") : set);
    return absl::OkStatus();
  }

  // Reads a bracket expression after its '['.
  absl::StatusOr<Item> Bracket(int depth) {
    if (depth > kMaxDepth) return Unsupported("deeper nesting of brackets");
    const bool negated = Take("^");
    std::vector<std::string> parts = {""};  // operands of an intersection
    for (bool first = true;; first = false) {
      if (at_ >= in_.size()) return Malformed("a bracket is not closed");
      // A bracket that closes at once is text if there is another one.
      if (At("]") && !(first && in_.find(']', at_ + 1) != absl::string_view::npos)) break;
      if (Take("&&")) {
        parts.emplace_back();
        continue;
      }
      MUSTER_ASSIGN_OR_RETURN(const Item item, BracketItem(depth));
      if (!item.character.has_value()) {
        parts.back() += Inside(item);
        continue;
      }
      if (any_case_ && *item.character >= 0x80) for_pcre2_ = false;
      if (!At("-") || At("-]") || At("-&&") || at_ + 1 >= in_.size()) {
        parts.back() += Character(*item.character);
        continue;
      }
      ++at_;
      MUSTER_ASSIGN_OR_RETURN(const Item last, BracketItem(depth));
      if (!last.character.has_value()) {
        absl::StrAppend(&parts.back(), Character(*item.character), "\\x{2D}", Inside(last));
        continue;
      }
      if (any_case_ && *last.character >= 0x80) for_pcre2_ = false;
      if (*last.character < *item.character) return Malformed("a range is reversed");
      absl::StrAppend(&parts.back(), Character(*item.character), "-", Character(*last.character));
    }
    ++at_;
    std::string inside;
    for (const std::string& part : parts) {
      if (part.empty()) return Unsupported("an empty bracket expression");
      if (parts.size() == 1) {
        inside = part;
      } else {
        absl::StrAppend(&inside, inside.empty() ? "" : "&&", "[", part, "]");
      }
    }
    if (parts.size() > 1) {
      inside = absl::StrCat("[", inside, "]");
      for_pcre2_ = false;
    }
    return SetOf(negated, inside);
  }

  // Returns a set as part of another one's contents.
  std::string Inside(const Item& item) {
    // PCRE2 ignores the other cases that a property in brackets has under "(?i)".
    if (any_case_) for_pcre2_ = false;
    if (!item.negated) return item.inside;
    if (IsOneProperty(item.inside)) {
      return absl::StrCat(item.inside[1] == 'p' ? "\\P" : "\\p", item.inside.substr(2));
    }
    for_pcre2_ = false;
    return Set(true, item.inside);
  }

  absl::StatusOr<Item> BracketItem(int depth) {
    if (Take("[:")) {
      const size_t end = in_.find(":]", at_);
      const bool named = end != absl::string_view::npos && end - at_ <= 10;
      if (!named) return Malformed("[: is not closed");
      const bool negated = Take("^");
      const auto set = NamedSets().find(in_.substr(at_, end - at_));
      if (set == NamedSets().end()) {
        return Unsupported(absl::StrCat("[:", Printable(in_.substr(at_, end - at_)), ":]"));
      }
      at_ = end + 2;
      return SetOf(negated, set->second);
    }
    if (Take("[")) return Bracket(depth + 1);
    if (!Take("\\")) return Item{NextCharacter(in_, at_), ""};
    if (Take("b")) return Item{U'\b', ""};
    return CommonEscape(/*in_brackets=*/true);
  }

  const absl::string_view in_;
  size_t at_ = 0;
  std::string out_;
  size_t last_ = kNone;         // where the last atom begins in out_
  size_t repeated_at_ = kNone;  // the size of out_ directly after an operator
  std::vector<Group> groups_;
  bool dot_all_ = false;
  bool extended_ = false;
  bool any_case_ = false;
  int64_t product_ = 1;
  bool for_pcre2_ = true;
};

}  // namespace

absl::StatusOr<IcuExpression> IcuFromOniguruma(absl::string_view expression) {
  return Translator(expression).Run();
}

}  // namespace muster::text
