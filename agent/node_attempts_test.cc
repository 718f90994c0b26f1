#include "agent/node_attempts.h"

#include <gtest/gtest.h>

#include <map>
#include <random>
#include <set>

#include "rpc/session/duration.h"

namespace muster::agent {
namespace {

const absl::Time kNow = absl::FromUnixSeconds(1'700'000'000);

v1::SyncNodeReply Reply(const std::vector<AttemptKey>& wanted, bool stop = false,
                        const std::string& cluster = "c") {
  v1::SyncNodeReply reply;
  reply.mutable_header()->set_cluster_id(cluster);
  for (const auto& [job, attempt] : wanted) {
    v1::NodeAssignment* const assignment = reply.add_assignments();
    assignment->set_job_id(job);
    assignment->set_attempt(attempt);
    *assignment->mutable_spec()->add_argv() = "./train";
    assignment->mutable_spec()->mutable_stop_grace()->set_seconds(10);
    assignment->set_stop(stop);
  }
  return reply;
}

v1::AttemptEnd Succeeded() {
  v1::AttemptEnd end;
  end.set_end_class(v1::END_CLASS_SUCCEEDED);
  return end;
}

using Keys = std::vector<AttemptKey>;

TEST(NodeAttemptsTest, Assignment_StartsOnce_AndItsEndIsReportedUntilItIsGone) {
  NodeAttempts attempts;
  EXPECT_EQ(attempts.Apply(Reply({{"j", 1}}), kNow).start.size(), 1u);
  EXPECT_TRUE(attempts.Apply(Reply({{"j", 1}}), kNow).start.empty());
  attempts.Ended({"j", 1}, Succeeded(), 5, kNow);
  for (int i = 0; i < 2; ++i) {
    EXPECT_TRUE(attempts.Apply(Reply({{"j", 1}}), kNow).start.empty());
    v1::SyncNodeRequest request;
    attempts.FillReports(kNow, &request);
    ASSERT_EQ(request.attempts_size(), 1);
    EXPECT_EQ(request.attempts(0).state(), v1::PLACEMENT_STATE_ENDED);
    EXPECT_EQ(request.cluster_id(), "c");
  }
  EXPECT_EQ(attempts.Apply(Reply({}), kNow).forget, (Keys{{"j", 1}}));
}

TEST(NodeAttemptsTest, FailedProcess_IsReportedWithItsAge_ByAClockThatDoesNotJump) {
  NodeAttempts attempts;
  attempts.Apply(Reply({{"j", 1}, {"j", 2}, {"j", 3}}), kNow);
  v1::AttemptEnd end;
  end.set_end_class(v1::END_CLASS_PROCESS_FAILED);
  end.set_failed_unix_ms(10'000);
  // The wall clock differs from the monotonic clock.
  attempts.Ended({"j", 1}, end, 12'500, kNow);
  attempts.Ended({"j", 2}, Succeeded(), 12'500, kNow);
  end.set_failed_unix_ms(absl::ToUnixMillis(kNow) - 700);
  attempts.Adopt({"j", 3}, /*running=*/false, end, kNow, kNow, kNow);
  v1::SyncNodeRequest request;
  attempts.FillReports(kNow + absl::Seconds(1), &request);
  ASSERT_EQ(request.attempts_size(), 3);
  EXPECT_EQ(rpc::FromProto(request.attempts(0).failed_ago()), absl::Milliseconds(3500));
  EXPECT_FALSE(request.attempts(1).has_failed_ago());
  EXPECT_EQ(rpc::FromProto(request.attempts(2).failed_ago()), absl::Milliseconds(1700));
}

v1::SyncNodeReply Restarts(int restarts, bool stop = false) {
  v1::SyncNodeReply reply = Reply({{"j", 1}}, stop);
  reply.mutable_assignments(0)->set_restarts(restarts);
  reply.mutable_assignments(0)->mutable_restart_delay()->set_seconds(3);
  return reply;
}

TEST(NodeAttemptsTest, RestartThatIsAskedFor_IsReportedUntilItIsAllowed_AndAllowedOnce) {
  NodeAttempts attempts;
  attempts.Apply(Reply({{"j", 1}}), kNow);
  v1::AttemptEnd end;
  end.set_end_class(v1::END_CLASS_PROCESS_FAILED);
  end.set_failed_unix_ms(9'000);
  const uint64_t version = attempts.version();
  attempts.Ask({"j", 1}, 1, end, 10'000, kNow);
  EXPECT_GT(attempts.version(), version);
  attempts.Ask({"j", 1}, 1, end, 10'000, kNow);
  EXPECT_EQ(attempts.version(), version + 1);
  const auto report = [&] {
    v1::SyncNodeRequest request;
    attempts.FillReports(kNow + absl::Seconds(1), &request);
    return request.attempts(0);
  };
  EXPECT_EQ(report().restart(), 1);
  EXPECT_EQ(report().state(), v1::PLACEMENT_STATE_RUNNING);
  EXPECT_EQ(report().end().end_class(), v1::END_CLASS_PROCESS_FAILED);
  EXPECT_EQ(report().ended_unix_ms(), 10'000);
  EXPECT_EQ(rpc::FromProto(report().failed_ago()), absl::Seconds(2));
  EXPECT_TRUE(attempts.Apply(Restarts(0), kNow).restarts.empty());
  const NodeAttempts::Orders orders = attempts.Apply(Restarts(1), kNow);
  ASSERT_EQ(orders.restarts.size(), 1u);
  EXPECT_EQ(orders.restarts[0].restart, 1);
  EXPECT_EQ(orders.restarts[0].delay, absl::Seconds(3));
  EXPECT_TRUE(attempts.Apply(Restarts(1), kNow).restarts.empty());
  EXPECT_EQ(report().restart(), 0);
  EXPECT_FALSE(report().has_end());
  EXPECT_FALSE(report().has_failed_ago());
  // The runner's file still exists.
  attempts.Ask({"j", 1}, 1, end, 10'000, kNow);
  EXPECT_EQ(report().restart(), 0);
  attempts.Ask({"j", 1}, 2, end, 20'000, kNow);
  EXPECT_EQ(report().restart(), 2);
  // A stopped attempt does not continue, and an ended one asks for nothing.
  EXPECT_TRUE(attempts.Apply(Restarts(2, /*stop=*/true), kNow).restarts.empty());
  attempts.Ended({"j", 1}, end, 30'000, kNow);
  EXPECT_EQ(report().restart(), 0);
  EXPECT_EQ(report().end().end_class(), v1::END_CLASS_PROCESS_FAILED);
}

TEST(NodeAttemptsTest, EndThatWasAskedForBefore_SaysForWhichRestart) {
  for (const bool adopted : {false, true}) {
    NodeAttempts attempts;
    attempts.SetCluster("c");
    attempts.Adopt({"j", 1}, /*running=*/!adopted, Succeeded(), kNow, kNow, kNow,
                   /*asked=*/adopted ? 2 : 0);
    if (!adopted) attempts.Ended({"j", 1}, Succeeded(), 30'000, kNow, /*asked=*/2);
    v1::SyncNodeRequest request;
    attempts.FillReports(kNow, &request);
    EXPECT_EQ(request.attempts(0).restart(), 2);
  }
}

TEST(NodeAttemptsTest, AdoptedAttempt_AsksAgain_AndIsToldAgain) {
  NodeAttempts attempts;
  attempts.SetCluster("c");
  attempts.Adopt({"j", 1}, true, {}, kNow, kNow, kNow);
  attempts.Ask({"j", 1}, 2, Succeeded(), 10'000, kNow);
  EXPECT_EQ(attempts.Apply(Restarts(1), kNow).restarts.size(), 1u);
  v1::SyncNodeRequest request;
  attempts.FillReports(kNow, &request);
  EXPECT_EQ(request.attempts(0).restart(), 2);
  EXPECT_EQ(attempts.Apply(Restarts(2), kNow).restarts.size(), 1u);
}

TEST(NodeAttemptsTest, AssignmentWithoutAProgram_KeepsWhatRuns_AndStartsNothing) {
  NodeAttempts attempts;
  v1::SyncNodeReply reply = Reply({{"j", 1}});
  reply.mutable_assignments(0)->mutable_spec()->clear_argv();
  EXPECT_TRUE(attempts.Apply(reply, kNow).start.empty());
  EXPECT_EQ(attempts.Apply(Reply({{"j", 1}}), kNow).start.size(), 1u);
  EXPECT_TRUE(attempts.Apply(reply, kNow).stop.empty());
}

TEST(NodeAttemptsTest, UnwantedAttempt_IsStoppedOnce_ThenKilled) {
  NodeAttempts attempts;
  attempts.Apply(Reply({{"j", 1}}), kNow);
  EXPECT_EQ(attempts.Apply(Reply({{"j", 1}}, /*stop=*/true), kNow).stop, (Keys{{"j", 1}}));
  EXPECT_TRUE(attempts.Apply(Reply({}), kNow).stop.empty());
  EXPECT_TRUE(attempts.Tick(kNow + absl::Seconds(39)).kill.empty());
  EXPECT_EQ(attempts.NextDeadline(), kNow + absl::Seconds(40));
  EXPECT_EQ(attempts.Tick(kNow + absl::Seconds(40)).kill, (Keys{{"j", 1}}));
  EXPECT_TRUE(attempts.Tick(kNow + absl::Seconds(50)).kill.empty());
  EXPECT_EQ(attempts.NextDeadline(), absl::InfiniteFuture());
}

// Its job would start again for free, and elsewhere: as if the node had failed it.
TEST(NodeAttemptsTest, RunnerThatIsKilledForNotEnding_IsNoFailureOfTheNode) {
  v1::AttemptEnd none;
  none.set_end_class(v1::END_CLASS_NODE_FAILED);
  none.set_why("its runner no longer exists (signal 9) and left no report");
  for (const bool kill : {false, true}) {
    NodeAttempts attempts;
    attempts.Apply(Reply({{"j", 1}}), kNow);
    attempts.Apply(Reply({{"j", 1}}, /*stop=*/true), kNow);
    if (kill) attempts.Tick(kNow + absl::Seconds(40));
    attempts.Ended({"j", 1}, none, 5, kNow + absl::Seconds(41));
    v1::SyncNodeRequest request;
    attempts.FillReports(kNow, &request);
    const v1::AttemptEnd& end = request.attempts(0).end();
    EXPECT_EQ(end.end_class(), kill ? v1::END_CLASS_CANCELLED : v1::END_CLASS_NODE_FAILED);
    if (kill) {
      EXPECT_EQ(end.why(), "its runner was asked to stop, and killed 40s later: " + none.why());
    }
  }
}

TEST(NodeAttemptsTest, AttemptThatIsStoppedBeforeItStarts_HasEnded) {
  NodeAttempts attempts;
  EXPECT_TRUE(attempts.Apply(Reply({{"j", 1}}, /*stop=*/true), kNow).start.empty());
  v1::SyncNodeRequest request;
  attempts.FillReports(kNow, &request);
  EXPECT_EQ(request.attempts(0).end().end_class(), v1::END_CLASS_CANCELLED);
}

// Its job goes on elsewhere; here nothing starts beside what may hold its GPU.
TEST(NodeAttemptsTest, ProcessesThatTheKernelDoesNotEnd_AreReportedUntilTheyAreGone) {
  NodeAttempts attempts;
  attempts.Apply(Reply({{"j", 1}}), kNow);
  attempts.LeftBehind({"j", 1}, Succeeded(), 5, kNow);
  EXPECT_FALSE(attempts.IsRunning({"j", 1}));
  const auto states = [&] {
    v1::SyncNodeRequest request;
    attempts.FillReports(kNow, &request);
    std::vector<v1::PlacementState> states;
    for (const v1::AttemptReport& report : request.attempts()) {
      EXPECT_EQ(report.job_id(), "j");
      EXPECT_EQ(report.attempt(), 1);
      states.push_back(report.state());
    }
    return states;
  };
  using States = std::vector<v1::PlacementState>;
  EXPECT_EQ(states(), (States{v1::PLACEMENT_STATE_ENDED, v1::PLACEMENT_STATE_RUNNING}));
  uint64_t version = attempts.version();
  NodeAttempts::Orders orders = attempts.Apply(Reply({}), kNow);
  EXPECT_TRUE(orders.forget.empty());
  EXPECT_TRUE(orders.stop.empty());
  EXPECT_GT(attempts.version(), version);
  EXPECT_EQ(states(), States{v1::PLACEMENT_STATE_RUNNING});
  version = attempts.version();
  attempts.Apply(Reply({}), kNow);
  EXPECT_EQ(attempts.version(), version);
  attempts.Gone({"j", 1});
  EXPECT_GT(attempts.version(), version);
  EXPECT_EQ(attempts.Apply(Reply({}), kNow).forget, (Keys{{"j", 1}}));
  EXPECT_EQ(states(), States{});
}

TEST(NodeAttemptsTest, OtherCluster_GetsNothingBeforeTheOldAttemptsHaveEnded) {
  NodeAttempts attempts;
  attempts.Apply(Reply({{"j", 1}}), kNow);
  // There, a job of the same name is another job.
  NodeAttempts::Orders orders = attempts.Apply(Reply({{"j", 1}}, false, "d"), kNow);
  EXPECT_EQ(orders.stop, (Keys{{"j", 1}}));
  EXPECT_TRUE(orders.start.empty());
  EXPECT_FALSE(orders.notice.empty());
  attempts.Ended({"j", 1}, Succeeded(), 5, kNow);
  EXPECT_EQ(attempts.Apply(Reply({{"j", 1}}, false, "d"), kNow).forget, (Keys{{"j", 1}}));
  EXPECT_EQ(attempts.Apply(Reply({{"j", 1}}, false, "d"), kNow).start.size(), 1u);
  EXPECT_EQ(attempts.cluster(), "d");
}

TEST(NodeAttemptsTest, AdoptedAttempt_CountsTheTimeBefore) {
  NodeAttempts attempts;
  attempts.SetCluster("c");
  attempts.Adopt({"j", 1}, /*running=*/true, {}, kNow - absl::Seconds(50), kNow, kNow);
  EXPECT_TRUE(attempts.Apply(Reply({{"j", 1}}), kNow).start.empty());
  v1::SyncNodeRequest request;
  attempts.FillReports(kNow + absl::Seconds(5), &request);
  EXPECT_EQ(request.attempts(0).ran_for().seconds(), 55);
}

TEST(NodeAttemptsTest, AttemptThatEndedBeforeThisAgent_HasTheTimeOfItsEnd) {
  NodeAttempts attempts;
  attempts.SetCluster("c");
  attempts.Adopt({"j", 1}, /*running=*/false, Succeeded(), absl::FromUnixMillis(1'000),
                 absl::FromUnixMillis(61'000), kNow);
  v1::SyncNodeRequest request;
  attempts.FillReports(kNow, &request);
  EXPECT_EQ(request.attempts(0).ended_unix_ms(), 61'000);
  EXPECT_EQ(request.attempts(0).end().end_class(), v1::END_CLASS_SUCCEEDED);
}

// Holds whatever the coordinator wants, and however often the agent restarts.
TEST(NodeAttemptsTest, RandomWishes_StartNothingTwice_AndEndWhatIsUnwanted) {
  std::mt19937 random(3);
  for (int round = 0; round < 300; ++round) {
    auto attempts = std::make_unique<NodeAttempts>();
    std::map<AttemptKey, bool> disk;  // records, and whether the runner runs
    std::set<AttemptKey> started;
    std::vector<AttemptKey> wanted;
    for (int step = 0; step < 60; ++step) {
      if (random() % 3 == 0) {
        wanted.clear();
        for (int i = 0; i < 3; ++i) {
          const AttemptKey key("j" + std::to_string(i), 1 + static_cast<int>(random() % 20));
          // An attempt that has ended and was forgotten is never wanted again.
          if (random() % 2 == 0 && (started.count(key) == 0 || disk.count(key) != 0)) {
            wanted.push_back(key);
          }
        }
      }
      const NodeAttempts::Orders orders = attempts->Apply(Reply(wanted, random() % 4 == 0), kNow);
      for (const v1::NodeAssignment& start : orders.start) {
        const AttemptKey key(start.job_id(), start.attempt());
        ASSERT_TRUE(started.insert(key).second);
        disk[key] = true;
      }
      for (const AttemptKey& key : orders.stop) {
        disk[key] = false;
        attempts->Ended(key, Succeeded(), 1, kNow);
      }
      for (const AttemptKey& key : orders.forget) {
        EXPECT_FALSE(disk.count(key) != 0 && disk[key]);
        disk.erase(key);
      }
      if (random() % 5 == 0) {
        attempts = std::make_unique<NodeAttempts>();
        attempts->SetCluster("c");
        for (const auto& [key, running] : disk) {
          attempts->Adopt(key, running, Succeeded(), kNow, kNow, kNow);
        }
      }
    }
    attempts->Apply(Reply({}), kNow);
    for (const auto& [key, running] : disk) {
      if (!running) continue;
      EXPECT_TRUE(attempts->IsRunning(key));  // the line above asked it to stop
    }
  }
}

}  // namespace
}  // namespace muster::agent
