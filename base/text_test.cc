#include "base/text.h"

#include <gtest/gtest.h>

namespace muster {
namespace {

TEST(IsValidUtf8, EdgeCases) {
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

}  // namespace
}  // namespace muster
