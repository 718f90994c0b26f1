#include "base/text.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(IsValidUtf8, MalformedSequences_AreRefused) {
  EXPECT_TRUE(IsValidUtf8("aé✓😀"));
  for (const char* bad : {"\xff", "\xc0\x80", "\xe0\x80\x80", "\xed\xa0\x80", "\xf4\x90\x80\x80",
                          "\xe2\x9c", "\x80"}) {
    EXPECT_FALSE(IsValidUtf8(bad));
  }
}

TEST(Utf8Prefix, CharactersStayWhole) {
  const std::string text = "a\xc3\xa4\xe2\x82\xac";  // of 1, 2 and 3 bytes
  const size_t kept[] = {0, 1, 1, 3, 3, 3, 6, 6};
  for (size_t max = 0; max < 8; ++max) EXPECT_EQ(Utf8Prefix(text, max), text.substr(0, kept[max]));
  EXPECT_EQ(Utf8Prefix("", 3), "");
}

TEST(Printable, AnyBytes_BecomeOneLineOfUtf8) {
  EXPECT_EQ(Printable("a\"b'\n✓"), "a\"b'\\x0a✓");
  EXPECT_EQ(Printable("é\xff"), "\\xc3\\xa9\\xff");
  for (size_t length = 0; length < 12; ++length) {
    EXPECT_TRUE(IsValidUtf8(Printable("aé✓😀b", length))) << length;
  }
  EXPECT_EQ(Printable("abcdef", 3), "abc...");
}

TEST(Printable, ControlsOfTerminalsAndOfDirections_AreEscaped) {
  // The first and the last one of each range.
  EXPECT_EQ(Printable("\x1f\x7f"), "\\x1f\\x7f");
  EXPECT_EQ(Printable("\u0080\u009b[2J\u009f"), "\\xc2\\x80\\xc2\\x9b[2J\\xc2\\x9f");
  EXPECT_EQ(Printable("\u061c\u200e\u200f"), "\\xd8\\x9c\\xe2\\x80\\x8e\\xe2\\x80\\x8f");
  EXPECT_EQ(Printable("\u2028\u202a\u202e"), "\\xe2\\x80\\xa8\\xe2\\x80\\xaa\\xe2\\x80\\xae");
  EXPECT_EQ(Printable("\u2066\u2069"), "\\xe2\\x81\\xa6\\xe2\\x81\\xa9");
  // Their neighbours, and letters of the same first bytes.
  const std::string plain = "\u00a0\u00e9\u061b\u061d\u200d\u2010\u2027\u202f\u2065\u206a\u20ac";
  EXPECT_EQ(Printable(plain), plain);
}

TEST(Utf8TextTest, BytesThatAreNotUtf8_AreEscapedAndNothingIsCut) {
  EXPECT_EQ(Utf8Text("a\n✓"), "a\n✓");
  EXPECT_EQ(Utf8Text("\xff"), "\\xff");
  EXPECT_EQ(Utf8Text(std::string(1000, '\xff')).size(), 4000u);
}

TEST(JsonQuoteTest, ControlCharacters_AreEscapedOthersKept) {
  EXPECT_EQ(JsonQuote("a\"\\\n\x01\x7fé"), "\"a\\\"\\\\\\n\\u0001\x7fé\"");
}

TEST(FirstLineTest, Text_IsItsFirstLineWithoutSpaceAroundIt) {
  EXPECT_EQ(FirstLine("Connection refused \r\nbacktrace"), "Connection refused");
  EXPECT_EQ(FirstLine("\n  reason\n"), "reason");
  EXPECT_EQ(FirstLine(" \n\t"), "");
}

TEST(ShellWordTest, AnyWord_IsReadBackByAShell) {
  EXPECT_EQ(ShellWord("--lr=0.1"), "--lr=0.1");
  EXPECT_EQ(ShellWord(""), "''");
  EXPECT_EQ(ShellWord("it's $HOME"), "'it'\\''s $HOME'");
  EXPECT_EQ(ShellWord("a\nb"), "'a\nb'");
}

TEST(AppendUtf8, Characters_TakeOneToFourBytes) {
  std::string text;
  for (const char32_t c : {U'a', U'\u00e9', U'\u6570', U'\U0001F600'}) AppendUtf8(text, c);
  EXPECT_EQ(text, "a\xc3\xa9\xe6\x95\xb0\xf0\x9f\x98\x80");
}

TEST(IsDigits, OtherThanAsciiDigits_AreNone) {
  EXPECT_TRUE(IsDigits("0"));
  EXPECT_TRUE(IsDigits("0123"));
  for (const char* const text : {"", "-1", "1.0", " 1", "１", "1a"}) EXPECT_FALSE(IsDigits(text));
}

}  // namespace
}  // namespace muster
