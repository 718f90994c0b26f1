#include "worker/agent/line_splitter.h"

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

}  // namespace
}  // namespace muster::agent
