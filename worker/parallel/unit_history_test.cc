#include "worker/parallel/unit_history.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "absl/strings/str_cat.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

std::string Name(uint32_t unit) { return absl::StrCat("layers.", unit); }

TEST(UnitHistory, SameEvents_HaveOneDigest) {
  UnitHistory a, b;
  for (UnitHistory* history : {&a, &b}) {
    history->AddGather(0);
    history->AddReduction(0);
  }
  EXPECT_EQ(a.digest(), b.digest());
  EXPECT_EQ(a.size(), 2u);
  a.AddGather(1);
  b.AddReduction(1);
  EXPECT_NE(a.digest(), b.digest());
  EXPECT_EQ(a.size(), b.size());
}

TEST(UnitHistory, Clear_BeginsAgain) {
  UnitHistory history;
  history.AddGather(3);
  history.Clear();
  EXPECT_EQ(history.size(), 0u);
  EXPECT_EQ(history.digest(), UnitHistory().digest());
  EXPECT_TRUE(history.events().empty());
}

TEST(UnitHistory, ProgramThatNeverCompares_KeepsAFewEvents) {
  UnitHistory history;
  for (uint32_t i = 0; i < 100'000; ++i) history.AddGather(i);
  EXPECT_EQ(history.size(), 100'000u);
  EXPECT_LT(history.events().size(), 20'000u);
}

TEST(UnitHistory, Difference_NamesTheFirstEventOfTheRankThatDiffers) {
  UnitHistory first, other;
  first.AddGather(0);
  first.AddGather(1);
  other.AddGather(0);
  other.AddReduction(2);
  EXPECT_THAT(UnitHistory::Difference({first.events(), first.events(), other.events()}, Name),
              HasSubstr("as number 1 in this step rank 0 gathered unit 'layers.1' and rank 2 "
                        "reduced unit 'layers.2'"));
}

TEST(UnitHistory, Difference_OfARankThatStoppedEarlier) {
  UnitHistory first, other;
  first.AddGather(0);
  EXPECT_THAT(UnitHistory::Difference({first.events(), other.events()}, Name),
              HasSubstr("as number 0 in this step rank 0 gathered unit 'layers.0' and rank 1 "
                        "nothing more"));
  EXPECT_THAT(UnitHistory::Difference({other.events(), first.events()}, Name),
              HasSubstr("rank 0 nothing more and rank 1 gathered unit 'layers.0'"));
}

TEST(UnitHistory, DifferenceBehindWhatIsKept_IsSaidWithoutAName) {
  UnitHistory history;
  history.AddGather(0);
  EXPECT_THAT(UnitHistory::Difference({history.events(), history.events()}, Name),
              HasSubstr("in different orders, after 1 uses without a backward pass"));
}

}  // namespace
}  // namespace muster
