#include "worker/parallel/reduction_order.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <random>

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

constexpr uint32_t kEnd = UINT32_MAX;

// Units with one gradient each.
ReductionOrder Units(size_t units) {
  ReductionOrder order(units);
  for (size_t i = 0; i < units; ++i) order.Expect(i, 1);
  return order;
}

std::vector<size_t> TakeAll(ReductionOrder& order) {
  std::vector<size_t> taken;
  while (order.taken() < order.size()) taken.push_back(order.Next());
  return taken;
}

TEST(ReductionOrder, FirstProposal_IsTheForwardPassReversed_AndWhatItHasNotUsed) {
  const ReductionOrder order(5);
  EXPECT_THAT(order.FirstProposal({2, 0, 2, 4}), ElementsAre(4, 0, 2, 3, 1));
  EXPECT_THAT(order.FirstProposal({}), ElementsAre(4, 3, 2, 1, 0));
}

TEST(ReductionOrder, Proposal_HasTheOrderAndTheTurnOfCompletion) {
  ReductionOrder order = Units(4);
  order.Expect(1, 2);
  order.TakeFirst({3, 2, 1, 0});
  order.BeginPass();
  order.TurnTo(3);
  EXPECT_TRUE(order.Arrive(3));
  order.TurnTo(1);
  EXPECT_FALSE(order.Arrive(1));
  order.TurnTo(0);
  EXPECT_TRUE(order.Arrive(0));
  EXPECT_TRUE(order.Arrive(1));
  EXPECT_THAT(order.Proposal(/*once=*/false), ElementsAre(3, 1, 0, 3, 1, 3, 2, kEnd));
}

TEST(ReductionOrder, UnitWithMoreGradientsThanExpected_WaitsForTheEnd_WhereOneUpdateIsAllThereIs) {
  ReductionOrder order = Units(2);
  order.TakeFirst({1, 0});
  order.BeginPass();
  EXPECT_TRUE(order.Arrive(1));
  EXPECT_TRUE(order.Arrive(0));
  EXPECT_FALSE(order.Arrive(1));
  EXPECT_THAT(order.Proposal(/*once=*/false), ElementsAre(1, 0, 0, 0));
  EXPECT_THAT(order.Proposal(/*once=*/true), ElementsAre(0, 0, 1, kEnd));
}

TEST(ReductionOrder, KnownOrder_IsDueByTurns_CompleteOrNot) {
  ReductionOrder order = Units(3);
  EXPECT_FALSE(order.known());
  order.Take({2, 1, 0, 2, 1, kEnd});
  EXPECT_TRUE(order.known());
  EXPECT_EQ(order.taken(), order.size());  // this pass is over
  order.BeginPass();
  EXPECT_FALSE(order.NextIsDue());
  order.TurnTo(2);
  ASSERT_TRUE(order.NextIsDue());
  EXPECT_EQ(order.Next(), 2u);
  EXPECT_FALSE(order.NextIsDue());
  order.TurnTo(1);
  ASSERT_TRUE(order.NextIsDue());
  EXPECT_EQ(order.Next(), 0u);
  order.TurnTo(0);
  EXPECT_FALSE(order.NextIsDue());
  EXPECT_THAT(TakeAll(order), ElementsAre(1));
  order.ForgetTurns();
  order.BeginPass();
  EXPECT_FALSE(order.HasTurnedTo(2));
  EXPECT_FALSE(order.NextIsDue());
}

TEST(ReductionOrder, NextIsComplete_SkipsWhatExpectsNothing) {
  ReductionOrder order = Units(3);
  order.Expect(1, 0);
  order.TakeFirst({1, 2, 0});
  order.BeginPass();
  ASSERT_TRUE(order.NextIsComplete());
  EXPECT_EQ(order.Next(), 1u);
  EXPECT_FALSE(order.ExpectsAny(1));
  EXPECT_FALSE(order.NextIsComplete());
  order.Arrive(0);
  EXPECT_FALSE(order.NextIsComplete());  // not its turn
  order.Arrive(2);
  ASSERT_TRUE(order.NextIsComplete());
  EXPECT_EQ(order.Next(), 2u);
  EXPECT_TRUE(order.NextIsComplete());
  order.Next();
  EXPECT_FALSE(order.NextIsComplete());
}

TEST(ReductionOrder, Complete_PassesAUnitThatThisRankLeavesOutInPart) {
  ReductionOrder order = Units(3);
  order.Expect(2, 2);
  order.TakeFirst({2, 1, 0});
  order.BeginPass();
  EXPECT_EQ(order.Complete(), 0u);
  order.Arrive(2);
  EXPECT_EQ(order.Complete(), 0u);  // the unit's other gradient may come
  order.Arrive(1);
  EXPECT_EQ(order.Complete(), 2u);  // the other gradient does not come
  // A unit without any gradient may still get all of them.
  order.BeginPass();
  order.Arrive(1);
  EXPECT_EQ(order.Complete(), 0u);
}

TEST(ReductionOrder, GradientBehindTheReduction_IsLate) {
  ReductionOrder order = Units(2);
  order.TakeFirst({1, 0});
  order.BeginPass();
  EXPECT_FALSE(order.NoteUsed(1));
  order.Arrive(1);
  EXPECT_EQ(order.Next(), 1u);
  EXPECT_TRUE(order.NoteUsed(1));
  EXPECT_THAT(order.Late(), ElementsAre(1));
  order.BeginPass();
  EXPECT_THAT(order.Late(), IsEmpty());
}

TEST(ReductionOrder, MoveToTheEnd_IsDueThere) {
  ReductionOrder order = Units(3);
  order.Take({2, 0, 1, 0, 0, 0});
  order.MoveToTheEnd(2);
  order.BeginPass();
  EXPECT_TRUE(order.NextIsDue());
  EXPECT_EQ(order.Next(), 1u);
  EXPECT_EQ(order.Next(), 0u);
  EXPECT_FALSE(order.NextIsDue());
  EXPECT_THAT(TakeAll(order), ElementsAre(2));
}

// Whatever the order of gradients is on a rank, and whatever it leaves out: ranks that took one
// order and turn to the same units reduce the same units between the same turns.
TEST(ReductionOrder, RanksThatTookOneOrder_ReduceAlike) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const size_t units = 1 + random() % 8;
    ReductionOrder first = Units(units);
    first.TakeFirst(first.FirstProposal({}));
    first.BeginPass();
    std::vector<size_t> turns(units);
    for (size_t i = 0; i < units; ++i) turns[i] = i;
    std::shuffle(turns.begin(), turns.end(), random);
    for (const size_t unit : turns) {
      first.TurnTo(unit);
      if (random() % 4 != 0) first.Arrive(unit);
    }
    const std::vector<uint32_t> taken = first.Proposal(random() % 2 == 0);
    std::vector<std::vector<size_t>> events;
    for (int rank = 0; rank < 2; ++rank) {
      ReductionOrder order = Units(units);
      order.Take(taken);
      order.BeginPass();
      events.emplace_back();
      for (const size_t unit : turns) {
        while (order.NextIsDue()) events.back().push_back(units + order.Next());
        order.TurnTo(unit);
        events.back().push_back(unit);
        if (random() % 2 == 0) order.Arrive(unit);
      }
      for (const size_t unit : TakeAll(order)) events.back().push_back(units + unit);
    }
    EXPECT_EQ(events[0], events[1]) << "seed " << seed;
    EXPECT_EQ(events[0].size(), 2 * units) << "seed " << seed;
  }
}

}  // namespace
}  // namespace muster
