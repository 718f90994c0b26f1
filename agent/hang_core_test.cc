#include "agent/hang_core.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "rpc/session/duration.h"

namespace muster::agent {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr absl::Duration kTimeout = absl::Minutes(2);

class HangCoreTest : public ::testing::Test {
 protected:
  HangCoreTest() {
    members_.set_generation(1);
    for (int rank = 0; rank < 4; ++rank) {
      v1::Member* const member = members_.add_members();
      member->set_rank(rank);
      member->set_worker_id(absl::StrCat("w", rank));
      member->set_incarnation(100 + rank);
      member->set_state(v1::WORKER_STATE_RUNNING);
      member->set_host("n7");
      member->set_pid(40 + rank);
      member->set_last_step(12);
      member->set_phase("backward and gradient exchange");
      member->set_last_collective("AllReduce #41 (1,024 Float)");
    }
  }
  v1::Member* Of(int rank) { return members_.mutable_members(rank); }
  // Looks as often as the watch does; returns the last hang that was reported.
  std::optional<Hang> Watch(absl::Duration time) {
    std::optional<Hang> told;
    for (const absl::Time end = now_ + time; now_ < end;) {
      now_ += HangCore::Period(kTimeout);
      if (std::optional<Hang> hang = core_.Look(members_, now_)) told = hang;
    }
    return told;
  }

  v1::GetMembersReply members_;
  absl::Time now_ = absl::FromUnixSeconds(1'700'000'000);
  HangCore core_{kTimeout};
};

TEST_F(HangCoreTest, NoProgressOfAnyRank_IsToldOnceWithWhoIsWaitedFor) {
  Of(2)->set_phase("between steps");
  Of(2)->set_last_collective("AllReduce #40 (1,024 Float), done");
  EXPECT_FALSE(Watch(kTimeout).has_value());
  const std::optional<Hang> hang = Watch(absl::Minutes(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->rank, 2);
  EXPECT_EQ(hang->why,
            "no rank has shown progress for 2m: rank 2 (pid 42 on n7, step 12, between steps, "
            "AllReduce #40 (1,024 Float), done); 3 others wait: rank 0 (pid 40 on n7, step 12, "
            "backward and gradient exchange, AllReduce #41 (1,024 Float))");
  EXPECT_FALSE(Watch(absl::Hours(1)).has_value()) << "once is enough";
  members_.set_generation(2);
  EXPECT_TRUE(Watch(absl::Hours(1)).has_value());
}

TEST_F(HangCoreTest, AllWaitOrNoneDoes_NamesTheFirstRanksAndNoCulprit) {
  std::optional<Hang> hang = Watch(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->rank, -1);
  EXPECT_THAT(hang->why, AllOf(HasSubstr("rank 0"), HasSubstr("rank 3"), Not(HasSubstr("wait:"))));
  // A single rank.
  members_.mutable_members()->DeleteSubrange(1, 3);
  members_.set_generation(2);
  Of(0)->clear_last_collective();
  hang = Watch(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_EQ(hang->why,
            "no rank has shown progress for 2m: rank 0 (pid 40 on n7, step 12, backward and "
            "gradient exchange)");
}

TEST_F(HangCoreTest, AnyProgressOfOneRank_BeginsAnew) {
  const auto later = [&](auto change) {
    EXPECT_FALSE(Watch(kTimeout - absl::Seconds(20)).has_value());
    change(Of(3));
  };
  for (int i = 0; i < 5; ++i) {
    later([&](v1::Member* member) { member->set_last_step(13 + i); });
    later([&](v1::Member* member) { member->set_phase(absl::StrCat("phase ", i)); });
    later([&](v1::Member* member) { member->set_last_collective(absl::StrCat("Gather #", i)); });
    later([&](v1::Member* member) { member->set_incarnation(200 + i); });
  }
  EXPECT_TRUE(Watch(absl::Hours(1)).has_value());
}

// Whenever the watch looks, a process that advances is in the backward of the same micro step.
TEST_F(HangCoreTest, CountedProgressThatLooksTheSame_IsNoHang) {
  for (int rank = 0; rank < 4; ++rank) Of(rank)->set_progress(500);
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(Watch(kTimeout - absl::Seconds(20)).has_value());
    Of(1)->set_progress(501 + i);
  }
  EXPECT_TRUE(Watch(absl::Hours(1)).has_value());
}

TEST_F(HangCoreTest, CountedProgressThatStands_IsAHangWhateverIsShown) {
  for (int rank = 0; rank < 4; ++rank) Of(rank)->set_progress(500);
  ASSERT_FALSE(Watch(kTimeout).has_value());
  // Read at another moment than the count.
  Of(1)->set_phase("between steps");
  EXPECT_TRUE(Watch(absl::Minutes(1)).has_value());
}

TEST_F(HangCoreTest, RanksOfAnOlderProgramAmongOthers_AreJudgedByWhatTheyShow) {
  for (int rank = 1; rank < 4; ++rank) Of(rank)->set_progress(500);
  for (int i = 0; i < 5; ++i) {
    EXPECT_FALSE(Watch(kTimeout - absl::Seconds(20)).has_value());
    Of(0)->set_last_step(13 + i);
  }
  EXPECT_TRUE(Watch(absl::Hours(1)).has_value());
}

TEST_F(HangCoreTest, BeforeTheFirstStep_NothingHangs) {
  for (int rank = 0; rank < 4; ++rank) Of(rank)->set_last_step(0);
  EXPECT_FALSE(Watch(absl::Hours(10)).has_value());
  // Not all ranks have to step: one that never does may be the one that hangs.
  Of(1)->set_last_step(1);
  EXPECT_TRUE(Watch(absl::Hours(1)).has_value());
}

TEST_F(HangCoreTest, WhileARankSavesOrLoads_NoTimePasses) {
  for (const char* phase : {"save_state", "load_state", "load_weights"}) {
    Of(1)->set_phase(phase);
    EXPECT_FALSE(Watch(absl::Hours(3)).has_value()) << phase;
  }
  Of(1)->set_phase("between steps");
  EXPECT_FALSE(Watch(kTimeout - absl::Seconds(20)).has_value());
  EXPECT_TRUE(Watch(absl::Minutes(1)).has_value());
}

TEST_F(HangCoreTest, WhatIsNotKnown_IsNoHang) {
  // The rank is silent.
  *Of(2)->mutable_heartbeat_age() = rpc::ToProto(absl::Minutes(1));
  EXPECT_FALSE(Watch(absl::Hours(1)).has_value());
  Of(2)->clear_heartbeat_age();
  // The coordinator was away.
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(Watch(kTimeout - absl::Seconds(20)).has_value());
    core_.LookInVain();
  }
  // This process was stopped.
  for (int i = 0; i < 10; ++i) {
    EXPECT_FALSE(Watch(kTimeout - absl::Seconds(20)).has_value());
    now_ += absl::Hours(8);
  }
  EXPECT_TRUE(Watch(absl::Hours(1)).has_value());
}

TEST_F(HangCoreTest, SurvivorsOfALoss_WaitForTheNextGeneration) {
  v1::Member* const lost = Of(3);
  lost->set_state(v1::WORKER_STATE_EXITED);
  lost->mutable_exit()->set_signal(9);
  EXPECT_FALSE(Watch(kTimeout + absl::Seconds(30)).has_value());
  lost->mutable_exit()->set_signal(0);
  lost->mutable_exit()->set_exit_code(1);
  EXPECT_FALSE(Watch(kTimeout + absl::Seconds(30)).has_value());
  for (const v1::WorkerState state : {v1::WORKER_STATE_LOST, v1::WORKER_STATE_FENCED}) {
    lost->set_state(state);
    EXPECT_FALSE(Watch(kTimeout + absl::Seconds(30)).has_value());
  }
  // A survivor waits for its next seat already.
  lost->set_state(v1::WORKER_STATE_LEFT);
  v1::Member* const waiting = members_.add_members();
  waiting->set_rank(-1);
  waiting->set_worker_id("w1");
  waiting->set_state(v1::WORKER_STATE_JOINING);
  EXPECT_FALSE(Watch(kTimeout + absl::Seconds(30)).has_value());
  // A spare always waits.
  waiting->set_worker_id("spare");
  EXPECT_FALSE(Watch(kTimeout - absl::Seconds(20)).has_value()) << "the time begins now";
  EXPECT_TRUE(Watch(absl::Hours(1)).has_value());
}

// The rank's process may be stopped: it has not ended, and so is not started again.
TEST_F(HangCoreTest, LossThatNobodyMakesGood_IsAHangInTheEnd) {
  Of(3)->set_state(v1::WORKER_STATE_LOST);
  EXPECT_FALSE(Watch(absl::Minutes(29)).has_value());
  EXPECT_TRUE(Watch(absl::Minutes(2) + kTimeout).has_value());
}

TEST_F(HangCoreTest, RanksThatHaveEnded_DoNotCount) {
  Of(0)->set_state(v1::WORKER_STATE_EXITED);
  std::optional<Hang> hang = Watch(absl::Hours(1));
  ASSERT_TRUE(hang.has_value());
  EXPECT_THAT(hang->why, AllOf(Not(HasSubstr("rank 0")), HasSubstr("rank 1")));
  members_.set_generation(2);
  for (int rank = 0; rank < 4; ++rank) Of(rank)->set_state(v1::WORKER_STATE_EXITED);
  EXPECT_FALSE(Watch(absl::Hours(1)).has_value());
  // A program without the library has no ranks.
  members_.Clear();
  EXPECT_FALSE(Watch(absl::Hours(1)).has_value());
}

TEST_F(HangCoreTest, ProgressWhileStacksAreTaken_IsNoHang) {
  ASSERT_TRUE(Watch(absl::Hours(1)).has_value());
  EXPECT_TRUE(core_.StillHangs(members_));
  Of(1)->set_last_step(13);
  EXPECT_FALSE(core_.StillHangs(members_));
  EXPECT_TRUE(Watch(absl::Hours(1)).has_value()) << "and may hang again";
}

TEST(GroupHungRanksTest, EqualStacksAreTogether_AndTheWholeIsBounded) {
  v1::GetMembersReply members;
  std::vector<v1::RankStack> stacks;
  for (int rank = 0; rank < 200; ++rank) {
    v1::Member* const member = members.add_members();
    member->set_rank(rank);
    member->set_last_step(12);
    v1::RankStack& stack = stacks.emplace_back();
    stack.mutable_worker()->set_rank(rank);
    stack.mutable_worker()->set_native_stack(rank < 3 ? "#0 poll" : absl::StrCat("#0 f", rank));
  }
  stacks[4].set_missing("its agent is away");
  std::vector<v1::HungRanks> groups = GroupHungRanks(stacks, members, 64 << 10);
  ASSERT_EQ(groups.size(), 198u);
  EXPECT_EQ(groups[0].ranks_size(), 3);
  EXPECT_EQ(groups[0].doing(), "step 12");
  EXPECT_EQ(groups[0].stack(), "#0 poll");
  EXPECT_EQ(groups[2].doing(), "step 12; no stack: its agent is away");
  EXPECT_EQ(groups[2].stack(), "");
  stacks[5].mutable_worker()->set_native_stack(std::string(1 << 20, 'x'));
  groups = GroupHungRanks(stacks, members, 1000);
  size_t bytes = 0;
  for (const v1::HungRanks& group : groups) bytes += group.ByteSizeLong();
  EXPECT_LE(bytes, 1000u);
  EXPECT_GT(groups.size(), 10u);
}

}  // namespace
}  // namespace muster::agent
