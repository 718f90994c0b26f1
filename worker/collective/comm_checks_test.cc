#include "worker/collective/comm_checks.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::comm_checks {
namespace {

TEST(ByRanks, RanksWithOneText_AreOneGroup_InTheOrderOfTheFirst) {
  EXPECT_EQ(ByRanks({"b", "a", "b"}, "has", "have"), "ranks 0, 2 have b; rank 1 has a");
  EXPECT_EQ(ByRanks({"a", "b"}, "called", "called", {3, 7}), "rank 3 called a; rank 7 called b");
}

TEST(ByRanks, ManyRanks_AreCutAndTheOddOneIsThere) {
  std::vector<std::string> texts(1000, "x");
  texts[612] = "y";
  EXPECT_EQ(ByRanks(texts, "has", "have"),
            "ranks 0, 1, 2, 3, 4, 5, 6, 7 and 991 more have x; rank 612 has y");
}

TEST(ByRanks, ManyGroups_AreCut) {
  std::vector<std::string> texts;
  for (int i = 0; i < 1000; ++i) texts.push_back(std::to_string(i));
  const std::string text = ByRanks(texts, "has", "have");
  EXPECT_THAT(text, testing::StartsWith("rank 0 has 0; rank 1 has 1; "));
  EXPECT_THAT(text, testing::EndsWith("; rank 7 has 7; and 992 others"));
}

}  // namespace
}  // namespace muster::comm_checks
