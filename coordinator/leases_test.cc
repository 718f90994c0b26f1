#include "coordinator/leases.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "absl/strings/str_cat.h"

namespace muster::coordinator {
namespace {

using Kind = LeaseDecision::Kind;

const absl::Time kNow = absl::FromUnixSeconds(1'000'000);
constexpr absl::Duration kLength = absl::Seconds(6);

Silence NotAsked() {
  ADD_FAILURE() << "the silence does not decide";
  return {};
}

LeaseQuestion RanOut() {
  LeaseQuestion question;
  question.now = kNow;
  question.ends = kNow - absl::Seconds(1);
  return question;
}

TEST(JudgeLease, LeaseRuns_IsHeldUntilItsEnd) {
  LeaseQuestion question = RanOut();
  question.ends = kNow + absl::Seconds(4);
  const LeaseDecision decision = JudgeLease(question, NotAsked);
  EXPECT_EQ(decision.kind, Kind::kHeld);
  EXPECT_EQ(decision.again, question.ends);
  EXPECT_EQ(decision.why, "its lease runs");
}

TEST(JudgeLease, SilentWorkerWithTimeToReturn_IsLookedAtEarlier) {
  LeaseQuestion question = RanOut();
  question.ends = kNow + absl::Seconds(4);
  question.silent = true;
  EXPECT_EQ(JudgeLease(question, NotAsked).again, kNow + kLength / 4);
}

TEST(JudgeLease, NotAllWasRead_ReadsFirst) {
  LeaseQuestion question = RanOut();
  question.read_until = question.ends - absl::Milliseconds(1);
  const LeaseDecision decision = JudgeLease(question, NotAsked);
  EXPECT_EQ(decision.kind, Kind::kReadFirst);
  EXPECT_EQ(decision.again, kNow + kLength / 2);
}

TEST(JudgeLease, NotReadForLongerThanTheTolerance_Decides) {
  LeaseQuestion question = RanOut();
  question.ends = kNow - question.terms.outage_tolerance;
  question.read_until = absl::InfinitePast();
  const LeaseDecision decision = JudgeLease(question, [] {
    Silence silence;
    silence.worker = absl::Seconds(96);
    silence.generation = absl::ZeroDuration();
    return silence;
  });
  EXPECT_EQ(decision.kind, Kind::kLost);
  EXPECT_EQ(decision.unread, question.terms.outage_tolerance);
}

TEST(JudgeLease, GenerationHasEnded_OnlyKeysEnd) {
  LeaseQuestion question = RanOut();
  question.sealed = false;
  EXPECT_EQ(JudgeLease(question, NotAsked).kind, Kind::kEnded);
  question.waits = true;  // it asks for a seat, so it is alive
  EXPECT_EQ(JudgeLease(question, NotAsked).kind, Kind::kHeld);
}

TEST(JudgeLease, SilenceDecides_WithItsReason) {
  const LeaseDecision alone = JudgeLease(RanOut(), [] { return Silence(); });
  EXPECT_EQ(alone.kind, Kind::kLost);
  EXPECT_EQ(alone.why, "other workers of its generation are not silent");
  const LeaseDecision all = JudgeLease(RanOut(), [] {
    Silence silence;
    silence.generation = kLength;
    return silence;
  });
  EXPECT_EQ(all.kind, Kind::kSilent);
  EXPECT_EQ(all.again, kNow + kLength / 4);
  EXPECT_NE(all.why.find("all workers of its generation are silent"), std::string::npos) << all.why;
}

// A generation of `world_size` workers, whose leases begin at kNow.
class LeasesTest : public testing::Test {
 protected:
  LeasesTest() { leases_.Begin({.length = kLength, .outage_tolerance = absl::Seconds(90)}); }

  void Seal(int world_size) {
    std::vector<v1::SeatRecord> records(world_size);
    for (int i = 0; i < world_size; ++i) {
      records[i].set_worker_id(absl::StrCat("w", i));
      records[i].set_state(v1::WORKER_STATE_RUNNING);
    }
    members_.Seal(std::move(records));
    leases_.BeginGeneration(kNow);
  }
  LeaseDecision Judge(int rank, absl::Time now) {
    return leases_.Judge(rank, {.now = now, .read_until = absl::InfiniteFuture()},
                         [] { return false; });
  }
  std::vector<int> Due(absl::Time now) {
    std::vector<int> due;
    while (const std::optional<int> rank = leases_.TakeDue(now)) due.push_back(*rank);
    return due;
  }

  Membership members_;
  Agents agents_;
  Leases leases_{&members_, &agents_};
};

TEST_F(LeasesTest, NobodyIsDue_BeforeALeaseIsOver) {
  Seal(2);
  EXPECT_EQ(leases_.NextDeadline(), kNow + kLength);
  EXPECT_TRUE(Due(kNow + kLength - absl::Milliseconds(1)).empty());
  EXPECT_EQ(Due(kNow + kLength), (std::vector<int>{0, 1}));
  EXPECT_TRUE(Due(kNow + kLength).empty());
}

TEST_F(LeasesTest, RenewedWorker_IsHeld) {
  Seal(2);
  EXPECT_FALSE(leases_.Renew(0, kNow + absl::Seconds(5)));
  leases_.TakeDue(kNow + kLength);
  const LeaseDecision decision = Judge(0, kNow + kLength);
  EXPECT_EQ(decision.kind, Kind::kHeld);
  EXPECT_EQ(decision.again, kNow + absl::Seconds(5) + kLength);
  EXPECT_EQ(Judge(1, kNow + kLength).kind, Kind::kLost);
  EXPECT_EQ(leases_.lost_after(1), kLength);
}

TEST_F(LeasesTest, AllAreSilent_KeepsThemUntilTheyReturn) {
  Seal(2);
  const absl::Time late = kNow + kLength;
  for (const int rank : Due(late)) EXPECT_EQ(Judge(rank, late).kind, Kind::kSilent);
  EXPECT_EQ(leases_.silent(), 2);
  EXPECT_FALSE(leases_.silent_why().empty());
  EXPECT_EQ(leases_.SilentFor(late), kLength);
  EXPECT_FALSE(leases_.Renew(1, late + absl::Seconds(1)));
  EXPECT_TRUE(leases_.Renew(0, late + absl::Seconds(2)));  // the last one
  EXPECT_EQ(leases_.silent(), 0);
}

TEST_F(LeasesTest, OneReturns_TheOthersHaveTimeToReturn) {
  Seal(2);
  const absl::Time late = kNow + kLength;
  for (const int rank : Due(late)) Judge(rank, late);
  leases_.Renew(1, late + absl::Seconds(1));
  const LeaseDecision decision = Judge(0, late + absl::Seconds(2));
  EXPECT_EQ(decision.kind, Kind::kHeld);
  EXPECT_TRUE(leases_.is_silent(0));
}

TEST_F(LeasesTest, SomebodyComesWhoWaits_SilentOnesAreDueAtOnce) {
  Seal(1);
  leases_.JudgeAgain(kNow);
  EXPECT_TRUE(Due(kNow).empty());  // no worker is silent
  const absl::Time late = kNow + kLength;
  Due(late);
  Judge(0, late);
  leases_.JudgeAgain(late);
  EXPECT_EQ(leases_.NextDeadline(), late);
  EXPECT_EQ(Due(late), (std::vector<int>{0}));
}

TEST_F(LeasesTest, WorkerIsGone_IsNeitherSilentNorDue) {
  Seal(1);
  const absl::Time late = kNow + kLength;
  Due(late);
  Judge(0, late);
  leases_.Gone(0);
  members_.Gone(0, v1::WORKER_STATE_EXITED, v1::ExitCause());
  EXPECT_EQ(leases_.silent(), 0);
  EXPECT_TRUE(Due(late + absl::Hours(1)).empty());
}

TEST_F(LeasesTest, GenerationEnds_EachLeaseIsJudgedOnceMore) {
  Seal(3);
  members_.Gone(2, v1::WORKER_STATE_EXITED, v1::ExitCause());
  members_.End("why not", {}, kNow);
  leases_.EndGeneration();
  leases_.Renew(1, kNow + absl::Seconds(1));
  const absl::Time late = kNow + kLength;
  EXPECT_EQ(Due(late), (std::vector<int>{0, 1}));
  EXPECT_EQ(Judge(0, late).kind, Kind::kEnded);
  EXPECT_EQ(Judge(1, late).kind, Kind::kHeld);
  EXPECT_FALSE(leases_.Runs(members_.at(0), late));
  EXPECT_TRUE(leases_.Runs(members_.at(1), late));
  EXPECT_EQ(Due(late + absl::Seconds(1)), (std::vector<int>{1}));
  EXPECT_EQ(Judge(1, late + absl::Seconds(1)).kind, Kind::kEnded);
  EXPECT_TRUE(Due(late + absl::Hours(1)).empty());
}

TEST_F(LeasesTest, GenerationEnds_WhatWasUnreadIsOverOnce) {
  Seal(1);
  members_.End("why not", {}, kNow);
  leases_.EndGeneration();
  const absl::Time late = kNow + kLength;
  EXPECT_EQ(Due(late), (std::vector<int>{0}));
  const LeaseDecision decision =
      leases_.Judge(0, {.now = late, .read_until = kNow}, [] { return false; });
  EXPECT_EQ(decision.kind, Kind::kReadFirst);
  EXPECT_FALSE(leases_.IsOver(0, late)) << "it may have been heard";
  leases_.CaughtUp(late);
  EXPECT_EQ(Due(late), (std::vector<int>{0}));
  EXPECT_EQ(Judge(0, late).kind, Kind::kEnded);
  EXPECT_TRUE(leases_.IsOver(0, late));
  EXPECT_TRUE(Due(late + absl::Hours(1)).empty());
  leases_.Renew(0, late + absl::Seconds(1));
  EXPECT_FALSE(leases_.IsOver(0, late + absl::Seconds(2)));
}

TEST_F(LeasesTest, GenerationEndsAfterACut_OthersAreNotOverWhileTheyMayReturn) {
  Seal(3);
  const absl::Time late = kNow + kLength;
  for (const int rank : Due(late)) EXPECT_EQ(Judge(rank, late).kind, Kind::kSilent);
  leases_.Renew(1, late);
  members_.End("why not", {}, late);
  leases_.EndGeneration();
  const absl::Time back = late + leases_.TimeToReturn();
  EXPECT_FALSE(leases_.IsOver(0, back - absl::Milliseconds(1)));
  EXPECT_EQ(Due(back), (std::vector<int>{0, 1, 2}));
  EXPECT_EQ(Judge(0, back).kind, Kind::kEnded);
  EXPECT_TRUE(leases_.IsOver(0, back));
}

TEST_F(LeasesTest, WhatWasUnread_IsDueWhenItHasBeenRead) {
  Seal(1);
  const absl::Time late = kNow + kLength;
  Due(late);
  const LeaseDecision decision =
      leases_.Judge(0, {.now = late, .read_until = kNow}, [] { return false; });
  EXPECT_EQ(decision.kind, Kind::kReadFirst);
  EXPECT_TRUE(leases_.AwaitsReading());
  leases_.CaughtUp(late + absl::Milliseconds(5));
  EXPECT_FALSE(leases_.AwaitsReading());
  EXPECT_EQ(leases_.NextDeadline(), late + absl::Milliseconds(5));
}

TEST_F(LeasesTest, ProcessWasPaused_LeasesBeginAgain) {
  Seal(1);
  const absl::Time later = kNow + absl::Hours(1);
  EXPECT_FALSE(leases_.AnyRuns(later));
  leases_.Resume(later);
  EXPECT_TRUE(leases_.AnyRuns(later));
  EXPECT_EQ(leases_.FloorEnds(), later + kLength);
  Due(later);
  EXPECT_EQ(Judge(0, later).kind, Kind::kHeld);
}

}  // namespace
}  // namespace muster::coordinator
