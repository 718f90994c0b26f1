// Every recorded `training` case, trained by real processes under `muster launch`, against
// Accelerate's numbers: those of the golden folder, and those of four processes, in which hybrid
// sharding has several copies.
#include <gtest/gtest.h>

#include <cmath>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "ATen/Functions.h"
#include "ATen/TensorOperators.h"
#include "muster/checkpoint.h"
#include "tests/support/command.h"
#include "tests/testdata/golden.h"

namespace muster::parity {
namespace {

using Json = nlohmann::json;
using testing_support::CommandResult;
using testing_support::MakeTestDir;
using testing_support::RunCommand;

void ExpectNear(const Json& got, const Json& want, double absolute, double relative,
                const std::string& what) {
  if (want.is_array()) {
    ASSERT_TRUE(got.is_array() && got.size() == want.size())
        << what << ": got " << got.dump().substr(0, 200) << " want " << want.dump().substr(0, 200);
    for (size_t i = 0; i < want.size(); ++i) {
      ExpectNear(got[i], want[i], absolute, relative, what + "[" + std::to_string(i) + "]");
    }
    return;
  }
  const double g = got.get<double>(), w = want.get<double>();
  EXPECT_LE(std::abs(g - w), absolute + relative * std::abs(w))
      << what << ": got " << g << " want " << w;
}

// The CPU has bf16 instructions of its own: the cases allow more there.
bool HasBf16Instructions() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (line.rfind("flags", 0) == 0) {
      return line.find("avx512_bf16") != std::string::npos ||
             line.find("amx_bf16") != std::string::npos;
    }
  }
  return false;
}

class TrajectoryTest : public ::testing::TestWithParam<const char*> {};

bool OnGpu() {
  const char* const device = std::getenv("MUSTER_TEST_DEVICE");
  return device != nullptr && std::string(device) == "gpu";
}

INSTANTIATE_TEST_SUITE_P(Sharding, TrajectoryTest,
                         ::testing::Values("no_shard", "zero1", "zero2", "zero3", "hybrid"),
                         [](const auto& info) { return std::string(info.param); });

// `folder`: of the cases and of the files that they name.
void ExpectAccelerates(const std::string& sharding, const std::vector<Json>& cases,
                       const std::string& folder) {
  const std::string scratch = MakeTestDir("trajectory_" + sharding) + "/";
  int compared = 0;
  for (const Json& test_case : cases) {
    const Json& in = test_case["in"];
    const Json& want = test_case["out"];
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

    const Json& tolerance = want.contains("tolerance_other_cpu") && HasBf16Instructions()
                                ? want["tolerance_other_cpu"]
                                : want["tolerance"];
    EXPECT_EQ(got["sync"], want["sync"]);
    ExpectNear(got["loss"], want["loss"], tolerance["loss"], 0, "loss");
    ExpectNear(got["lr"], want["lr"], 1e-9, 1e-9, "lr");
    ExpectNear(got["final_lr"], want["final_lr"], 1e-9, 1e-9, "final_lr");
    ExpectNear(got["grad_norm"], want["grad_norm"], 0, tolerance["grad_norm"], "grad_norm");

    const auto weights = LoadTensors(got["final_weights"]);
    const auto expected = LoadTensors(folder + "/" + want["final_weights"].get<std::string>());
    const auto initial = LoadTensors(folder + "/" + in["initial_weights"].get<std::string>());
    ASSERT_EQ(weights.size(), expected.size());
    double off = 0, moved = 0, worst = 0;
    for (const auto& [key, tensor] : expected) {
      ASSERT_TRUE(weights.count(key)) << key;
      const at::Tensor error = weights.at(key).to(at::kDouble) - tensor.to(at::kDouble);
      worst = std::max(worst, error.abs().max().item<double>());
      off += error.square().sum().item<double>();
      moved +=
          (tensor.to(at::kDouble) - initial.at(key).to(at::kDouble)).square().sum().item<double>();
    }
    EXPECT_LE(worst, tolerance["weights"].get<double>());
    EXPECT_LE(std::sqrt(off / moved), tolerance["update"].get<double>());
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
