#include "worker/text/aligned_text.h"

#include <gtest/gtest.h>

namespace muster::text {
namespace {

TEST(AlignedText, OfAText_EachByteStandsForItsCharacter) {
  const AlignedText aligned = AlignedText::Of("aé", 3);
  EXPECT_EQ(aligned.text, "aé");
  ASSERT_EQ(aligned.ranges.size(), 3u);
  EXPECT_EQ(aligned.ranges[0], (ByteRange{3, 4}));
  EXPECT_EQ(aligned.ranges[1], (ByteRange{4, 6}));
  EXPECT_EQ(aligned.ranges[2], (ByteRange{4, 6}));
  EXPECT_EQ(aligned.OriginalOf(0, 2), (ByteRange{3, 6}));
}

TEST(Rewriter, ReplacedAddedAndRemovedCharacters_StandForWhatTheOldOnesDid) {
  const AlignedText from = AlignedText::Of("abcd");
  AlignedText out;
  Rewriter rewriter(from, 0, 4, {0, 4}, out);
  rewriter.Put('x', 1);   // new at the start: stands for nothing
  rewriter.Put('A', 0);   // stands for a
  rewriter.Put('+', 1);   // new: stands for a, too
  rewriter.Skip(1);       // b is dropped
  rewriter.Put('C', -1);  // stands for c, and d is dropped
  rewriter.Put('!', 0);   // after the end: stands for d
  EXPECT_EQ(out.text, "xA+C!");
  EXPECT_EQ(out.ranges, (std::vector<ByteRange>{{0, 0}, {0, 1}, {0, 1}, {2, 3}, {3, 4}}));
}

TEST(SplitText, TextOfASpan_IsItsBytes) {
  SplitText split{AlignedText::Of("hello"), {{1, 3, {1, 3}}}};
  EXPECT_EQ(split.TextOf(split.spans[0]), "el");
  EXPECT_EQ(split.spans[0].size(), 2u);
}

}  // namespace
}  // namespace muster::text
