// A coordinator on its own, with its journal, and two agents with two workers each: kill -9 of all
// three at their failpoints, streams that break, and outages of the coordinator. The short set.
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/chaos/cluster.h"
#include "tests/chaos/plans.h"

namespace muster::chaos {
namespace {

using ::testing::ValuesIn;

// Returns what a training prints about its weights.
double Expect(const Plan& plan) {
  Cluster cluster(plan);
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
  double squares = 0;
  EXPECT_TRUE(!plan.trains || absl::SimpleAtod(cluster.SaidByFirst("squares "), &squares));
  return squares;
}

std::string NameOf(const ::testing::TestParamInfo<std::string>& info) {
  return absl::StrReplaceAll(info.param, {{".", "_"}});
}

class KilledUnderAgents : public ::testing::TestWithParam<std::string> {};

TEST_P(KilledUnderAgents, JobEndsWellAndNothingIsLostOrLeft) { Expect(AgentsPlan(GetParam())); }

INSTANTIATE_TEST_SUITE_P(At, KilledUnderAgents, ValuesIn(AgentsFailpoints()), NameOf);

class BrokenStream : public ::testing::TestWithParam<std::string> {};

TEST_P(BrokenStream, IsResumedAndNothingHappensTwice) {
  Plan plan = AgentsPlan(GetParam(), "error");
  plan.name += "_error";
  plan.expected_generations = 1;
  Expect(plan);
}

INSTANTIATE_TEST_SUITE_P(At, BrokenStream,
                         ValuesIn(std::vector<std::string>{"agent.frame", "agent.received"}),
                         NameOf);

class TrainingUnderAgents : public ::testing::TestWithParam<std::string> {};

// The weights of a run that nothing disturbs.
double Squares() {
  static const double squares = [] {
    Plan plan = TrainingPlan("worker.step");
    plan.name = "agents.training.undisturbed";
    plan.worker_failpoints.clear();
    return Expect(plan);
  }();
  return squares;
}

// The weights are not equal to the bit, as with two workers (launch_test): from three on, sums
// depend on which rank begins them, and a process's first step sums in other buckets than its later
// ones.
TEST_P(TrainingUnderAgents, AllEndWithTheWeightsOfARunThatNothingDisturbs) {
  EXPECT_NEAR(Expect(TrainingPlan(GetParam())), Squares(), 1e-4);
}

INSTANTIATE_TEST_SUITE_P(At, TrainingUnderAgents,
                         ValuesIn(std::vector<std::string>{"worker.step",
                                                           "worker.checkpoint_replaced",
                                                           "engine.hold_join", "engine.reply_txn"}),
                         NameOf);

TEST(ShortOutage, WorkersGoOnAndWhatIsInFlightFinishesAfterIt) {
  for (const Plan& plan : OutagePlans(absl::Seconds(3))) Expect(plan);
}

}  // namespace
}  // namespace muster::chaos
