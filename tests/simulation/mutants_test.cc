#include "tests/simulation/mutants.h"

#include <gtest/gtest.h>

#include <string>

#include "absl/strings/match.h"
#include "tests/simulation/simulator.h"

namespace muster::simulation {
namespace {

// The test of the tests: a core with a known fault must be found out within 2,000 seeds, by the
// checker that is responsible for it.
class MutantTest : public ::testing::TestWithParam<Mutant> {};

TEST_P(MutantTest, Simulation_FaultyCore_IsCaught) {
  SimulationOptions options;
  ASSERT_TRUE(SetMutant(GetParam().name, &options));
  for (options.seed = 1; options.seed <= 2000; ++options.seed) {
    const SimulationResult result = Simulate(options);
    if (!absl::StrContains(result.violation, GetParam().caught_by)) continue;
    // The same seed is quiet without the fault, so it is the fault that was found.
    SimulationOptions sound;
    sound.seed = options.seed;
    EXPECT_EQ(Simulate(sound).violation, "");
    RecordProperty("seed", static_cast<int>(options.seed));
    std::printf("%s: caught by seed %d: %s\n", GetParam().name, static_cast<int>(options.seed),
                result.violation.substr(0, 200).c_str());
    return;
  }
  FAIL() << GetParam().name << " was not noticed by its checker in 2000 seeds";
}

INSTANTIATE_TEST_SUITE_P(All, MutantTest, ::testing::ValuesIn(kMutants),
                         [](const auto& info) { return std::string(info.param.name); });

}  // namespace
}  // namespace muster::simulation
