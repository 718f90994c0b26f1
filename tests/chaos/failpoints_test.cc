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

void Expect(const Plan& plan) {
  Cluster cluster(plan);
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
}

// Kills the coordinator at each of its failpoints with kill -9.
class KilledCoordinator : public ::testing::TestWithParam<std::string> {};

TEST_P(KilledCoordinator, JobEndsWellAndNothingIsLost) { Expect(CoordinatorPlan(GetParam())); }

INSTANTIATE_TEST_SUITE_P(At, KilledCoordinator, ::testing::ValuesIn(CoordinatorFailpoints()),
                         [](const auto& info) {
                           return absl::StrReplaceAll(info.param, {{".", "_"}});
                         });

// Kills a worker at each of its failpoints with kill -9.
class KilledWorker : public ::testing::TestWithParam<std::string> {};

TEST_P(KilledWorker, IsReplacedAndNothingIsLost) { Expect(WorkerPlan(GetParam())); }

INSTANTIATE_TEST_SUITE_P(At, KilledWorker, ::testing::ValuesIn(WorkerFailpoints()),
                         [](const auto& info) {
                           return absl::StrReplaceAll(info.param, {{".", "_"}});
                         });

// A full disk, a failed fsync, and failures at a start, as seen from above.
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
                      std::pair("journal.snapshot_built", "error:DATA_LOSS"),
                      std::pair("journal.snapshot_part", "error:RESOURCE_EXHAUSTED"),
                      std::pair("journal.snapshot_part", "delay:700ms"),
                      std::pair("journal.snapshot_written", "error:RESOURCE_EXHAUSTED"),
                      std::pair("journal.snapshot_publish", "error:RESOURCE_EXHAUSTED"),
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

TEST(Chaos, EveryFailpoint_IsArmedInTheLongSet) {
  const std::set<std::string> armed = ArmedIn(LongPlans(1));
  for (const absl::string_view line : absl::StrSplit(ListFailpoints(), '\n', absl::SkipEmpty())) {
    const std::string name(line.substr(0, line.find(' ')));
    EXPECT_TRUE(armed.contains(name)) << name << " is armed by no run of the long set: plans.cc";
  }
}

// Tests of the test: the faults it looks for do not go unnoticed.
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
