#include "worker/text/oniguruma.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::text {
namespace {

using testing::HasSubstr;

std::string Icu(absl::string_view expression) {
  const auto translated = IcuFromOniguruma(expression);
  return translated.ok() ? *translated : translated.status().ToString();
}

// What the translations find is in pattern_test.
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
