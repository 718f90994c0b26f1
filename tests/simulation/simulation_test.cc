#include <gtest/gtest.h>

#include <cstdint>
#include <cstdlib>
#include <map>
#include <string>

#include "absl/strings/numbers.h"
#include "absl/strings/strip.h"
#include "tests/simulation/simulator.h"

namespace muster::simulation {
namespace {

// MUSTER_SIMULATION_SEEDS=N in the environment: how many seeds in all. --seed=N: only that one,
// with its trace.
uint64_t g_seeds = 10000;
uint64_t g_only = 0;
constexpr uint64_t kParts = 20;

class SimulationTest : public ::testing::TestWithParam<uint64_t> {};

TEST_P(SimulationTest, Seeds_AllRulesHold) {
  const uint64_t per_part = (g_seeds + kParts - 1) / kParts;
  SimulationOptions options;
  for (options.seed = 1 + GetParam() * per_part; options.seed <= (GetParam() + 1) * per_part;
       ++options.seed) {
    if (g_only != 0) options.seed = g_only;
    options.trace = g_only != 0;
    const SimulationResult result = Simulate(options);
    for (const std::string& line : result.trace) std::printf("%s\n", line.c_str());
    ASSERT_EQ(result.violation, "") << "replay it with --seed=" << options.seed;
    if (g_only != 0) return;
  }
}

INSTANTIATE_TEST_SUITE_P(Part, SimulationTest, ::testing::Range(uint64_t{0}, kParts));

TEST(Simulation, CutOfAllBeyondTheLease_LosesNobody) {
  SimulationOptions options;
  options.one_cut = true;
  for (options.seed = 1; options.seed <= 400; ++options.seed) {
    const SimulationResult result = Simulate(options);
    ASSERT_EQ(result.violation, "") << "seed " << options.seed;
    ASSERT_EQ(result.lost, 0) << "replay it with simulate --one_cut --seed=" << options.seed;
    ASSERT_GT(result.faults.at("partitioned"), 0);
  }
}

TEST(Simulation, SameSeed_SameRun) {
  SimulationOptions options;
  for (options.seed = 1; options.seed <= 5; ++options.seed) {
    const SimulationResult first = Simulate(options);
    const SimulationResult second = Simulate(options);
    EXPECT_EQ(first.digest, second.digest) << "seed " << options.seed;
    EXPECT_EQ(first.events, second.events);
  }
}

TEST(Simulation, Seeds_DoSomething) {
  SimulationOptions options;
  int64_t restarts = 0, generations = 0, barriers = 0, watched = 0, through_hubs = 0;
  int64_t checkpoints = 0;
  std::map<std::string, int64_t> faults;
  for (options.seed = 1; options.seed <= 50; ++options.seed) {
    const SimulationResult result = Simulate(options);
    restarts += result.restarts;
    generations += result.generations;
    barriers += result.barriers;
    checkpoints += result.checkpoints;
    watched += result.watch_events;
    through_hubs += result.through_hubs;
    for (const auto& [name, count] : result.faults) faults[name] += count;
  }
  EXPECT_GT(restarts, 50);
  EXPECT_GT(generations, 100);
  EXPECT_GT(barriers, 5000);
  EXPECT_GT(checkpoints, 200);
  EXPECT_GT(watched, 2000);
  EXPECT_GT(through_hubs, 500);
  for (const char* fault : kFaults) {
    EXPECT_GT(faults[fault], 2) << fault;
    std::printf("%s: %lld\n", fault, static_cast<long long>(faults[fault]));
    faults.erase(fault);
  }
  EXPECT_TRUE(faults.empty()) << faults.begin()->first << " is not in kFaults";
}

}  // namespace
}  // namespace muster::simulation

int main(int argc, char** argv) {
  ::testing::InitGoogleTest(&argc, argv);
  if (const char* seeds = std::getenv("MUSTER_SIMULATION_SEEDS")) {
    if (!absl::SimpleAtoi(seeds, &muster::simulation::g_seeds)) {
      std::fprintf(stderr, "MUSTER_SIMULATION_SEEDS=%s is not a number\n", seeds);
      return 2;
    }
  }
  for (int i = 1; i < argc; ++i) {
    absl::string_view arg = argv[i];
    if (!absl::ConsumePrefix(&arg, "--seed=") ||
        !absl::SimpleAtoi(arg, &muster::simulation::g_only)) {
      std::fprintf(stderr, "%s is not understood; --seed=N runs one seed\n", argv[i]);
      return 2;
    }
  }
  return RUN_ALL_TESTS();
}
