#include "tests/simulation/linearizability.h"

#include <gtest/gtest.h>

#include <vector>

namespace muster::simulation {
namespace {

KvEvent Event(KvEvent::Kind kind, int64_t arg, int64_t result, int start, int end,
              bool answered = true) {
  KvEvent event;
  event.kind = kind;
  event.arg = arg;
  event.result = result;
  event.start = absl::FromUnixSeconds(start);
  event.end = answered ? absl::FromUnixSeconds(end) : absl::InfiniteFuture();
  event.answered = answered;
  return event;
}

TEST(Linearizability, ReadAfterWrite_MustSeeIt) {
  EXPECT_TRUE(IsLinearizable({Event(KvEvent::kPut, 1, 0, 0, 1), Event(KvEvent::kGet, 0, 1, 2, 3)}));
  EXPECT_FALSE(IsLinearizable(
      {Event(KvEvent::kPut, 1, 0, 0, 1), Event(KvEvent::kGet, 0, KvEvent::kAbsent, 2, 3)}));
}

TEST(Linearizability, ConcurrentRead_MaySeeEither) {
  EXPECT_TRUE(IsLinearizable({Event(KvEvent::kPut, 1, 0, 0, 9), Event(KvEvent::kGet, 0, 1, 2, 3)}));
  EXPECT_TRUE(IsLinearizable(
      {Event(KvEvent::kPut, 1, 0, 0, 9), Event(KvEvent::kGet, 0, KvEvent::kAbsent, 2, 3)}));
}

TEST(Linearizability, ReadsGoingBack_AreRefused) {
  EXPECT_FALSE(IsLinearizable({Event(KvEvent::kPut, 1, 0, 0, 9), Event(KvEvent::kGet, 0, 1, 2, 3),
                               Event(KvEvent::kGet, 0, KvEvent::kAbsent, 4, 5)}));
}

TEST(Linearizability, UnansweredWrite_MayAppearLateOrNever) {
  const KvEvent lost = Event(KvEvent::kPut, 7, 0, 0, 0, false);
  EXPECT_TRUE(IsLinearizable(
      {lost, Event(KvEvent::kGet, 0, KvEvent::kAbsent, 2, 3), Event(KvEvent::kGet, 0, 7, 4, 5)}));
  EXPECT_TRUE(IsLinearizable({lost, Event(KvEvent::kGet, 0, KvEvent::kAbsent, 2, 3)}));
}

TEST(Linearizability, Add_CountedTwice_IsRefused) {
  EXPECT_TRUE(IsLinearizable({Event(KvEvent::kAdd, 1, 1, 0, 1), Event(KvEvent::kAdd, 1, 2, 2, 3)}));
  EXPECT_FALSE(
      IsLinearizable({Event(KvEvent::kAdd, 1, 1, 0, 1), Event(KvEvent::kAdd, 1, 3, 2, 3)}));
}

TEST(Linearizability, Cas_TwoWinners_AreRefused) {
  KvEvent a = Event(KvEvent::kCas, 1, 1, 0, 5);
  a.expect = KvEvent::kAbsent;
  KvEvent b = Event(KvEvent::kCas, 2, 1, 0, 5);
  b.expect = KvEvent::kAbsent;
  EXPECT_FALSE(IsLinearizable({a, b}));
  b.result = 0;
  EXPECT_TRUE(IsLinearizable({a, b}));
}

TEST(Linearizability, LostWrite_IsFoundAmongManyOperations) {
  std::vector<KvEvent> events;
  for (int i = 0; i < 30; ++i) {
    events.push_back(Event(KvEvent::kPut, i, 0, 10 * i, 10 * i + 12));
    events.push_back(Event(KvEvent::kGet, 0, i, 10 * i + 13, 10 * i + 14));
  }
  // A read of value i overlaps the put of i + 1.
  EXPECT_TRUE(IsLinearizable(events));
  events[41].result = 3;
  EXPECT_FALSE(IsLinearizable(events));
}

TEST(Linearizability, MoreThan64Operations_TheFirstAreChecked) {
  std::vector<KvEvent> events;
  for (int i = 0; i < 200; ++i) events.push_back(Event(KvEvent::kAdd, 1, i + 1, 2 * i, 2 * i + 1));
  EXPECT_TRUE(IsLinearizable(events));
  events[20].result = 5;
  EXPECT_FALSE(IsLinearizable(events));
}

}  // namespace
}  // namespace muster::simulation
