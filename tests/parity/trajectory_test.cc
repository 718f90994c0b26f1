// Trains every recorded `training` case with real processes under `muster launch` and compares with
// Accelerate's numbers: those of the golden folder, and those of four processes, in which hybrid
// sharding has several copies.
#include <gtest/gtest.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "tests/parity/expect_trajectory.h"
#include "tests/support/command.h"
#include "tests/testdata/golden.h"

namespace muster::parity {
namespace {

using Json = nlohmann::json;
using testing_support::CommandResult;
using testing_support::MakeTestDir;
using testing_support::RunCommand;

class TrajectoryTest : public ::testing::TestWithParam<const char*> {};

bool OnGpu() {
  const char* const device = std::getenv("MUSTER_TEST_DEVICE");
  return device != nullptr && std::string(device) == "gpu";
}

INSTANTIATE_TEST_SUITE_P(Sharding, TrajectoryTest,
                         ::testing::Values("no_shard", "zero1", "zero2", "zero3", "hybrid"),
                         [](const auto& info) { return std::string(info.param); });

// `folder`: where the cases and the files that they name are.
void ExpectAccelerates(const std::string& sharding, const std::vector<Json>& cases,
                       const std::string& folder) {
  const std::string scratch = MakeTestDir("trajectory_" + sharding) + "/";
  int compared = 0;
  for (const Json& test_case : cases) {
    const Json& in = test_case["in"];
    const std::string name = in["name"];
    SCOPED_TRACE(name);
    if (OnGpu() && in["num_processes"] > 1)
      continue;  // a process for each GPU, and there may be one
    ++compared;
    std::filesystem::create_directories(scratch + name);
    std::ofstream(scratch + name + ".json") << Json({{"in", in}}).dump();
    const CommandResult run = RunCommand(
        std::string("client/cli/muster launch ") + (OnGpu() ? "" : "--cpu ") + "--num_processes " +
        in["num_processes"].dump() + " -- tests/parity/trajectory " + (OnGpu() ? "--gpu" : "") +
        " --case " + scratch + name + ".json --data_root " + folder + " --output_dir " + scratch +
        name + " --sharding " + sharding + " 2>&1");
    ASSERT_EQ(run.exit_code, 0) << run.output;
    const Json got = Json::parse(run.last_line(), nullptr, false);
    ASSERT_TRUE(got.is_object()) << run.output;

    ExpectTrajectory(got, test_case, folder);
  }
  EXPECT_GT(compared, 0);
}

TEST_P(TrajectoryTest, EveryRecordedTrainingCase_FollowsAccelerate) {
  ExpectAccelerates(GetParam(), testing_support::GoldenCases("training"),
                    testing_support::GoldenFolder());
}

TEST_P(TrajectoryTest, FourProcesses_FollowAccelerate) {
  if (OnGpu()) return;
  const std::string folder = testing_support::TestdataPath("trajectories");
  std::vector<Json> cases;
  std::ifstream file(folder + "/cases.jsonl");
  for (std::string line; std::getline(file, line);) cases.push_back(Json::parse(line));
  ExpectAccelerates(GetParam(), cases, folder);
}

}  // namespace
}  // namespace muster::parity
