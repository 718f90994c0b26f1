#include "client/cli/output.h"

#include <sys/mman.h>
#include <unistd.h>

#include <nlohmann/json.hpp>

#include "base/test_terminal.h"
#include "base/yaml.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

TEST(Output, TableText_Columns_AreAligned) {
  EXPECT_EQ(TableText({{"JOB", "STATE"}, {"mnist-17", ""}}), "JOB       STATE\nmnist-17  -\n");
}

TEST(Output, TableText_ControlCharacters_AreShownAsText) {
  EXPECT_EQ(TableText({{"a\x1b[2J"}}), "a\\x1b[2J\n");
}

TEST(Output, TableText_LastColumnBeyondTheWidth_IsBrokenBelowItself) {
  EXPECT_EQ(TableText({{"JOB", "WHY"}, {"a", "one two three four"}, {"b", "five"}}, 14),
            "JOB  WHY\n"
            "a    one two\n"
            "     three\n"
            "     four\n"
            "b    five\n");
}

TEST(Output, TableText_NoRoomBesideTheOtherColumns_IsBrokenBelowTheRow) {
  EXPECT_EQ(
      TableText({{"JOB", "STATE", "WHY"}, {"mnist-17", "FAILED", "rank 1 (pid 7) exited"}}, 21),
      "JOB       STATE   WHY\n"
      "mnist-17  FAILED\n"
      "    rank 1 (pid 7)\n"
      "    exited\n");
}

TEST(Output, TableText_WordLongerThanTheWidth_IsCutBetweenCharacters) {
  EXPECT_EQ(TableText({{"A", "W"}, {"x", "\u00e4\u00e4\u00e4\u00e4"}}, 8),
            "A  W\nx  \u00e4\u00e4\n   \u00e4\u00e4\n");
  // Too narrow for any layout.
  EXPECT_EQ(TableText({{"A", "W"}, {"x", "yz"}}, 2), "A  W\nx  yz\n");
}

TEST(Output, ForTerminal_KeepsColoursAndTabs_AndNothingThatControlsTheTerminal) {
  EXPECT_EQ(ForTerminal("plain \u00e4\tand \x1b[1;31mred\x1b[m"),
            "plain \u00e4\tand \x1b[1;31mred\x1b[m");
  // A title, a clear screen, a question to the terminal, a control character in UTF-8.
  EXPECT_EQ(ForTerminal("a\x1b]0;PWN\x07"
                        "b\x1b[2J\x1b[6n\xc2\x9b"
                        "c"),
            "a\\x1b]0;PWN\\x07"
            "b\\x1b[2J\\x1b[6n\\xc2\\x9b"
            "c");
  EXPECT_EQ(ForTerminal("50%\r\x1b["), "50%\\x0d\\x1b[");
  EXPECT_EQ(ForTerminal(""), "");
}

TEST(Output, ForTerminal_ColoursOfGccAndGrep_ComeWithoutEscapesThatClearTheLine) {
  EXPECT_EQ(ForTerminal("\x1b[01;31m\x1b[Kerror\x1b[m\x1b[K: \x1b[0Kx\x1b[J"),
            "\x1b[01;31merror\x1b[m: x\\x1b[J");
}

TEST(Output, ForTerminal_ColourThatIsLeftOpen_EndsWithTheLine) {
  EXPECT_EQ(ForTerminal("\x1b[0mplain \x1b[31mred"), "\x1b[0mplain \x1b[31mred\x1b[m");
  EXPECT_EQ(ForTerminal("\x1b[31mred\x1b[00;0m"), "\x1b[31mred\x1b[00;0m");
}

TEST(Output, ForTerminal_ByteThatIsNoUtf8_LeavesOtherCharactersReadable) {
  EXPECT_EQ(ForTerminal("\u00e4 \xff \u00e4\xc3"), "\u00e4 \\xff \u00e4\\xc3");
}

TEST(Output, ColumnsIfTerminal_AreThoseOfATerminalOnly) {
  EXPECT_EQ(ColumnsIfTerminal(TestTerminal().program()), 80u);
  const int file = memfd_create("file", MFD_CLOEXEC);
  EXPECT_EQ(ColumnsIfTerminal(file), 0u);
  close(file);
  EXPECT_EQ(ColumnsIfTerminal(-1), 0u);
}

TEST(Output, YamlText_NestedValues_ReadBackAsTheSame) {
  const nlohmann::ordered_json value = {
      {"a", {{"no", "yes"}, {"n", 1}, {"none", nullptr}}},
      {"list", {"x", {{"deep", {1, 2}}}, nlohmann::ordered_json::array()}},
      {"text", "two\nlines: \"quoted\""}};
  const auto read = ParseYaml(YamlText(value), "text");
  ASSERT_TRUE(read.ok()) << read.status() << YamlText(value);
  EXPECT_EQ(read->value, nlohmann::json(value)) << YamlText(value);
}

}  // namespace
}  // namespace muster::client
