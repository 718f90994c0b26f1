// Agents behind a hub, with a coordinator on its own and its journal, all of them real processes:
// kill -9 and SIGSTOP of the hub, kill -9 of the coordinator, in the middle of barriers.
#include <string>
#include <vector>

#include "absl/strings/str_join.h"
#include "absl/time/time.h"
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

TEST(HubKilled, JobGoesOnInItsGeneration) { Expect(HubKilledPlan()); }

TEST(OnlyHubKilled_AndItsSuccessor, JobGoesOnInItsGeneration) { Expect(OnlyHubKilledPlan()); }

TEST(HubStopped_AndContinued, JobGoesOnInItsGenerationAndNothingHappensTwice) {
  Expect(HubStoppedPlan());
}

TEST(HubWithWorkersKilled, OneGenerationMore) { Expect(HubWithWorkersKilledPlan()); }

TEST(HubAndCoordinatorKilled, JobGoesOnInItsGeneration) { Expect(HubAndCoordinatorKilledPlan()); }

TEST(CoordinatorKilled, AgentsBehindHubsGoOnInTheirGeneration) {
  Expect(CoordinatorKilledPlan(absl::ZeroDuration()));
}

TEST(CoordinatorAway, AgentsBehindHubsGoOnInTheirGeneration) {
  Expect(CoordinatorKilledPlan(absl::Seconds(3)));
}

}  // namespace
}  // namespace muster::chaos
