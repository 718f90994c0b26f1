#include "worker/bigmodel/unit_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

void NoteAll(UnitOrder& order, const std::vector<size_t>& units) {
  for (const size_t unit : units) order.Note(unit);
}

TEST(UnitOrder, FirstPass_IsExpectedInTheOrderOfNumbers) {
  UnitOrder order(4);
  EXPECT_THAT(order.Coming(), ElementsAre(0, 1, 2, 3));
  order.Note(1);
  EXPECT_THAT(order.Coming(), ElementsAre(2, 3, 0));
}

TEST(UnitOrder, SecondPass_RepeatsTheFirst) {
  UnitOrder order(4);
  NoteAll(order, {2, 2, 0, 3, 1, 2});
  EXPECT_THAT(order.Coming(), ElementsAre(0, 3, 1));
}

// An embedding that is also the head.
TEST(UnitOrder, UnitThatIsUsedTwice_IsFollowedByWhatFollowsInItsPlace) {
  UnitOrder order(4);
  NoteAll(order, {0, 1, 2, 0, 3, 0, 1, 2});
  EXPECT_THAT(order.Coming(), ElementsAre(0, 3, 1));
  order.Note(0);
  EXPECT_THAT(order.Coming(), ElementsAre(3, 1, 2));
}

TEST(UnitOrder, OneUnit_ExpectsNothing) {
  UnitOrder order(1);
  order.Note(0);
  EXPECT_THAT(order.Coming(), IsEmpty());
}

TEST(UnitOrder, UnitsThatAreLeftOut_AreNotExpected) {
  UnitOrder order(4);
  NoteAll(order, {0, 2, 0, 2});
  EXPECT_THAT(order.Coming(), ElementsAre(0));
}

}  // namespace
}  // namespace muster
