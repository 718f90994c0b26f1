#include "worker/text/pattern.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unicode/uchar.h>
#include <unicode/uset.h>

#include <cstdlib>
#include <iterator>
#include <random>
#include <set>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/escaping.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/text.h"
#include "worker/text/oniguruma.h"
#include "worker/text/pcre2_pattern.h"
#include "worker/text/unicode.h"

namespace muster::text {
namespace {

using testing::HasSubstr;

// Returns the parts into which a text is divided, without empty ones.
std::vector<std::string> Cut(const Pattern& pattern, absl::string_view text) {
  std::vector<Piece> pieces;
  EXPECT_TRUE(pattern.Find(text, pieces).ok());
  std::vector<std::string> parts;
  for (const Piece& piece : pieces) {
    if (piece.end > piece.begin) {
      parts.emplace_back(text.substr(piece.begin, piece.end - piece.begin));
    }
  }
  return parts;
}

struct Case {
  const char* expression;
  std::string text;
  std::vector<std::string> parts;
};

// The results of the tokenizers library (0.23.3), with Oniguruma.
TEST(Pattern, Expressions_CutAsOnigurumaDoes) {
  const std::vector<Case> cases = {
      {R"re(^)re",
       "a\x0A"
       "b\x0A",
       {"a\x0A", "b\x0A"}},
      {R"re($)re",
       "a\x0A"
       "b\x0A",
       {"a",
        "\x0A"
        "b",
        "\x0A"}},
      {R"re(.+)re",
       "a\x0A"
       "b\xC2\x85"
       "c",
       {"a", "\x0A",
        "b\xC2\x85"
        "c"}},
      {R"re(a{2}?)re", "aaaa", {"aa", "aa"}},
      {R"re(a{,2})re", "aaaaa", {"aa", "aa", "a"}},
      {R"re(a{1,2}+)re", "aaaaa", {"aaaaa"}},
      {R"re(\h+)re", "xyz1fG", {"xyz", "1f", "G"}},
      {R"re((?i:ss))re", "SS \xC5\xBFs", {"SS", " ", "\xC5\xBFs"}},
      // Unlike in brackets, a property keeps its case.
      {R"re((?i)\p{Lu}+)re", "abCD", {"ab", "CD"}},
      {R"re((?i)[\p{Lu}]+)re", "abCD1", {"abCD", "1"}},
      {R"re((?i)\p{Lu}{2})re", "abCD", {"ab", "CD"}},
      {R"re((?i:xx|y\P{Lu}))re", "YaXXbYBya", {"Ya", "XX", "bYB", "ya"}},
      {R"re((?i:x(?-i)X|y)\P{Lu})re", "YaXXbxa", {"Ya", "XXb", "xa"}},
      {R"re(\bx)re", "x xx\xCC\x81x", {"x", " ", "x", "x\xCC\x81x"}},
      {R"re(x*)re", "axb", {"a", "x", "b"}},
      {R"re([[:punct:]]+)re", "a$+a.b", {"a", "$+", "a", ".", "b"}},
      {R"re([[:punct:]]+)re", "a\u00A9\u20AC.b", {"a", "\u00A9\u20AC.", "b"}},
      {R"re(\p{Punct}+)re", "a$\u00A9.b", {"a$\u00A9", ".", "b"}},
      {R"re(\p{^L}+)re", "ab12", {"ab", "12"}},
      {R"re([a-z&&[^b]]+)re", "abc", {"a", "b", "c"}},
      {R"re((?m).+)re",
       "a\x0A"
       "b",
       {"a\x0A"
        "b"}},
      {R"re(\Z)re", "a\x0A", {"a", "\x0A"}},
      {R"re(\s+)re",
       "a\x0B\xC2\x85\xC2\xA0\xE2\x80\xA8"
       "b\x1C"
       "c",
       {"a", "\x0B\xC2\x85\xC2\xA0\xE2\x80\xA8",
        "b\x1C"
        "c"}},
      {R"re(\w+)re",
       "a_1\xC2\xB2\xE2\x80\x8D\xCC\x81-b",
       {"a_1\xC2\xB2", "\xE2\x80\x8D", "\xCC\x81", "-", "b"}},
      {R"re(\W+)re",
       "a_1\xC2\xB2\xE2\x80\x8D\xCC\x81-b",
       {"a_1\xC2\xB2", "\xE2\x80\x8D", "\xCC\x81", "-", "b"}},
      // In brackets, \w does not include small digits.
      {R"re([\w]+)re", "m\xC2\xB2", {"m", "\xC2\xB2"}},
      {R"re([[:word:]]+)re", "m\xC2\xB2", {"m", "\xC2\xB2"}},
      {R"re([\p{Word}]+)re", "m\xC2\xB2", {"m", "\xC2\xB2"}},
      {R"re(\p{Word}+)re", "m\xC2\xB2", {"m\xC2\xB2"}},
      {R"re([^\w\s]+)re", "m\xC2\xB2, \xC2\xBD", {"m", "\xC2\xB2,", " ", "\xC2\xBD"}},
      {R"re(\d+)re",
       "1\xD9\xA3\xC2\xB2"
       "a",
       {"1\xD9\xA3",
        "\xC2\xB2"
        "a"}},
      {R"re(\R)re",
       "a\x0D\x0A"
       "b\xE2\x80\xA8"
       "c",
       {"a", "\x0D\x0A", "b", "\xE2\x80\xA8", "c"}},
      {R"re(\X)re", "e\xCC\x81x", {"e\xCC\x81", "x"}},
      {R"re([^\s\p{L}]+)re", "ab 12,", {"ab ", "12,"}},
      {R"re((?<=a)b)re", "abcb", {"a", "b", "cb"}},
      {R"re((?<!a)b)re", "abcb", {"abc", "b"}},
      {R"re((?>a+)b)re", "aab", {"aab"}},
      {R"re(é+)re",
       "a\xC3\xA9\xC3\xA9"
       "b",
       {"a", "\xC3\xA9\xC3\xA9", "b"}},
      {R"re([é-ü])re",
       "a\xC3\xAA"
       "b",
       {"a", "\xC3\xAA", "b"}},
      {R"re(\x{4E2D})re",
       "a\xE4\xB8\xAD"
       "b",
       {"a", "\xE4\xB8\xAD", "b"}},
      {R"re((?i)É)re", "a\xC3\xA9\xC3\x89", {"a", "\xC3\xA9", "\xC3\x89"}},
      {R"re([\d\-x]+)re", "1-x_", {"1-x", "_"}},
      {R"re(a|b|)re", "xaby", {"x", "a", "b", "y"}},
      {R"re(𝒜+)re",
       "a\xF0\x9D\x92\x9C\xF0\x9D\x92\x9C"
       "b",
       {"a", "\xF0\x9D\x92\x9C\xF0\x9D\x92\x9C", "b"}},
      {R"re(b*)re",
       "\xF0\x9D\x92\x9C"
       "b\xF0\x9D\x92\x9C",
       {"\xF0\x9D\x92\x9C", "b", "\xF0\x9D\x92\x9C"}},
      {R"re((?i)k)re", "kK\xE2\x84\xAA", {"k", "K", "\xE2\x84\xAA"}},
      {R"re(\p{Han}+)re",
       "a\xE4\xB8\xAD\xE6\x96\x87"
       "b",
       {"a", "\xE4\xB8\xAD\xE6\x96\x87", "b"}},
      {R"re(\p{Lu}\p{Ll}+)re", "aAbc", {"a", "Abc"}},
      {R"re([\p{Lu}\p{M}]+)re",
       "A\xCC\x81"
       "b",
       {"A\xCC\x81", "b"}},
      {R"re(\S+)re",
       "a b\xE3\x80\x80"
       "c",
       {"a", " ", "b", "\xE3\x80\x80", "c"}},
      {R"re(\p{Alnum}+)re", "a1\xD9\xA1-", {"a1\xD9\xA1", "-"}},
      {R"re( ?[^\s\p{L}\p{N}]+[\r\n]*)re", " !!\x0A\x0Ax", {" !!\x0A\x0A", "x"}},
      {R"re((?i:'s|'t|'re|'ve|'m|'ll|'d))re",
       "a'S b'LL c'\xC5\xBF",
       {"a", "'S", " b", "'LL", " c", "'\xC5\xBF"}},
      {R"re(\X)re",
       "\xE0\xA4\x95\xE0\xA5\x8D\xE0\xA4\xB7\xE0\xA4\xBF\x20\xE0\xA4\xA8\xE0\xA4\xAE\xE0\xA4\xB8"
       "\xE0\xA5\x8D\xE0\xA4\xA4\xE0\xA5\x87",
       {"\xE0\xA4\x95\xE0\xA5\x8D", "\xE0\xA4\xB7\xE0\xA4\xBF", "\x20", "\xE0\xA4\xA8",
        "\xE0\xA4\xAE", "\xE0\xA4\xB8\xE0\xA5\x8D", "\xE0\xA4\xA4\xE0\xA5\x87"}},
      {R"re(\X)re",
       "\x0D\x0A\x61\x0A\xCC\x81\xCC\x81",
       {"\x0D\x0A", "\x61", "\x0A", "\xCC\x81\xCC\x81"}},
      {R"re(\X)re",
       "\xEA\xB0\x81\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8\xE1\x84\x80",
       {"\xEA\xB0\x81", "\xE1\x84\x80\xE1\x85\xA1\xE1\x86\xA8", "\xE1\x84\x80"}},
      {R"re(\X)re",
       "\xF0\x9F\x87\xA9\xF0\x9F\x87\xAA\xF0\x9F\x87\xAB",
       {"\xF0\x9F\x87\xA9\xF0\x9F\x87\xAA", "\xF0\x9F\x87\xAB"}},
      {R"re(\X)re",
       "\xF0\x9F\x91\xA8\xE2\x80\x8D\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7\x61\xE2\x80\x8D"
       "\xF0\x9F\x91\x8D\xF0\x9F\x8F\xBD",
       {"\xF0\x9F\x91\xA8\xE2\x80\x8D\xF0\x9F\x91\xA9\xE2\x80\x8D\xF0\x9F\x91\xA7",
        "\x61\xE2\x80\x8D", "\xF0\x9F\x91\x8D\xF0\x9F\x8F\xBD"}},
      {R"re(\X)re", "\xD8\x80\x61\xD8\x80\x0A", {"\xD8\x80\x61", "\xD8\x80", "\x0A"}},
      {R"re(\X)re",
       "\x65\xCC\x81\xE2\x80\x8D\xC2\xAD\x78",
       {"\x65\xCC\x81\xE2\x80\x8D", "\xC2\xAD", "\x78"}},
      {R"re(\X)re",
       "\xEA\xB0\x81\xE1\x86\xA8\xEA\xB0\x80\xE1\x86\xA8",
       {"\xEA\xB0\x81\xE1\x86\xA8", "\xEA\xB0\x80\xE1\x86\xA8"}},
  };
  for (const Case& test_case : cases) {
    const auto pattern = Pattern::Regex(test_case.expression);
    ASSERT_TRUE(pattern.ok()) << pattern.status();
    EXPECT_EQ(Cut(**pattern, test_case.text), test_case.parts) << test_case.expression;
  }
}

TEST(Pattern, Literal_IsFoundFromTheLeftWithoutOverlap) {
  EXPECT_EQ(Cut(*Pattern::Literal("aa"), "baaab"), (std::vector<std::string>{"b", "aa", "ab"}));
  EXPECT_EQ(Cut(*Pattern::Literal(""), "a\xC3\xA9"), (std::vector<std::string>{"a", "\xC3\xA9"}));
  std::vector<Piece> pieces;
  EXPECT_TRUE(Pattern::Literal("")->Find("ab", pieces).ok());
  EXPECT_EQ(pieces.size(), 5u);
  EXPECT_EQ(Cut(*Pattern::Literal("x"), ""), std::vector<std::string>());
}

// PCRE2's tables are of Unicode 14, ICU's of 15.
bool IsTheSameInBoth(char32_t c) {
  // Alphabetic or Lowercase from Unicode 15 on.
  static const std::set<char32_t> kChanged = {0xC04,  0xF82,  0xF83,  0x11080, 0x11081,
                                              0x10FC, 0xA7F2, 0xA7F3, 0xA7F4,  0xAB69};
  std::string text;
  AppendUtf8(text, c);
  return !HasNewerThanPcre2(text) && kChanged.count(c) == 0;
}

// Returns characters that expressions distinguish, and any others.
std::string RandomText(std::mt19937_64& random) {
  static const char32_t kInteresting[] = {
      ' ',   '\'', 's',     't',    'l',    'L',  'e',     'v',     'r',     'R',   'd',
      'm',   'S',  '\n',    '\r',   '\t',   '1',  '2',     '3',     'a',     'B',   '!',
      '?',   '_',  0x17F,   0xE9,   0x85,   0x0B, 0xA0,    0x3000,  0x4E2D,  0x663, 0xBD,
      0x301, 0xB2, 0x1F600, 0x2028, 0x200D, 0xAD, 0x1D7D9, 0x1D431, 0x10FFFF};
  std::string text;
  for (uint64_t i = random() % 24; i > 0; --i) {
    char32_t c = kInteresting[random() % std::size(kInteresting)];
    if (random() % 8 == 0) {
      do {
        c = static_cast<char32_t>(random() % (random() % 2 == 0 ? 0x3000 : 0x110000));
      } while ((c >= 0xD800 && c < 0xE000) || !IsTheSameInBoth(c));
    }
    AppendUtf8(text, c);
  }
  return text;
}

// Returns an expression that both can express, of at most `depth` levels of groups. Only characters
// are repeated without limit, because otherwise most matches take too many steps.
std::string RandomExpression(std::mt19937_64& random, int depth) {
  static const char* const kAtoms[] = {"a",
                                       "S",
                                       "'",
                                       " ",
                                       "\\s",
                                       "\\S",
                                       "\\w",
                                       "\\W",
                                       "\\d",
                                       "\\D",
                                       "\\p{L}",
                                       "\\P{N}",
                                       "\\p{Lu}",
                                       "\\h",
                                       "\\R",
                                       ".",
                                       "[^\\s\\p{L}\\p{N}]",
                                       "[\\r\\n]",
                                       "[\\w']",
                                       "[^a-s]",
                                       "[\\S1]",
                                       "[[:punct:]]",
                                       "[[:^alpha:] ]",
                                       "[\\P{M}]",
                                       "\\N",
                                       "\xC3\xA9",
                                       "[[:graph:]]",
                                       "[[:print:]]",
                                       "[[:cntrl:]]",
                                       "[[:lower:]]",
                                       "[[:upper:]1]",
                                       "[[:blank:]]",
                                       "\\p{Alnum}",
                                       "\\p{word}",
                                       "[\\p{Word}]",
                                       "\\p{Any}",
                                       "\\p{Assigned}",
                                       "\\O"};
  static const char* const kPlaces[] = {"\\b", "\\B", "^", "$", "\\A", "\\z", "\\Z"};
  static const char* const kGroups[] = {
      "(", "(?:", "(?=", "(?!", "(?i:", "(?m:", "(?<=", "(?<!", "(?i-m:"};
  static const char* const kTimes[] = {"",   "",    "",      "?",    "*",    "+",  "+?", "*?",
                                       "??", "{2}", "{1,3}", "{,2}", "{2,}", "++", "*+", "{1,2}?"};
  static const char* const kGroupTimes[] = {"", "?", "??", "{2}", "{1,3}", "{1,2}?", "?+"};
  std::string expression;
  for (uint64_t parts = 1 + random() % 4; parts > 0; --parts) {
    if (depth > 0 && random() % 4 == 0) {
      absl::StrAppend(&expression, kGroups[random() % std::size(kGroups)],
                      RandomExpression(random, depth - 1), ")",
                      kGroupTimes[random() % std::size(kGroupTimes)]);
    } else if (random() % 8 == 0) {
      absl::StrAppend(&expression, kPlaces[random() % std::size(kPlaces)],
                      random() % 8 == 0 ? "?" : "");
    } else {
      absl::StrAppend(&expression, kAtoms[random() % std::size(kAtoms)],
                      kTimes[random() % std::size(kTimes)]);
    }
    if (random() % 6 == 0) expression += '|';
  }
  return expression;
}

// The expressions of GPT-2, Llama 3, Qwen 2, o200k and DeepSeek.
const char* const kKnownExpressions[] = {
    kGpt2Words.data(),
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"([^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+)"
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)?|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+)"
    R"([\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
    R"([!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+|)"
    R"( ?[\p{P}\p{S}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)",
};

TEST(Pattern, ExpressionsOfKnownModels_AreForPcre2AndCutAsIcuDoes) {
  std::mt19937_64 random(20260701);
  for (const char* const expression : kKnownExpressions) {
    const auto translated = IcuFromOniguruma(expression);
    ASSERT_TRUE(translated.ok() && translated->for_pcre2) << translated.status();
    ASSERT_NE(MakePcre2Pattern(translated->text), nullptr);
    const auto pattern = Pattern::Regex(expression);
    const auto by_icu = Pattern::IcuRegex(expression);
    ASSERT_TRUE(pattern.ok() && by_icu.ok()) << by_icu.status();
    for (int i = 0; i < 10'000; ++i) {
      const std::string text = RandomText(random);
      ASSERT_EQ(Cut(**pattern, text), Cut(**by_icu, text)) << expression << " of " << text;
    }
  }
}

TEST(Pattern, RandomExpressions_CutByPcre2AsByIcu) {
  const char* const cases = std::getenv("MUSTER_FUZZ_CASES");
  const int64_t count = cases == nullptr ? 400 : std::atoll(cases);
  std::mt19937_64 random(20261129);
  int64_t compared = 0;
  for (int64_t i = 0; i < count; ++i) {
    const std::string expression = RandomExpression(random, 2);
    const auto translated = IcuFromOniguruma(expression);
    if (!translated.ok() || !translated->for_pcre2) continue;
    const auto by_icu = Pattern::IcuRegex(expression);
    const auto by_pcre2 = MakePcre2Pattern(translated->text);
    if (!by_icu.ok() || by_pcre2 == nullptr) continue;
    ++compared;
    for (int j = 0; j < 20; ++j) {
      const std::string text = RandomText(random);
      std::vector<Piece> unused;
      if (!(*by_icu)->Find(text, unused).ok()) continue;
      ASSERT_EQ(Cut(*by_pcre2, text), Cut(**by_icu, text))
          << expression << " as " << translated->text << " of \"" << absl::CHexEscape(text) << "\"";
    }
  }
  EXPECT_GT(compared, count / 3);
}

TEST(Pattern, CharactersThatPcre2DoesNotKnow_AreCutByIcu) {
  // Letters of Unicode 15: CJK extension H, Kannada, Lao; and one of 14.
  for (const char32_t c : {0x31350, 0xCF3, 0xECE}) {
    std::string text = "a";
    AppendUtf8(text, c);
    EXPECT_TRUE(HasNewerThanPcre2(text));
    const auto pattern = Pattern::Regex("\\P{Cn}+");
    ASSERT_TRUE(pattern.ok());
    EXPECT_EQ(Cut(**pattern, text), std::vector<std::string>{text});
  }
  EXPECT_FALSE(HasNewerThanPcre2("a\u00e9\u4e2d\U0001f600\U0001fa74x"));
  int newer = 0;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text;
    AppendUtf8(text, c);
    UVersionInfo age;
    u_charAge(static_cast<UChar32>(c), age);
    ASSERT_EQ(HasNewerThanPcre2(text), age[0] > 14) << static_cast<uint32_t>(c);
    newer += age[0] > 14;
  }
  EXPECT_GT(newer, 4'000);
}

// Compares all properties that are left to PCRE2, for all characters.
TEST(Pattern, Properties_AreThoseOfIcu) {
  std::string text;
  for (char32_t c = 0; c < 0x110000; ++c) {
    if ((c < 0xD800 || c >= 0xE000) && IsTheSameInBoth(c)) AppendUtf8(text, c);
  }
  for (const char* const set :
       {"\\p{Lu}", "\\p{Ll}",     "\\p{Lt}",     "\\p{Lm}",     "\\p{Lo}", "\\p{Mn}", "\\p{Mc}",
        "\\p{Me}", "\\p{Nd}",     "\\p{Nl}",     "\\p{No}",     "\\p{Pc}", "\\p{Pd}", "\\p{Ps}",
        "\\p{Pe}", "\\p{Pi}",     "\\p{Pf}",     "\\p{Po}",     "\\p{Sm}", "\\p{Sc}", "\\p{Sk}",
        "\\p{So}", "\\p{Zs}",     "\\p{Zl}",     "\\p{Zp}",     "\\p{Cc}", "\\p{Cf}", "\\p{Co}",
        "\\p{Cn}", "\\p{L}",      "\\p{M}",      "\\p{N}",      "\\p{P}",  "\\p{S}",  "\\p{Z}",
        "\\p{C}",  "[[:alpha:]]", "[[:lower:]]", "[[:upper:]]", "\\s",     "\\w",     "[\\w]",
        "\\h",     "[[:print:]]"}) {
    const auto translated = IcuFromOniguruma(set);
    ASSERT_TRUE(translated.ok() && translated->for_pcre2) << set;
    const auto by_pcre2 = MakePcre2Pattern(translated->text);
    ASSERT_NE(by_pcre2, nullptr) << set;
    std::vector<Piece> pieces;
    ASSERT_TRUE(by_pcre2->Find(text, pieces).ok()) << set;
    const std::u16string units(translated->text.begin(), translated->text.end());
    UErrorCode error = U_ZERO_ERROR;
    USet* const wanted = uset_openPattern(units.data(), static_cast<int32_t>(units.size()), &error);
    ASSERT_TRUE(U_SUCCESS(error)) << set;
    for (const Piece& piece : pieces) {
      for (size_t at = piece.begin; at < piece.end;) {
        const char32_t c = NextCharacter(text, at);
        if (piece.match != uset_contains(wanted, static_cast<UChar32>(c))) {
          ADD_FAILURE() << set << absl::StrFormat(" U+%04X", static_cast<uint32_t>(c));
        }
      }
    }
    uset_close(wanted);
  }
}

TEST(Pattern, ExpressionThatNeverEnds_GivesUp) {
  const auto pattern = Pattern::Regex("(?:a|a)*b|(?:a+)+$c");
  ASSERT_TRUE(pattern.ok()) << pattern.status();
  std::vector<Piece> pieces;
  const absl::Status status = (*pattern)->Find(std::string(60, 'a'), pieces);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
}

TEST(Pattern, BadExpression_IsNamed) {
  for (const char* const expression : {"(", "a**b(", "(?<=a+)b", "\\p{NoSuchProperty}", "\xFF"}) {
    const auto pattern = Pattern::Regex(expression);
    EXPECT_FALSE(pattern.ok()) << expression;
    EXPECT_THAT(std::string(pattern.status().message()), HasSubstr("the regular expression \""));
  }
}

TEST(Pattern, OneExpressionInManyThreads_FindsTheSame) {
  const auto pattern = Pattern::Regex(R"(\w+|\s+)");
  ASSERT_TRUE(pattern.ok());
  const std::vector<std::string> want = {"one", " ", "two"};
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i) {
    threads.emplace_back([&] {
      for (int j = 0; j < 500; ++j) EXPECT_EQ(Cut(**pattern, "one two"), want);
    });
  }
  for (std::thread& thread : threads) thread.join();
}

}  // namespace
}  // namespace muster::text
