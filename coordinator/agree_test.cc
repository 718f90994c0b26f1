#include "coordinator/agree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "coordinator/errors.h"

namespace muster::coordinator {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

const absl::Time kStart = absl::FromUnixSeconds(1000);

class AgreeTest : public ::testing::Test {
 protected:
  void Make(int world, bool counters_known = true) {
    alive_.assign(world, 7);
    set_ = std::make_unique<AgreeSet>(
        world, counters_known,
        [this](int rank) -> std::optional<uint64_t> {
          if (alive_[rank] == 0) return std::nullopt;
          return alive_[rank];
        },
        [](int rank) { return "rank " + std::to_string(rank); });
  }
  CallId Enter(int rank, uint64_t counter, std::vector<int> members = {}, int timeout = 0,
               int waited = 0) {
    const CallId call = next_call_++;
    v1::AgreeAliveRequest request;
    request.set_counter(counter);
    request.mutable_timeout()->set_seconds(timeout);
    request.mutable_waited()->set_seconds(waited);
    for (const int member : members) request.add_set(member);
    std::vector<AgreeSet::Done> done;
    errors_[call] = set_->Enter(call, request, rank, kStart, {}, &done);
    Take(done);
    return call;
  }
  void Die(int rank) {
    alive_[rank] = 0;
    std::vector<AgreeSet::Done> done;
    set_->RankGone(rank, {}, &done);
    Take(done);
  }
  void Take(const std::vector<AgreeSet::Done>& done) {
    for (const AgreeSet::Done& one : done) {
      journaled_ += one.journal ? 1 : 0;
      for (const CallId call : one.calls) answers_[call] = one.answer;
    }
  }
  bool Answered(CallId call) const { return answers_.contains(call); }
  std::vector<int> Alive(CallId call) {
    const auto reply = answers_.at(call)->Parse().agree_alive();
    return {reply.alive().begin(), reply.alive().end()};
  }

  std::vector<uint64_t> alive_;  // incarnations; 0: dead
  std::unique_ptr<AgreeSet> set_;
  CallId next_call_ = 1;
  std::map<CallId, std::shared_ptr<const Answer>> answers_;
  std::map<CallId, std::optional<v1::OpError>> errors_;
  int journaled_ = 0;
};

TEST_F(AgreeTest, AllInside_AllGetOneAnswer) {
  Make(3);
  const CallId a = Enter(0, 0);
  const CallId b = Enter(2, 0);
  EXPECT_FALSE(Answered(a));
  const CallId c = Enter(1, 0);
  EXPECT_THAT(Alive(a), ElementsAre(0, 1, 2));
  EXPECT_EQ(answers_[a], answers_[b]);
  EXPECT_EQ(answers_[a], answers_[c]);
  EXPECT_EQ(journaled_, 1);
}

TEST_F(AgreeTest, AfterARestart_TwoOpenSubsets_AreEnteredAgainInAnyOrder) {
  Make(4, /*counters_known=*/false);
  const CallId c = Enter(2, 1, {2, 3});
  const CallId a = Enter(0, 0, {0, 1});
  EXPECT_FALSE(errors_[a].has_value());
  Enter(3, 1, {2, 3});
  Enter(1, 0, {0, 1});
  EXPECT_THAT(Alive(c), ElementsAre(2, 3));
  EXPECT_THAT(Alive(a), ElementsAre(0, 1));
}

TEST_F(AgreeTest, AfterARestart_TheOneThatHasWaitedLongest_DecidesTheTimeLeft) {
  Make(4, /*counters_known=*/false);
  Enter(0, 0, {}, 100);
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(100));
  Enter(1, 0, {}, 100, /*waited=*/60);
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(40));
  Enter(2, 0, {}, 100, /*waited=*/10);
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(40));
}

TEST_F(AgreeTest, AfterARestart_WhoHasWaitedForItsTimeout_StillHasTheTimeOfALease) {
  Make(3, /*counters_known=*/false);
  set_->HoldFailuresUntil(kStart + absl::Seconds(9));
  const CallId a = Enter(0, 0, {}, 30, /*waited=*/50);
  Enter(1, 0, {}, 30, /*waited=*/50);
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(9));
  std::vector<AgreeSet::Done> done;
  set_->Tick(kStart + absl::Seconds(8), &done);
  EXPECT_TRUE(done.empty());
  Die(2);  // at the end of its lease
  EXPECT_THAT(Alive(a), ElementsAre(0, 1));
  Enter(0, 1, {}, 5, /*waited=*/50);
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(5));
}

TEST_F(AgreeTest, AfterARestart_LateCaller_HasThreeSeconds) {
  Make(3, /*counters_known=*/false);
  set_->HoldFailuresUntil(kStart - absl::Seconds(9));
  Enter(0, 0, {}, 30, /*waited=*/50);
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(3));
}

TEST_F(AgreeTest, WithoutARestart_WhatACallerHasWaited_ChangesNothing) {
  Make(3);
  Enter(0, 0, {}, 100, /*waited=*/60);
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(100));
}

TEST_F(AgreeTest, DeadBeforeOrAfterEntering_IsNotInTheAnswer) {
  Make(4);
  Die(3);
  const CallId a = Enter(0, 0);
  Enter(1, 0);
  Die(1);
  EXPECT_FALSE(Answered(a));
  Enter(2, 0);
  EXPECT_THAT(Alive(a), ElementsAre(0, 2));
}

TEST_F(AgreeTest, LastMissingDies_EndsIt) {
  Make(2);
  const CallId a = Enter(0, 0);
  Die(1);
  EXPECT_THAT(Alive(a), ElementsAre(0));
}

TEST_F(AgreeTest, ReplacedRank_IsWaitedForAgain) {
  Make(3);
  const CallId a = Enter(0, 0);
  Die(1);
  alive_[1] = 8;
  set_->RankReplaced(1);
  Enter(2, 0);
  EXPECT_FALSE(Answered(a));
  Enter(1, 0);
  EXPECT_THAT(answers_[a]->Parse().agree_alive().incarnations(), ElementsAre(7, 8, 7));
}

TEST_F(AgreeTest, Repeat_GetsTheSameAnswerAgain) {
  Make(2);
  const CallId a = Enter(0, 0);
  Enter(1, 0);
  Die(1);
  EXPECT_EQ(answers_[Enter(0, 0)], answers_[a]);
  EXPECT_EQ(journaled_, 1);
}

TEST_F(AgreeTest, Counter_MustFollow) {
  Make(2);
  EXPECT_EQ(errors_[Enter(0, 1)]->detail().reason(), v1::ERROR_REASON_BARRIER_COUNTER);
  Make(1);
  for (uint64_t counter = 0; counter < 70; ++counter) Enter(0, counter);
  EXPECT_EQ(errors_[Enter(0, 0)]->detail().reason(), v1::ERROR_REASON_RESULT_FORGOTTEN);
  Make(1, false);
  EXPECT_FALSE(errors_[Enter(0, 41)].has_value());
}

TEST_F(AgreeTest, TooManyOpen_AreRefused) {
  Make(2);
  for (uint64_t counter = 0; counter < 1024; ++counter)
    ASSERT_FALSE(errors_[Enter(0, counter)].has_value());
  EXPECT_EQ(errors_[Enter(0, 1024)]->detail().reason(), v1::ERROR_REASON_LIMIT);
  EXPECT_TRUE(Answered(Enter(1, 0)));
  EXPECT_FALSE(errors_[Enter(0, 1024)].has_value());
}

TEST_F(AgreeTest, Set_MustBeTheSameAndHoldTheCaller) {
  Make(3);
  EXPECT_EQ(errors_[Enter(0, 0, {1, 2})]->detail().field(), "set");
  EXPECT_EQ(errors_[Enter(0, 0, {0, 9})]->detail().field(), "set");
  Enter(0, 0, {0, 1});
  EXPECT_EQ(errors_[Enter(1, 0, {1, 2})]->detail().reason(), v1::ERROR_REASON_DESYNC);
}

TEST_F(AgreeTest, SetThatOnlyDeadRanksNamed_GivesWayToThatOfTheLiving) {
  Make(3);
  Enter(0, 0, {0, 1, 2});
  Die(0);
  const CallId a = Enter(1, 0, {1, 2});
  EXPECT_EQ(errors_[a], std::nullopt);
  EXPECT_EQ(errors_[Enter(2, 0, {0, 2})]->detail().reason(), v1::ERROR_REASON_DESYNC);
  EXPECT_FALSE(Answered(a));
  Enter(2, 0, {1, 2});
  EXPECT_THAT(Alive(a), ElementsAre(1, 2));
}

TEST_F(AgreeTest, Timeout_NamesTheLivingThatAreMissing) {
  Make(3);
  Die(2);
  const CallId a = Enter(0, 0, {}, 5);
  EXPECT_EQ(set_->NextDeadline(), kStart + absl::Seconds(5));
  std::vector<AgreeSet::Done> done;
  set_->Tick(kStart + absl::Seconds(5), &done);
  Take(done);
  EXPECT_THAT(answers_[a]->Parse().error().message(), HasSubstr("rank 1"));
  EXPECT_THAT(answers_[a]->Parse().error().detail().missing_ranks(), ElementsAre(1));
  EXPECT_EQ(set_->NextDeadline(), absl::InfiniteFuture());
}

TEST_F(AgreeTest, Restored_AnswerIsKept) {
  Make(2, false);
  v1::OpResult result;
  result.mutable_agree_alive()->add_alive(1);
  set_->Restore(5, result);
  EXPECT_THAT(Alive(Enter(0, 5)), ElementsAre(1));
}

TEST_F(AgreeTest, EndAll_TellsEveryone) {
  Make(2);
  const CallId a = Enter(0, 0);
  std::vector<AgreeSet::Done> done;
  set_->EndAll(MakeError(absl::StatusCode::kAborted, v1::ERROR_REASON_GENERATION_ENDED, "over"),
               &done);
  Take(done);
  EXPECT_EQ(answers_[a]->Parse().error().message(), "over");
}

}  // namespace
}  // namespace muster::coordinator
