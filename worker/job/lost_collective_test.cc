#include "worker/job/lost_collective.h"

#include <stdexcept>
#include <thread>
#include <vector>

#include "c10/util/Exception.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "worker/collective/collective_error.h"
#include "worker/job/fake_coordinator.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;

LostCollectiveSources Sources(int rank, std::vector<int> ranks) {
  LostCollectiveSources sources;
  sources.board = std::make_shared<ProgressBoard>();
  sources.rank = rank;
  sources.ranks = std::move(ranks);
  sources.timeout = absl::Seconds(600);
  sources.grace = absl::Milliseconds(200);
  return sources;
}

TEST(LostCollective, RanksElsewhere_AreNamedWithWhereTheyStand) {
  ProgressBoard::Facts mine;
  mine.step = 4;
  mine.last_collective = "AllReduce #7 bucket 1 of 2 (163 Float)";
  std::vector<MemberInfo> members(4);
  for (int rank = 0; rank < 4; ++rank) {
    members[rank].rank = rank;
    members[rank].host = "host";
    members[rank].pid = 100 + rank;
    members[rank].step = 4;
    members[rank].last_collective = mine.last_collective;
  }
  members[1].phase = "between steps";
  members[1].last_collective = "AllGather #6 (8 Float), done";
  members[1].heartbeat_age = absl::Seconds(40);
  EXPECT_EQ(DescribeLostCollective(mine, Sources(0, {0, 1, 2}), members),
            "rank 1 (host, pid 101) did not take part in AllReduce #7 bucket 1 of 2 (163 Float) "
            "after step 4 within 10m: it is in phase 'between steps' after step 4, last collective "
            "AllGather #6 (8 Float), done, last heard of 40s ago; ranks 0, 2 wait");
  // A rank that waits for another bucket still waits.
  members[2].last_collective = "AllReduce #7 bucket 2 of 2 (20 Float)";
  EXPECT_THAT(DescribeLostCollective(mine, Sources(0, {0, 1, 2}), members),
              HasSubstr("ranks 0, 2 wait"));
  // Two ranks are missing: one is dead, one is in the next call of the same kind.
  members[2].gone = "it was killed by signal 9";
  members[3].last_collective = "AllReduce #8 bucket 1 of 2 (163 Float)";
  const std::string text = DescribeLostCollective(mine, Sources(0, {0, 2, 3, 5}), members);
  EXPECT_THAT(text, AllOf(HasSubstr("rank 2 (host, pid 102) did not take part in AllReduce"),
                          HasSubstr(": it was killed by signal 9; rank 3 (host, pid 103) did not "
                                    "take part in it: it runs after step 4, last collective "
                                    "AllReduce #8 bucket 1 of 2"),
                          HasSubstr("rank 5, of which nothing is known"),
                          HasSubstr("; rank 0 waits"), Not(HasSubstr("rank 1 "))));
}

TEST(LostCollective, SurvivorLastHeardBeforeIt_IsNotBlamedBesideTheRankThatIsGone) {
  ProgressBoard::Facts mine;
  mine.step = 8;
  mine.last_collective = "AllReduce #27 bucket 1 of 1 (5 Float)";
  std::vector<MemberInfo> members(3);
  for (int rank = 0; rank < 3; ++rank) {
    members[rank].rank = rank;
    members[rank].host = "host";
    members[rank].pid = 100 + rank;
  }
  members[1].step = 8;
  members[2].gone = "it was killed by signal 9";
  EXPECT_EQ(DescribeLostCollective(mine, Sources(0, {0, 1, 2}), members, /*timed_out=*/false),
            "rank 2 (host, pid 102) did not take part in AllReduce #27 bucket 1 of 1 (5 Float) "
            "after step 8: it was killed by signal 9; rank 1 (host, pid 101) was not yet known to "
            "wait in it: it runs after step 8; rank 0 waits");
  // A rank that has waited for the whole timeout knows that rank 1 was elsewhere.
  EXPECT_THAT(DescribeLostCollective(mine, Sources(0, {0, 1, 2}), members),
              AllOf(HasSubstr("rank 1 (host, pid 101) did not take part in AllReduce #27"),
                    HasSubstr(" within 10m: it runs after step 8; rank 2 (host, pid 102) did not "
                              "take part in it: it was killed by signal 9")));
}

// As in hybrid sharding: a rank ends because it lost one of another group.
TEST(LostCollective, RankOfAnotherGroupThatFailed_IsNamed) {
  ProgressBoard::Facts mine;
  mine.step = 2;
  mine.last_collective = "AllReduce #69 (8 Float)";
  std::vector<MemberInfo> members(4);
  for (int rank = 0; rank < 4; ++rank) {
    members[rank].rank = rank;
    members[rank].host = "host";
    members[rank].pid = 100 + rank;
  }
  members[1].gone = "it was killed by signal 9";
  const auto describe = [&] {
    return DescribeLostCollective(mine, Sources(2, {0, 2}), members, /*timed_out=*/false);
  };
  constexpr char kCause[] =
      "; outside of this group, rank 1 (host, pid 101): it was killed by signal 9";
  EXPECT_EQ(describe(), std::string("rank 0 (host, pid 100) did not take part in AllReduce #69 (8 "
                                    "Float) after step 2: it runs after step 0; rank 2 waits") +
                            kCause);
  members[0].last_collective = mine.last_collective;
  EXPECT_THAT(describe(), AllOf(HasSubstr("all of ranks 0, 2 wait in it"), HasSubstr(kCause)));
  members[0].gone = "it has exited with code 1";
  EXPECT_THAT(describe(),
              AllOf(HasSubstr(": it has exited with code 1; rank 2 waits"), HasSubstr(kCause)));
  // That is not a failure.
  members[1].gone = "it has exited with code 0";
  EXPECT_THAT(describe(), Not(HasSubstr("rank 1")));
}

TEST(LostCollective, RankThatEndedEarlier_IsToldFromOneThatFailed) {
  ProgressBoard::Facts mine;
  mine.step = 4;
  mine.last_collective = "AllReduce #7";
  std::vector<MemberInfo> members(2);
  members[1].rank = 1;
  members[1].host = "host";
  members[1].pid = 101;
  constexpr char kAdvice[] =
      "; a rank whose program has ended cannot follow the others: all ranks must run the same "
      "number of steps and collectives (accelerator.join_uneven_inputs() is for ranks with fewer "
      "batches)";
  EXPECT_EQ(DescribeGone(members), "");
  for (const char* gone : {"it has left the job", "it has exited with code 0"}) {
    members[1].gone = gone;
    EXPECT_EQ(DescribeLostCollective(mine, Sources(0, {0, 1}), members),
              "rank 1 (host, pid 101) did not take part in AllReduce #7 after step 4: " +
                  members[1].gone + "; rank 0 waits" + kAdvice);
    EXPECT_EQ(DescribeGone(members), "rank 1 (host, pid 101): " + members[1].gone + kAdvice);
  }
  members[1].gone = "it has exited with code 3";
  EXPECT_EQ(DescribeGone(members), "rank 1 (host, pid 101): it has exited with code 3");
  // The cause is the one of several that did not end normally.
  members.push_back(members[1]);
  members[2].rank = 2;
  members[2].gone = "it has left the job";
  EXPECT_THAT(DescribeGone(members), AllOf(HasSubstr("rank 2 (host, pid 101): it has left the job"),
                                           Not(HasSubstr("join_uneven_inputs"))));
  members.pop_back();
  EXPECT_THAT(DescribeLostCollective(mine, Sources(0, {0, 1}), members),
              Not(HasSubstr("join_uneven_inputs")));
}

TEST(LostCollective, AllWaitInIt_BlamesTheNetwork) {
  ProgressBoard::Facts mine;
  mine.last_collective = "Barrier #3 (0 bytes)";
  std::vector<MemberInfo> members(2);
  members[1].rank = 1;
  members[1].last_collective = mine.last_collective;
  EXPECT_THAT(DescribeLostCollective(mine, Sources(0, {0, 1}), members),
              HasSubstr("though all of ranks 0, 1 wait in it: look at the network"));
  EXPECT_TRUE(IsExplained(DescribeLostCollective(mine, Sources(0, {0, 1}), members)));
  EXPECT_TRUE(IsExplained(DescribeLostCollective(mine, Sources(0, {0, 1}), {})));
  EXPECT_FALSE(IsExplained("Timed out waiting 600000ms"));
  EXPECT_FALSE(IsExplained("the preprocessing of shard 3 did not finish"));
}

TEST(LostCollective, NoneOnTheBoard_IsToldByThePhase) {
  ProgressBoard::Facts mine;
  mine.step = 4;
  mine.phase = "backward and gradient exchange";
  mine.last_collective = "AllReduce #8 (7 Double), done";
  std::vector<MemberInfo> members(3);
  for (int rank = 0; rank < 3; ++rank) {
    members[rank].rank = rank;
    members[rank].step = 4;
    members[rank].phase = rank == 1 ? "forward" : mine.phase;
    members[rank].last_collective = mine.last_collective;
  }
  EXPECT_THAT(DescribeLostCollective(mine, Sources(0, {0, 1, 2}), members),
              AllOf(HasSubstr("did not take part in the exchange of phase 'backward and gradient "
                              "exchange' after step 4 within 10m: it is in phase 'forward'"),
                    HasSubstr("; ranks 0, 2 wait")));
}

TEST(LostCollective, CoordinatorIsAsked) {
  FakeCoordinator fake;
  std::vector<LostCollectiveSources> sources;
  for (int rank = 0; rank < 3; ++rank) sources.push_back(Sources(rank, {0, 1, 2}));
  std::vector<std::thread> threads;
  for (int rank = 0; rank < 3; ++rank) {
    threads.emplace_back([&, rank] {
      CoordinatorClient::Options options;
      options.address = fake.address();
      options.job = "job";
      options.worker_id = "w" + std::to_string(rank);
      options.heartbeat_period = absl::ZeroDuration();
      options.progress = sources[rank].board;
      auto client = CoordinatorClient::Connect(std::move(options));
      ASSERT_TRUE(client.ok()) << client.status();
      JoinOptions join;
      join.min_workers = join.max_workers = 3;
      join.preferred_rank = rank;
      join.host = "host";
      ASSERT_TRUE((*client)->Join(join).ok());
      sources[rank].coordinator = *std::move(client);
    });
  }
  for (std::thread& thread : threads) thread.join();
  for (int rank = 0; rank < 3; ++rank) {
    ASSERT_NE(sources[rank].coordinator, nullptr);
    sources[rank].board->SetStep(4);
    sources[rank].board->SetPhase(rank == 1 ? "wait_for_everyone" : "backward");
    if (rank != 1) sources[rank].board->BeginCollective("AllReduce", 163, "Float");
    ASSERT_TRUE(sources[rank].coordinator->Beat().ok());
  }
  const std::string text =
      ExplainLostCollective(sources[0], "[gloo/transport] Timed out waiting 600000ms\nframe #0");
  EXPECT_THAT(text, AllOf(HasSubstr("rank 1 (host, pid "),
                          HasSubstr(") did not take part in AllReduce #1 (163 Float) after "
                                    "step 4 within 10m: it is in phase 'wait_for_everyone' after "
                                    "step 4; ranks 0, 2 wait"),
                          HasSubstr("([gloo/transport] Timed out waiting 600000ms)"),
                          Not(HasSubstr("frame #0"))));
  // A group that is a part of the job: only its ranks wait for one another, not for rank 1, which
  // is well.
  for (const int rank : {0, 2}) {
    sources[rank].ranks = {0, 2};
    sources[rank].grace = absl::Minutes(5);
  }
  std::thread other([&] { ExplainLostCollective(sources[2], "Connection closed by peer"); });
  const std::string lost = ExplainLostCollective(sources[0], "Connection closed by peer");
  EXPECT_THAT(lost, HasSubstr("did not finish since a connection was lost though all of ranks 0, 2 "
                              "wait in it"));
  EXPECT_TRUE(IsExplained(lost));
  other.join();
}

TEST(LostCollective, WithoutCoordinator_TheStoreTellsWhoWaits) {
  auto store = c10::make_intrusive<c10d::HashStore>();
  const auto explain = [&](int rank, std::vector<int> ranks, const char* collective,
                           absl::Duration grace, const char* error = "Timed out") {
    LostCollectiveSources sources = Sources(rank, std::move(ranks));
    sources.store = store;
    sources.grace = grace;
    sources.board->BeginCollective(collective, 8, "Float");
    return ExplainLostCollective(sources, error);
  };
  explain(2, {0, 1, 2}, "AllReduce", absl::Milliseconds(1));  // leaves its note
  for (const int rank : {0, 2}) {
    EXPECT_THAT(explain(rank, {0, 1, 2}, "AllReduce", absl::Milliseconds(1)),
                AllOf(HasSubstr("rank 1 did not take part in AllReduce #1 (8 Float) after step 0"),
                      HasSubstr("; ranks 0, 2 wait;"), HasSubstr("only a coordinator knows")));
  }
  EXPECT_THAT(explain(0, {0, 1}, "AllReduce", absl::Milliseconds(1), "Connection closed by peer"),
              AllOf(HasSubstr("rank 1 did not take part in AllReduce #1 (8 Float) after step 0; "),
                    Not(HasSubstr(" within "))));
  // Ranks that come one after the other are waited for only until they are there.
  std::thread other([&] { explain(2, {0, 2}, "Barrier", absl::Minutes(5)); });
  EXPECT_THAT(explain(0, {0, 2}, "Barrier", absl::Minutes(5)),
              HasSubstr(" did not finish within 10m though all of ranks 0, 2 wait in it"));
  other.join();
}

}  // namespace
}  // namespace muster
