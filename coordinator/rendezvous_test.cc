#include "coordinator/rendezvous.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <vector>

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);
constexpr absl::Duration kLastCall = absl::Seconds(5);

SealQuestion Question(int min, int max, int ordinary) {
  SealQuestion question;
  question.min_workers = min;
  question.max_workers = max;
  question.ordinary = ordinary;
  question.last_call = kLastCall;
  question.now = kNow;
  return question;
}

TEST(DecideSeal, FixedSize_WaitsForAllByNumber) {
  const SealDecision decision = DecideSeal(Question(4, 4, 2));
  EXPECT_FALSE(decision.seal);
  EXPECT_EQ(decision.world_size, 0);
  EXPECT_EQ(decision.last_call_ends, absl::InfiniteFuture());
  EXPECT_EQ(decision.why, "2 of 4 workers");
}

TEST(DecideSeal, AllHere_SealsAtOnce) {
  const SealDecision decision = DecideSeal(Question(4, 4, 4));
  EXPECT_TRUE(decision.seal);
  EXPECT_EQ(decision.world_size, 4);
  EXPECT_EQ(decision.why, "the maximum number of workers has joined: 4");
}

TEST(DecideSeal, ElasticTooFew_SaysAtLeast) {
  EXPECT_EQ(DecideSeal(Question(2, 8, 1)).why, "1 of at least 2 workers");
}

TEST(DecideSeal, ElasticEnough_BeginsTheLastCallOnce) {
  SealQuestion question = Question(2, 8, 3);
  const SealDecision begun = DecideSeal(question);
  EXPECT_FALSE(begun.seal);
  EXPECT_EQ(begun.last_call_ends, kNow + kLastCall);
  EXPECT_EQ(begun.why, "more workers until the last call ends: 3 of at most 8 workers are here");
  question.now = kNow + absl::Seconds(1);
  question.last_call_ends = begun.last_call_ends;
  EXPECT_EQ(DecideSeal(question).last_call_ends, kNow + kLastCall);
}

TEST(DecideSeal, LastCallOver_SealsWithThoseThatCame) {
  SealQuestion question = Question(2, 8, 3);
  question.last_call_ends = kNow;
  const SealDecision decision = DecideSeal(question);
  EXPECT_TRUE(decision.seal);
  EXPECT_EQ(decision.world_size, 3);
  EXPECT_EQ(decision.why, "the last call has ended with 3 of at most 8 workers");
}

TEST(DecideSeal, LivingOnesAreNotBack_WaitsForThemAlsoWithTheMaximum) {
  SealQuestion question = Question(1, 2, 2);
  question.claims_end = kNow + absl::Seconds(6);
  const SealDecision decision = DecideSeal(question);
  EXPECT_FALSE(decision.seal);
  EXPECT_EQ(decision.last_call_ends, absl::InfiniteFuture());
  EXPECT_EQ(decision.why, "workers that had a seat, live and are not back yet");
  question.now = question.claims_end;
  EXPECT_TRUE(DecideSeal(question).seal);
}

TEST(DecideSeal, LivingOnesAreNotBackWhenTheLastCallEnds_WaitsForThem) {
  SealQuestion question = Question(1, 3, 1);
  question.last_call_ends = kNow;
  question.claims_end = kNow + absl::Seconds(6);
  const SealDecision decision = DecideSeal(question);
  EXPECT_FALSE(decision.seal);
  EXPECT_EQ(decision.last_call_ends, question.claims_end);
  question.now = question.claims_end;
  question.last_call_ends = decision.last_call_ends;
  EXPECT_TRUE(DecideSeal(question).seal);
}

TEST(DecideSeal, TooFewAfterTheLastCallBegan_EndsIt) {
  SealQuestion question = Question(2, 8, 1);
  question.last_call_ends = kNow;
  const SealDecision decision = DecideSeal(question);
  EXPECT_FALSE(decision.seal);
  EXPECT_EQ(decision.last_call_ends, absl::InfiniteFuture());
}

TEST(DecideSeal, MustBeDivisible_SaysSo) {
  SealQuestion question = Question(4, 16, 3);
  question.divisible_by = 8;
  EXPECT_EQ(DecideSeal(question).why, "5 of at least 8 workers (a multiple of 8)");
  question.ordinary = 16;
  EXPECT_TRUE(DecideSeal(question).seal);
}

TEST(DecideSeal, SpareForALostWorker_WaitsForTheSurvivorsOnly) {
  SealQuestion question = Question(3, 3, 2);
  question.spares = 1;
  question.former_world = 3;
  EXPECT_THAT(DecideSeal(question).why, HasSubstr("last call"));
  question.survivors_wait = true;
  const SealDecision decision = DecideSeal(question);
  EXPECT_TRUE(decision.seal);
  EXPECT_EQ(decision.world_size, 3);
  EXPECT_EQ(decision.why, "spares replace the lost workers: 3 workers, as before");
}

TEST(DecideSeal, OnlySparesAndQuarantinedAreHere_SaysSo) {
  SealQuestion question = Question(4, 4, 1);
  question.spares = 1;
  question.blocked = 2;
  EXPECT_EQ(DecideSeal(question).why,
            "3 of 4 workers; spares here: 1; here on quarantined hosts: 2");
}

TEST(DecideSeal, LastResorts_CountIfNothingElseHelps) {
  SealQuestion question = Question(2, 2, 1);
  question.last_resorts = 1;
  const SealDecision begun = DecideSeal(question);
  EXPECT_FALSE(begun.seal);
  EXPECT_EQ(begun.world_size, 2);
  question.last_call_ends = kNow;
  EXPECT_TRUE(DecideSeal(question).seal);
}

Waiter* Add(Rendezvous* rendezvous, const std::string& worker_id, uint64_t incarnation,
            WaiterKind kind = WaiterKind::kOrdinary) {
  Waiter* const waiter = rendezvous->Place(worker_id, std::nullopt);
  waiter->request.mutable_fence()->set_worker_id(worker_id);
  waiter->request.mutable_fence()->set_incarnation(incarnation);
  rendezvous->SetKind(waiter, kind);
  return waiter;
}

TEST(Rendezvous, Place_IsKeptAndCounted) {
  Rendezvous rendezvous;
  Add(&rendezvous, "w1", 11);
  Add(&rendezvous, "w0", 10, WaiterKind::kSpare);
  EXPECT_EQ(rendezvous.size(), 2);
  EXPECT_EQ(rendezvous.Count(WaiterKind::kOrdinary), 1);
  EXPECT_EQ(rendezvous.Count(WaiterKind::kSpare), 1);
  EXPECT_TRUE(rendezvous.Waits("w0", 10));
  EXPECT_FALSE(rendezvous.Waits("w0", 11));
  EXPECT_EQ(rendezvous.Place("w1", std::nullopt)->order, 1u);
  const Waiter removed = rendezvous.Remove("w1");
  EXPECT_EQ(removed.request.fence().incarnation(), 11u);
  // A newer start of the worker takes the place of the older one.
  EXPECT_EQ(rendezvous.Place("w1", removed.order)->order, 1u);
  std::vector<std::string> arrivals;
  rendezvous.Place("w1", std::nullopt)->request.mutable_fence()->set_worker_id("w1");
  for (const Waiter* waiter : rendezvous.ByArrival()) {
    arrivals.push_back(waiter->request.fence().worker_id());
  }
  EXPECT_THAT(arrivals, ElementsAre("w1", "w0"));
  EXPECT_THAT(rendezvous.ByName(), ElementsAre("w0", "w1"));
}

TEST(Rendezvous, Deadlines_InTheirOrder) {
  Rendezvous rendezvous;
  Waiter* const first = Add(&rendezvous, "w0", 10);
  rendezvous.SetDeadline("w0", first, kNow + absl::Seconds(20));
  rendezvous.SetDeadline("w1", Add(&rendezvous, "w1", 11), kNow + absl::Seconds(10));
  EXPECT_EQ(rendezvous.NextDeadline(), kNow + absl::Seconds(10));
  EXPECT_EQ(rendezvous.FirstExpired(kNow), std::nullopt);
  EXPECT_EQ(rendezvous.FirstExpired(kNow + absl::Seconds(10)), "w1");
  rendezvous.Remove("w1");
  EXPECT_EQ(rendezvous.waits_until(), kNow + absl::Seconds(20));
  rendezvous.SetDeadline("w0", rendezvous.Place("w0", std::nullopt), absl::InfiniteFuture());
  EXPECT_EQ(rendezvous.NextDeadline(), absl::InfiniteFuture());
}

TEST(Rendezvous, Decide_KeepsTheLastCallAndTheReason) {
  Rendezvous rendezvous;
  Add(&rendezvous, "w0", 10);
  EXPECT_FALSE(rendezvous.Decide(Question(2, 8, 0)).seal);
  EXPECT_EQ(rendezvous.why(), "1 of at least 2 workers");
  Add(&rendezvous, "w1", 11);
  rendezvous.Decide(Question(2, 8, 0));
  EXPECT_TRUE(rendezvous.in_last_call());
  EXPECT_EQ(rendezvous.waits_until(), kNow + kLastCall);
  EXPECT_TRUE(rendezvous.IsDue(kNow + kLastCall));
  SealQuestion later = Question(2, 8, 0);
  later.now = kNow + kLastCall;
  EXPECT_TRUE(rendezvous.Decide(later).seal);
  rendezvous.Hold("a free seat");
  EXPECT_EQ(rendezvous.why(), "a free seat");
  EXPECT_FALSE(rendezvous.in_last_call());
}

TEST(Rendezvous, LastOneGone_NothingIsDue) {
  Rendezvous rendezvous;
  Add(&rendezvous, "w0", 10);
  rendezvous.Decide(Question(1, 8, 0));
  rendezvous.CheckBy(kNow);
  EXPECT_TRUE(rendezvous.IsDue(kNow));
  rendezvous.Remove("w0");
  EXPECT_EQ(rendezvous.NextDeadline(), absl::InfiniteFuture());
  EXPECT_THAT(rendezvous.why(), IsEmpty());
}

TEST(Rendezvous, Reclassify_MovesTheCounts) {
  Rendezvous rendezvous;
  Add(&rendezvous, "w0", 10);
  rendezvous.Reclassify([](const v1::JoinRequest&) { return WaiterKind::kBlocked; });
  EXPECT_EQ(rendezvous.Count(WaiterKind::kOrdinary), 0);
  EXPECT_EQ(rendezvous.Count(WaiterKind::kBlocked), 1);
}

}  // namespace
}  // namespace muster::coordinator
