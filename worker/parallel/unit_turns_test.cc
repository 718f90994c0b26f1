#include "worker/parallel/unit_turns.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

void Pass(UnitTurns& turns, const std::vector<uint32_t>& units, bool note = true) {
  turns.Begin();
  for (const uint32_t unit : units) turns.Turn(unit, note);
}

TEST(UnitTurns, FirstPass_ForetellsNothing) {
  UnitTurns turns;
  Pass(turns, {0, 1, 2});
  EXPECT_THAT(turns.Coming(), IsEmpty());
}

TEST(UnitTurns, PassThatWasKept_IsForetold) {
  UnitTurns turns;
  Pass(turns, {3, 1, 2, 1});
  turns.Keep();
  EXPECT_THAT(turns.Coming(), ElementsAre(3, 1, 2, 1));
  turns.Turn(3, true);
  EXPECT_THAT(turns.Coming(), ElementsAre(1, 2, 1));
  turns.Turn(1, true);
  turns.Turn(2, true);
  turns.Turn(1, true);
  EXPECT_THAT(turns.Coming(), IsEmpty());
  EXPECT_THAT(turns.noted(), ElementsAre(3, 1, 2, 1));
}

TEST(UnitTurns, PassThatWasNotKept_IsForgotten) {
  UnitTurns turns;
  Pass(turns, {0, 1});
  turns.Keep();
  Pass(turns, {5, 6});
  Pass(turns, {0});
  EXPECT_THAT(turns.Coming(), ElementsAre(1));
  EXPECT_THAT(turns.noted(), ElementsAre(0));
}

TEST(UnitTurns, SkippedUnit_IsNotWaitedFor) {
  UnitTurns turns;
  Pass(turns, {0, 1, 2, 3});
  turns.Keep();
  turns.Turn(0, true);
  turns.Turn(2, true);
  EXPECT_THAT(turns.Coming(), ElementsAre(3));
}

TEST(UnitTurns, UnknownUnit_ForetellsNothingUntilAKnownOneComes) {
  UnitTurns turns;
  Pass(turns, {0, 1, 2});
  turns.Keep();
  turns.Turn(0, true);
  turns.Turn(7, true);
  EXPECT_THAT(turns.Coming(), IsEmpty());
  turns.Turn(1, true);
  EXPECT_THAT(turns.Coming(), ElementsAre(2));
}

// In evaluation there is no backward pass, so Begin() is not called between forward passes.
TEST(UnitTurns, SamePassAgainWithoutABeginning_IsForetoldAgain) {
  UnitTurns turns;
  Pass(turns, {4, 0, 1, 4});
  turns.Keep();
  for (int round = 0; round < 2; ++round) {
    turns.Turn(4, false);
    EXPECT_THAT(turns.Coming(), ElementsAre(0, 1, 4));
    turns.Turn(0, false);
    turns.Turn(1, false);
    EXPECT_THAT(turns.Coming(), ElementsAre(4));
    turns.Turn(4, false);
    EXPECT_THAT(turns.Coming(), IsEmpty());
  }
  EXPECT_THAT(turns.noted(), IsEmpty());
}

TEST(UnitTurns, KeepWithNothingNoted_KeepsWhatItHas) {
  UnitTurns turns;
  Pass(turns, {0, 1});
  turns.Keep();
  Pass(turns, {0, 1}, /*note=*/false);
  turns.Keep();
  EXPECT_THAT(turns.Coming(), ElementsAre(0, 1));
}

TEST(UnitTurns, Forget_ForetellsNothing) {
  UnitTurns turns;
  Pass(turns, {0, 1});
  turns.Keep();
  turns.Forget();
  turns.Turn(0, true);
  EXPECT_THAT(turns.Coming(), IsEmpty());
}

}  // namespace
}  // namespace muster
