#include "agent/line_splitter.h"

#include <algorithm>
#include <cstdint>
#include <random>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class LineSplitterTest : public ::testing::Test {
 protected:
  std::vector<std::string> lines_;
  std::vector<std::string> partials_;
  LineSplitter splitter_{[this](absl::string_view text) { lines_.emplace_back(text); },
                         [this](absl::string_view text) { partials_.emplace_back(text); }};
};

TEST_F(LineSplitterTest, Newlines_EndLinesAlsoEmptyOnes) {
  splitter_.Append("a\n\nb\n");
  EXPECT_THAT(lines_, ElementsAre("a", "", "b"));
  EXPECT_THAT(partials_, IsEmpty());
}

TEST_F(LineSplitterTest, LineInPieces_IsOneLine) {
  splitter_.Append("he");
  splitter_.Append("llo");
  splitter_.Append("\n");
  EXPECT_THAT(lines_, ElementsAre("hello"));
  EXPECT_THAT(partials_, ElementsAre("he", "hello"));
}

TEST_F(LineSplitterTest, CarriageReturnNewline_IsOneLineEndAlsoWhenSplit) {
  splitter_.Append("a\r\nb\r");
  splitter_.Append("\nc\n");
  EXPECT_THAT(lines_, ElementsAre("a", "b", "c"));
}

TEST_F(LineSplitterTest, ProgressBar_LastStateIsTheLine) {
  splitter_.Append("\r10%");
  splitter_.Append("\r20%");
  splitter_.Append("\r30%\n");
  EXPECT_THAT(lines_, ElementsAre("30%"));
  EXPECT_THAT(partials_, ElementsAre("10%", "20%"));
}

TEST_F(LineSplitterTest, ReturnAfterText_KeepsShowingTheText) {
  splitter_.Append("10%\r");
  splitter_.Append("20%\r");
  EXPECT_THAT(lines_, IsEmpty());
  EXPECT_THAT(partials_, ElementsAre("10%", "20%"));
  splitter_.Finish();
  EXPECT_THAT(lines_, ElementsAre("20%"));
}

TEST_F(LineSplitterTest, EndOfInput_UnfinishedLineIsALine) {
  splitter_.Append("no newline");
  splitter_.Finish();
  splitter_.Finish();
  EXPECT_THAT(lines_, ElementsAre("no newline"));
}

TEST_F(LineSplitterTest, EndlessLine_IsCut) {
  splitter_.Append(std::string(LineSplitter::kMaxLine * 2 + 5, 'x'));
  splitter_.Finish();
  ASSERT_EQ(lines_.size(), 3u);
  EXPECT_EQ(lines_[0].size(), LineSplitter::kMaxLine);
  EXPECT_EQ(lines_[2].size(), 5u);
}

TEST_F(LineSplitterTest, LineOfWholePieces_HasNoEmptyLineAfterIt) {
  for (const char* const end : {"\n", "\r\n"}) {
    lines_.clear();
    splitter_.Append(std::string(LineSplitter::kMaxLine * 2, 'x'));
    splitter_.Append(end);
    splitter_.Append("\nend\n");
    ASSERT_EQ(lines_.size(), 4u);
    EXPECT_EQ(lines_[1].size(), LineSplitter::kMaxLine);
    EXPECT_EQ(lines_[2], "");  // printed by the program
    EXPECT_EQ(lines_[3], "end");
  }
}

// Holds whatever a program prints, and however the pipe cuts it.
TEST(LineSplitter, RandomBytes_GiveTheSameLinesHoweverTheyAreCut) {
  std::mt19937_64 random(20261121);
  for (int round = 0; round < 300; ++round) {
    std::string text(random() % 400, 'x');
    for (char& c : text) {
      const uint64_t draw = random() % 8;
      c = draw < 2 ? '\n' : draw < 3 ? '\r' : static_cast<char>(random());
    }
    if (round % 10 == 0) text.insert(text.size() / 2, LineSplitter::kMaxLine + 7, 'y');
    std::vector<std::string> whole, pieces;
    LineSplitter at_once([&](absl::string_view line) { whole.emplace_back(line); }, nullptr);
    at_once.Append(text);
    at_once.Finish();
    LineSplitter cut([&](absl::string_view line) { pieces.emplace_back(line); },
                     [](absl::string_view) {});
    for (absl::string_view left = text; !left.empty();) {
      const size_t n = 1 + random() % std::max<size_t>(1, left.size() / 3);
      cut.Append(left.substr(0, n));
      left.remove_prefix(std::min(n, left.size()));
    }
    cut.Finish();
    ASSERT_EQ(pieces, whole);
    for (const std::string& line : whole) {
      ASSERT_LE(line.size(), LineSplitter::kMaxLine);
      ASSERT_EQ(line.find('\n'), std::string::npos);
    }
  }
}

}  // namespace
}  // namespace muster::agent
