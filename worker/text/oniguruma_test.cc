#include "worker/text/oniguruma.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::text {
namespace {

using testing::HasSubstr;

std::string Icu(absl::string_view expression) {
  const auto translated = IcuFromOniguruma(expression);
  return translated.ok() ? translated->text : translated.status().ToString();
}

// The matches of the translations are tested in pattern_test.
TEST(IcuFromOniguruma, Constructs_KeepTheirMeaning) {
  EXPECT_EQ(Icu("ab"), "ab");
  EXPECT_EQ(Icu("a b"), R"(a\x{20}b)");
  EXPECT_EQ(Icu("a{,2}"), "a{0,2}");
  EXPECT_EQ(Icu("a{2}?"), "(?:a{2})?");
  EXPECT_EQ(Icu("a{1,2}+"), "(?:a{1,2})+");
  EXPECT_EQ(Icu("a?+"), "a?+");
  EXPECT_EQ(Icu("(?<name>a)"), "(?:a)");
  EXPECT_EQ(Icu("a(?i)b|c"), "a(?i:b|c)");
  EXPECT_EQ(Icu("(?#comment)a"), "a");
  EXPECT_EQ(Icu("(?x) a # b\n c"), "(?:ac)");
  EXPECT_EQ(Icu("[a-c&&b]"), "[[[a-c]&&[b]]]");
  EXPECT_EQ(Icu("[]a]"), R"([\x{5D}a])");
  EXPECT_EQ(Icu("[a-]"), R"([a\x{2D}])");
  EXPECT_EQ(Icu(R"(\x{4E2D}\u0041\x41)"), R"(\x{4E2D}AA)");
  EXPECT_EQ(Icu("a{x"), R"(a\x{7B}x)");
}

// That PCRE2 gives the same is tested in pattern_test.
TEST(IcuFromOniguruma, WhatPcre2ReadsOtherwise_IsForIcu) {
  for (const char* const expression :
       {R"(\p{Han})", R"(\p{Letter})", R"(\p{Greek}|a)", R"(\X)", "(?>a)", "[a-c&&b]",
        R"([[^\w]a])", R"([\W])", "(?i)ss", "(?i:FI)", "(?i:\u00df)", R"((?i)[\p{Lu}])",
        "(?i)[a-\u00ff]", "(?i)[\u00ff]"}) {
    const auto translated = IcuFromOniguruma(expression);
    ASSERT_TRUE(translated.ok()) << translated.status();
    EXPECT_FALSE(translated->for_pcre2) << expression;
  }
  for (const char* const expression :
       {R"(\p{lu}\P{M}\w\W\b\R.^$)", R"([^\S\D\P{L}\p{^N}[:^space:]])", "[[a-c]b]",
        "ss|(?i:s's|sa)", "(?i)s|s", "(?i:a-z)\u00df", R"((?i)\p{Lu}+[a-z]*)",
        "[[:graph:][:print:]]", "(?i)s+s"}) {
    const auto translated = IcuFromOniguruma(expression);
    ASSERT_TRUE(translated.ok()) << translated.status();
    EXPECT_TRUE(translated->for_pcre2) << expression << " as " << translated->text;
  }
}

TEST(IcuFromOniguruma, WhatCannotBeTranslated_IsNamedWithItsPlace) {
  for (const auto& [expression, what] :
       std::vector<std::pair<std::string, std::string>>{{R"(a\1)", "\\1"},
                                                        {R"(\K)", "\\K"},
                                                        {R"(\g<a>)", "\\g"},
                                                        {"(?~a)", "(?~"},
                                                        {"(?(a)b)", "(?("},
                                                        {R"(\p{L=x})", "L=x"},
                                                        {"a{5000}", "repetition"},
                                                        {"[a&&]", "empty"}}) {
    const auto translated = IcuFromOniguruma(expression);
    EXPECT_EQ(translated.status().code(), absl::StatusCode::kUnimplemented) << expression;
    EXPECT_THAT(std::string(translated.status().message()), HasSubstr(what));
    EXPECT_THAT(std::string(translated.status().message()), HasSubstr("at character "));
  }
  for (const char* const expression :
       {"(", ")", "[", "[a", "*a", "a|*", "\\", "[b-a]", "a{3,2}", "\\x{110000}", "\\u12", "\\p{",
        "\\p", "[[:alpha", "(?<n", "\\xD800 \\x{D800}"}) {
    EXPECT_EQ(IcuFromOniguruma(expression).status().code(), absl::StatusCode::kInvalidArgument)
        << expression;
  }
  EXPECT_FALSE(IcuFromOniguruma(std::string(1000, '(')).ok());
  EXPECT_FALSE(IcuFromOniguruma(std::string(1000, '[')).ok());
  EXPECT_FALSE(IcuFromOniguruma(std::string(1 << 20, 'a')).ok());
}

}  // namespace
}  // namespace muster::text
