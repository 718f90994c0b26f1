#include "client/cli/prompt.h"

#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

using Event = Prompt::Event;
using Kind = Key::Kind;

std::vector<Kind> Kinds(KeyReader& keys, bool complete = false) {
  std::vector<Kind> kinds;
  while (const auto key = keys.Next(complete)) kinds.push_back(key->kind);
  return kinds;
}

TEST(KeyReader, Sequences_AreKeys) {
  KeyReader keys;
  keys.Add(
      "\x1b[A\x1b[B\x1bOC\x1b[D\x1b[H\x1b[4~\x1b[3~\x1b[1;5C\x1b[15~\r\n\x7f\x15\x03\x04\x1a\t");
  EXPECT_THAT(Kinds(keys),
              ElementsAre(Kind::kUp, Kind::kDown, Kind::kRight, Kind::kLeft, Kind::kHome,
                          Kind::kEnd, Kind::kDelete, Kind::kRight, Kind::kOther, Kind::kEnter,
                          Kind::kEnter, Kind::kBackspace, Kind::kEraseLine, Kind::kInterrupt,
                          Kind::kEndOfInput, Kind::kSuspend, Kind::kOther));
}

TEST(KeyReader, ByteByByte_WaitsForTheRest) {
  KeyReader keys;
  for (const char* byte : {"\x1b", "["}) {
    keys.Add(byte);
    EXPECT_FALSE(keys.Next(false).has_value());
    EXPECT_TRUE(keys.pending());
  }
  keys.Add("A");
  EXPECT_EQ(keys.Next(false)->kind, Kind::kUp);
  EXPECT_FALSE(keys.pending());
  keys.Add("\xc3");
  EXPECT_FALSE(keys.Next(false).has_value());
  keys.Add("\xa4z");
  EXPECT_EQ(keys.Next(false)->text, "\xc3\xa4");
  EXPECT_EQ(keys.Next(false)->text, "z");
}

TEST(KeyReader, EscAlone_IsAKeyIfNothingFollows) {
  KeyReader keys;
  keys.Add("\x1b");
  EXPECT_EQ(keys.Next(true)->kind, Kind::kEscape);
  keys.Add(
      "\x1b"
      "x");
  EXPECT_THAT(Kinds(keys), ElementsAre(Kind::kEscape, Kind::kText));
  keys.Add("\x1b[12");
  EXPECT_EQ(keys.Next(true)->kind, Kind::kOther);
  EXPECT_FALSE(keys.pending());
}

TEST(KeyReader, BytesThatAreNoText_AreDropped) {
  KeyReader keys;
  keys.Add("\xff\xc3(\x80");
  EXPECT_THAT(Kinds(keys), ElementsAre(Kind::kOther, Kind::kOther, Kind::kText, Kind::kOther));
}

DialogQuestion List() {
  return {.text = "Where?",
          .note = "A note.",
          .choices = {{"one", "here"}, {"several", "there"}, {"cluster", "elsewhere"}},
          .suggestion = "several"};
}

// Presses the keys that these bytes encode; returns the last event.
Event Press(Prompt& prompt, const std::string& bytes) {
  KeyReader keys;
  keys.Add(bytes);
  Event event = Event::kNone;
  while (const auto key = keys.Next(true)) event = prompt.Press(*key);
  return event;
}

std::vector<std::string> Texts(const Prompt& prompt, size_t width) {
  std::vector<std::string> texts;
  for (const PromptLine& line : prompt.Lines(width)) texts.push_back(line.text);
  return texts;
}

TEST(Prompt, List_ArrowsAndNumbersMove_EnterTakes) {
  Prompt prompt(List(), 3);
  EXPECT_EQ(prompt.answer(), "several");
  EXPECT_EQ(Press(prompt, "\x1b[B"), Event::kNone);
  EXPECT_EQ(prompt.answer(), "cluster");
  EXPECT_EQ(Press(prompt, "\x1b[B"), Event::kNone);
  EXPECT_EQ(prompt.answer(), "one") << "around the end";
  EXPECT_EQ(Press(prompt, "\x1b[A"), Event::kNone);
  EXPECT_EQ(prompt.answer(), "cluster");
  EXPECT_EQ(Press(prompt, "2"), Event::kNone);
  EXPECT_EQ(prompt.answer(), "several");
  EXPECT_EQ(Press(prompt, "9"), Event::kNone);
  EXPECT_THAT(absl::StrJoin(Texts(prompt, 80), "\n"), HasSubstr("press a number from 1 to 3"));
  EXPECT_EQ(prompt.answer(), "several");
  EXPECT_EQ(Press(prompt, "\r"), Event::kAnswer);
  EXPECT_EQ(prompt.Settled(), "3. Where? several");
  EXPECT_THAT(Texts(prompt, 80),
              ElementsAre("3. Where?", "A note.", "  1) one      here", "> 2) several  there",
                          "  3) cluster  elsewhere",
                          "arrows or a number, then Enter; Esc: back; Ctrl-C: end without a file"));
  EXPECT_FALSE(prompt.Cursor(80).has_value());
}

TEST(Prompt, KeysForBackAndCancel_AreEvents) {
  for (const char* bytes : {"\x1b", "\x1b[D", "<", "\x7f"}) {
    Prompt prompt(List(), 1);
    EXPECT_EQ(Press(prompt, bytes), Event::kBack);
  }
  for (const char* bytes : {"\x03", "\x04"}) {
    Prompt prompt(List(), 1);
    EXPECT_EQ(Press(prompt, bytes), Event::kCancel);
  }
  Prompt text({.text = "Name?"}, 1);
  EXPECT_EQ(Press(text, "\x1b[D"), Event::kBack);
  EXPECT_EQ(Press(text, "<"), Event::kBack);
  EXPECT_EQ(Press(text, "a<\x1b[D\x04"), Event::kNone) << "an answer has begun";
  EXPECT_EQ(text.answer(), "a<");
  EXPECT_EQ(Press(text, "\x03"), Event::kCancel);
}

TEST(Prompt, Text_IsEdited) {
  Prompt prompt({.text = "Name?"}, 1);
  Press(prompt,
        "ab\xc3\xa4"
        "d");
  Press(prompt, "\x1b[D\x7f");  // the umlaut is erased as a whole
  EXPECT_EQ(prompt.answer(), "abd");
  Press(prompt, "\x1b[Hx\x1b[3~");
  EXPECT_EQ(prompt.answer(), "xbd");
  Press(prompt, "\x1b[Fz\x1b[C");
  EXPECT_EQ(prompt.answer(), "xbdz");
  Press(prompt, "\x7f\x7f\x7f\x7f\x7f\x7f");
  EXPECT_EQ(prompt.answer(), "");
  Press(prompt,
        "abc\x15"
        "de");
  EXPECT_EQ(prompt.answer(), "de");
  EXPECT_EQ(Press(prompt, "\r"), Event::kAnswer);
}

TEST(Prompt, Text_ShowsThePartAroundTheCursor) {
  Prompt prompt({.text = "Name?"}, 1);
  Press(prompt, "abcdefghijklmnop");
  EXPECT_EQ(Texts(prompt, 13).back(), "> ghijklmnop");
  const auto place = prompt.Cursor(13);
  ASSERT_TRUE(place.has_value());
  EXPECT_EQ(place->row, Texts(prompt, 13).size() - 1);
  EXPECT_EQ(place->column, 12u);
  Press(prompt, "\x1b[H");
  EXPECT_EQ(Texts(prompt, 13).back(), "> abcdefghij");
  EXPECT_EQ(prompt.Cursor(13)->column, 2u);
}

// A file that was pasted by mistake is drawn at once.
TEST(Prompt, LongText_IsMeasuredOnce) {
  Prompt prompt({.text = "Name?"}, 1);
  prompt.Press({Key::Kind::kText, std::string(300'000, 'a')});
  prompt.Press({Key::Kind::kText, "\xe6\x97\xa5z"});
  EXPECT_EQ(Texts(prompt, 13).back(), "> aaaaaaa\xe6\x97\xa5z");
}

TEST(Prompt, Refusal_IsShownUntilTheNextKey) {
  Prompt prompt({.text = "How many?", .suggestion = "2"}, 1);
  prompt.Refuse("x is no answer: write a number");
  EXPECT_THAT(Texts(prompt, 80), testing::Contains("x is no answer: write a number"));
  Press(prompt, "3");
  EXPECT_THAT(Texts(prompt, 80), testing::Not(testing::Contains("x is no answer: write a number")));
  EXPECT_EQ(prompt.Settled(), "1. How many? 3");
  Press(prompt, "\x15");
  EXPECT_EQ(prompt.Settled(), "1. How many? 2");
}

TEST(Prompt, NoLineIsWiderThanTheScreen) {
  for (const size_t width : {8u, 20u, 33u, 80u}) {
    Prompt prompt(List(), 12);
    prompt.Refuse(std::string(200, 'x'));
    for (const std::string& line : Texts(prompt, width)) EXPECT_LE(line.size(), width) << line;
  }
}

TEST(WrapText, BreaksAtBlanks) {
  EXPECT_THAT(WrapText("one two three\nfour", 8), ElementsAre("one two", "three", "four"));
  EXPECT_THAT(WrapText("abcdefgh", 3), ElementsAre("abc", "def", "gh"));
  EXPECT_THAT(WrapText("one two", 3), ElementsAre("one", "two"));
  EXPECT_THAT(WrapText("", 3), ElementsAre(""));
  EXPECT_THAT(WrapText("数据数据", 5), ElementsAre("数据", "数据"));
  EXPECT_THAT(WrapText("数据", 1), ElementsAre("数", "据", ""));
}

}  // namespace
}  // namespace muster::client
