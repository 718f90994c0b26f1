#include "tests/simulation/jobs_simulation.h"

#include <gtest/gtest.h>

#include <cstdlib>
#include <string>

#include "absl/strings/match.h"

namespace muster::simulation {
namespace {

int Seeds() {
  const char* const seeds = std::getenv("MUSTER_JOBS_SEEDS");
  return seeds == nullptr ? 2000 : std::atoi(seeds);
}

TEST(JobsSimulationTest, AnySeed_KeepsTheRules) {
  int attempts = 0, restarts = 0, lost = 0, resizes = 0, stepped = 0, promotions = 0, hangs = 0;
  int restarts_in_place = 0, counted = 0, free = 0;
  for (int seed = 1; seed <= Seeds(); ++seed) {
    const JobsSimulationResult result = RunJobsSimulation(seed, {});
    ASSERT_EQ(result.violation, "") << "seed " << seed;
    attempts += result.attempts;
    restarts += result.restarts;
    lost += result.lost_nodes;
    resizes += result.resizes;
    stepped += result.stepped;
    promotions += result.promotions;
    hangs += result.hangs;
    restarts_in_place += result.restarts_in_place;
    counted += result.counted;
    free += result.free;
  }
  // The simulation has reached what it is meant to test.
  EXPECT_GT(attempts, 10 * Seeds());
  EXPECT_GT(restarts, Seeds());
  EXPECT_GT(lost, Seeds() / 10);
  EXPECT_GT(resizes, Seeds() / 10);
  EXPECT_GT(stepped, Seeds());
  EXPECT_GT(promotions, Seeds() / 10);
  EXPECT_GT(hangs, Seeds() / 10);
  EXPECT_GT(restarts_in_place, Seeds() / 2);
  EXPECT_GT(counted, Seeds());
  EXPECT_GT(free, Seeds());
}

// `says`: a part of the message of the rule that should catch the fault; empty: any rule.
void ExpectCaught(coordinator::JobsMutants mutants, const std::string& says = "") {
  for (int seed = 1; seed <= 200; ++seed) {
    const std::string violation = RunJobsSimulation(seed, mutants).violation;
    if (!violation.empty() && absl::StrContains(violation, says)) return;
  }
  ADD_FAILURE() << "no seed notices it";
}

TEST(JobsSimulationTest, TwoAttemptsAtOnce_AreNoticed) {
  ExpectCaught({.starts_before_former_ended = true});
}
TEST(JobsSimulationTest, HalfAGang_IsNoticed) { ExpectCaught({.places_half_a_gang = true}); }
TEST(JobsSimulationTest, RetryOfAUserError_IsNoticed) {
  ExpectCaught({.retries_user_errors = true});
}
TEST(JobsSimulationTest, StagesOutOfOrder_AreNoticed) { ExpectCaught({.believes_ages = true}); }

TEST(JobsSimulationTest, HangsThatAreRestartedForFree_AreNoticed) {
  ExpectCaught({.restarts_hangs_for_free = true});
}

TEST(JobsSimulationTest, RestartsInPlaceForFree_AreNoticed) {
  ExpectCaught({.restarts_in_place_for_free = true});
}

TEST(JobsSimulationTest, FailuresThatAreCountedTwice_AreNoticed) {
  ExpectCaught({.counts_failures_twice = true}, "counts failure ");
}

TEST(JobsSimulationTest, EchoesThatAreForgotten_AreNoticed) {
  ExpectCaught({.forgets_echoes = true}, "starts again for free after END_CLASS_CANCELLED");
}

TEST(JobsSimulationTest, LimitsOfClassesThatAreForgotten_AreNoticed) {
  ExpectCaught({.forgets_class_limits = true});
}

TEST(JobsSimulationTest, SparesGivenAway_AreNoticed) { ExpectCaught({.gives_spares_away = true}); }

}  // namespace
}  // namespace muster::simulation
