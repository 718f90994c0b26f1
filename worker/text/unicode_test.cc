#include "worker/text/unicode.h"

#include <gtest/gtest.h>

#include <string>

#include "base/text.h"

namespace muster::text {
namespace {

TEST(Utf8, EveryCharacter_IsReadBackFromBothEnds) {
  for (char32_t c = 0; c <= 0x10FFFF; ++c) {
    if (c >= 0xD800 && c < 0xE000) continue;
    std::string text = "a";
    AppendUtf8(text, c);
    ASSERT_EQ(text.size(), 1 + Utf8Bytes(c)) << static_cast<uint32_t>(c);
    size_t at = 1;
    ASSERT_TRUE(NextCharacter(text, at) == c);
    ASSERT_EQ(at, text.size());
    ASSERT_TRUE(PreviousCharacter(text, at) == c);
    ASSERT_EQ(at, 1u);
    ASSERT_EQ(CountCharacters(text), 2u);
  }
}

std::string Lossy(absl::string_view bytes, size_t step) {
  std::string out, pending;
  for (size_t at = 0; at < bytes.size(); at += step) {
    AppendUtf8Lossy(out, pending, bytes.substr(at, step), false);
    EXPECT_TRUE(IsValidUtf8(out));
  }
  AppendUtf8Lossy(out, pending, "", true);
  return out;
}

// The standard's examples (section 3.9, tables 3-8 to 3-11).
TEST(Utf8Lossy, IllFormedBytes_BecomeOneReplacementForEachMaximalPart) {
  const std::string r = "\xEF\xBF\xBD";
  const std::pair<std::string, std::string> cases[] = {
      {"\xC0\xAF\xE0\x80\xBF\xF0\x81\x82\x41", r + r + r + r + r + r + r + r + "A"},
      {"\xED\xA0\x80\xED\xBF\xBF\xED\xAF\x41", r + r + r + r + r + r + r + r + "A"},
      {"\xF4\x91\x92\x93\xFF\x41\x80\xBF\x42", r + r + r + r + r + "A" + r + r + "B"},
      {"\xE1\x80\xE2\xF0\x91\x92\xF1\xBF\x41", r + r + r + r + "A"},
      {"\xE4\xB8\xAD", "\xE4\xB8\xAD"},
      {"a\xE4\xB8", "a" + r},
      {"", ""},
  };
  for (const auto& [bytes, text] : cases) {
    for (size_t step = 1; step <= bytes.size() + 1; ++step) EXPECT_EQ(Lossy(bytes, step), text);
  }
}

TEST(Properties, Characters_AreWhatThePeerTakesThemFor) {
  EXPECT_TRUE(IsWhitespace(0x0B) && IsWhitespace(0x85) && IsWhitespace(0x3000));
  EXPECT_FALSE(IsWhitespace(0x200B) || IsWhitespace(0x1C));
  EXPECT_TRUE(IsPunctuation('$') && IsPunctuation(0x3001) && IsPunctuation(0x166D));
  EXPECT_FALSE(IsPunctuation(0x20AC) || IsPunctuation(' '));
  EXPECT_TRUE(IsNumeric(0x2167) && IsNumeric(0xBD));
  EXPECT_TRUE(IsControl(0x200D) && IsControl(0xE000));
  EXPECT_TRUE(IsMark(0x301) && IsNonspacingMark(0x301) && IsMark(0x903));
  EXPECT_FALSE(IsNonspacingMark(0x903));
  EXPECT_TRUE(IsWord('_') && IsWord(0x200D) && IsWord(0x4E2D));
  EXPECT_FALSE(IsWord('-'));
  EXPECT_EQ(ScriptOf(0x3042), ScriptOf(0x4E2D));
  EXPECT_NE(ScriptOf('a'), ScriptOf(0x430));
  EXPECT_EQ(ScriptOf(' '), 0);
  EXPECT_TRUE(ScriptOf(0x589) == ScriptOf('.') && ScriptOf(0x61C) == ScriptOf('.'));
}

TEST(Lowercase, OnlyTheDottedI_BecomesTwo) {
  EXPECT_TRUE(Lowercase(0x130) == (Characters{'i', 0x307}));
  EXPECT_TRUE(Lowercase(0x3A3) == (Characters{0x3C3}));
  EXPECT_TRUE(Lowercase('Q') == (Characters{'q'}));
  EXPECT_TRUE(Lowercase(0xDF) == (Characters{0xDF}));
}

TEST(Decompose, CharactersYoungerThanThePeersTables_AreLeftAlone) {
  EXPECT_TRUE(Decompose(0xC9, false) == (Characters{'E', 0x301}));
  EXPECT_TRUE(Decompose(0xFB01, false) == (Characters{0xFB01}));
  EXPECT_TRUE(Decompose(0xFB01, true) == (Characters{'f', 'i'}));
  EXPECT_TRUE(Decompose(0xD55C, false) == (Characters{0x1112, 0x1161, 0x11AB}));
  EXPECT_TRUE(Decompose(0x32FF, true) == (Characters{0x32FF}));  // from Unicode 12.1
  EXPECT_TRUE(Compose(0x45, 0x301) == 0xC9);
  EXPECT_TRUE(Compose(0x61, 0x62) == 0);
  EXPECT_EQ(CombiningClass(0x301), 230);
}

}  // namespace
}  // namespace muster::text
