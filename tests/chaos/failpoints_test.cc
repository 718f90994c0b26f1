#include <csignal>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "base/failpoint.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/chaos/cluster.h"
#include "tests/chaos/plans.h"

namespace muster::chaos {
namespace {

// Armed by launch_test; worker.checkpoint_replaced by folder_test. No run here breaks a stream within one term, which
// engine.resume would need: the simulation and engine_test go there.
constexpr const char* kNeedALaunch[] = {
    "engine.hello",
    "engine.welcome",
    "engine.resume",
    "engine.directive",
    "engine.session_end",
    "agent.before_fork",
    "agent.after_fork",
    "agent.spawned",
    "agent.output",

    "agent.stop_worker",
    "agent.reaped",
    "worker.group_begin",
    "worker.group_built",
    "worker.step",
    "worker.checkpoint_staged",
    "worker.checkpoint_publish",
    "worker.checkpoint_renamed",
    "worker.checkpoint_replaced",
};

void Expect(const Plan& plan) {
  Cluster cluster(plan);
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
}

// kill -9 of the coordinator at each of its failpoints.
class KilledCoordinator : public ::testing::TestWithParam<std::string> {};

TEST_P(KilledCoordinator, JobEndsWellAndNothingIsLost) { Expect(CoordinatorPlan(GetParam())); }

INSTANTIATE_TEST_SUITE_P(At, KilledCoordinator, ::testing::ValuesIn(CoordinatorFailpoints()),
                         [](const auto& info) {
                           return absl::StrReplaceAll(info.param, {{".", "_"}});
                         });

// kill -9 of a worker at each of its failpoints.
class KilledWorker : public ::testing::TestWithParam<std::string> {};

TEST_P(KilledWorker, IsReplacedAndNothingIsLost) { Expect(WorkerPlan(GetParam())); }

INSTANTIATE_TEST_SUITE_P(At, KilledWorker, ::testing::ValuesIn(WorkerFailpoints()),
                         [](const auto& info) {
                           return absl::StrReplaceAll(info.param, {{".", "_"}});
                         });

// What a full disk, a failed fsync, and failures at a start look like from above.
class FailingCoordinator : public ::testing::TestWithParam<std::pair<const char*, const char*>> {};

TEST_P(FailingCoordinator, SaysSoAndLosesNothing) {
  const auto& [failpoint, action] = GetParam();
  Expect(CoordinatorPlan(failpoint, action));
}

INSTANTIATE_TEST_SUITE_P(
    At, FailingCoordinator,
    ::testing::Values(std::pair("journal.commit_begin", "error:RESOURCE_EXHAUSTED"),
                      std::pair("journal.before_fsync", "error:RESOURCE_EXHAUSTED"),
                      std::pair("journal.before_fsync", "error:DATA_LOSS"),
                      std::pair("journal.snapshot_written", "error:RESOURCE_EXHAUSTED"),
                      std::pair("journal.term_bump", "error:RESOURCE_EXHAUSTED"),
                      std::pair("journal.replay_record", "error:DATA_LOSS"),
                      std::pair("server.listen", "error"),
                      std::pair("journal.after_fsync", "delay:700ms"),
                      std::pair("engine.hold_txn", "stop"),
                      std::pair("journal.before_fsync", "stop")),
    [](const auto& info) {
      return absl::StrReplaceAll(absl::StrCat(info.param.first, "_", info.param.second),
                                 {{".", "_"}, {":", "_"}});
    });

TEST(Chaos, NothingFails_NothingIsWrong) { Expect({.name = "quiet"}); }

TEST(Chaos, KilledWorker_IsReplacedAndTheJobGoesOn) {
  Expect({.name = "killed_worker",
          .workers = 3,
          .signals = {{.worker = 0, .round = 7, .target = 1, .signal = SIGKILL},
                      {.worker = 2, .round = 12, .target = 0, .signal = SIGKILL}}});
}

TEST(Chaos, EveryFailpointOfTheCoordinatorAndItsClients_IsInAPlan) {
  std::set<std::string> planned;
  for (const std::string& name : CoordinatorFailpoints()) planned.insert(name);
  for (const std::string& name : WorkerFailpoints()) planned.insert(name);
  // Those that need an agent, a process group or a checkpoint: launch_test.
  for (const char* name : kNeedALaunch) planned.insert(name);
  for (const absl::string_view line : absl::StrSplit(ListFailpoints(), '\n', absl::SkipEmpty())) {
    const std::string name(line.substr(0, line.find(' ')));
    EXPECT_EQ(planned.erase(name), 1u) << name << " is in no plan";
  }
  EXPECT_TRUE(planned.empty()) << "no failpoint " << absl::StrJoin(planned, ", ");
}

// The tests of the test: what it is there for does not go by unseen.
TEST(Chaos, LostJournal_IsNoticed) {
  Plan plan = CoordinatorPlan("engine.reply_txn");
  plan.name = "lost_journal";
  plan.journal_is_lost = true;
  plan.timeout = absl::Seconds(15);
  Cluster cluster(plan);
  EXPECT_FALSE(cluster.Run().empty());
}

TEST(Chaos, FailpointThatIsNeverReached_IsNoticed) {
  Plan plan = {.name = "never"};
  plan.coordinator_failpoints = {"engine.session_end=kill"};
  EXPECT_THAT(Cluster(plan).Run(),
              ::testing::ElementsAre(
                  "coordinator start 0: failpoint engine.session_end was never reached"));
}

}  // namespace
}  // namespace muster::chaos
