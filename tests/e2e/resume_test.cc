// Bit-exact resume as a user sees it: processes under `muster launch` that are all killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/strings/str_cat.h"
#include "agent/job_coordination.h"
#include "tests/support/command.h"
#include "tests/support/python.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::SizeIs;
using testing_support::CommandResult;
using testing_support::MakeTestDir;
using testing_support::RunCommand;

CommandResult Launch(const std::string& project, int ranks, const std::string& arguments) {
  return RunCommand(absl::StrCat("MUSTER_PROJECT_DIR=", project, " client/cli/muster launch --cpu ",
                                 "--num_processes ", ranks, " -- tests/e2e/resume_worker ",
                                 arguments, " 2>&1"));
}

class Resume : public testing::TestWithParam<int> {};

TEST_P(Resume, AfterAllWereKilled_TenAndTenSteps_AreTwentyBitForBit) {
  const CommandResult whole = Launch(MakeTestDir("whole"), GetParam(), "20 end");
  ASSERT_EQ(whole.exit_code, 0) << whole.output;
  const std::vector<std::string> expected = whole.after("state ");
  ASSERT_THAT(expected, SizeIs(1)) << whole.output;
  // Four overflows halve the scale; four clean steps between two of them double it. There were two
  // such steps since the last overflow.
  EXPECT_THAT(whole.after("scaler "),
              ElementsAre(AllOf(HasSubstr("\"scale.0\":512"), HasSubstr("\"growth_tracker.0\":2"))))
      << whole.output;
  const std::string project = MakeTestDir("parts");
  // Two steps beyond the last save are lost.
  const CommandResult killed = Launch(project, GetParam(), "12 kill");
  EXPECT_NE(killed.exit_code, 0) << killed.output;
  EXPECT_THAT(killed.output, HasSubstr("signal 9"));
  const CommandResult resumed = Launch(project, GetParam(), "20 end");
  ASSERT_EQ(resumed.exit_code, 0) << resumed.output;
  EXPECT_THAT(resumed.after("begins at "), ElementsAre("10")) << resumed.output;
  EXPECT_EQ(resumed.after("state "), expected) << resumed.output;
}

// An epoch is 40 rows on two ranks, 60 on three and 20 on two.
TEST(ResumeOnOtherNumbers, TwoRanksThreeAndTwo_TrainEachRowOnce) {
  const std::string project = MakeTestDir("numbers");
  for (const auto& [ranks, arguments] :
       std::vector<std::pair<int, std::string>>{{2, "10 kill smooth"}, {3, "20 kill smooth"}}) {
    const CommandResult killed = Launch(project, ranks, arguments);
    EXPECT_NE(killed.exit_code, 0) << killed.output;
    EXPECT_THAT(killed.output, HasSubstr("signal 9"));
  }
  const CommandResult ended = Launch(project, 2, "25 end smooth");
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_THAT(ended.after("begins at "), ElementsAre("20")) << ended.output;
  EXPECT_THAT(ended.after("rows "), ElementsAre("120, inexact 0")) << ended.output;
}

// torchrun or mpirun starts them: no launcher of ours, no agent, no coordinator.
class ResumeWithoutCoordinator : public testing::Test {
 protected:
  void CheckResume(const std::function<CommandResult(const std::string& project,
                                                     const std::string& arguments)>& start) {
    const CommandResult whole = start(MakeTestDir("whole"), "20 end");
    ASSERT_EQ(whole.exit_code, 0) << whole.output;
    const std::vector<std::string> expected = whole.after("state ");
    ASSERT_THAT(expected, SizeIs(1)) << whole.output;
    const std::string project = MakeTestDir("parts");
    EXPECT_NE(start(project, "12 kill").exit_code, 0);
    const CommandResult resumed = start(project, "20 end");
    ASSERT_EQ(resumed.exit_code, 0) << resumed.output;
    EXPECT_THAT(resumed.after("begins at "), ElementsAre("10")) << resumed.output;
    EXPECT_EQ(resumed.after("state "), expected) << resumed.output;
  }
};

TEST_F(ResumeWithoutCoordinator, VariablesOfTorchrun_TenAndTenSteps_AreTwentyBitForBit) {
  CheckResume([](const std::string& project, const std::string& arguments) {
    const absl::StatusOr<int> port = agent::FindFreePort();
    EXPECT_TRUE(port.ok()) << port.status();
    return RunCommand(absl::StrCat(
        "export MUSTER_CPU=yes WORLD_SIZE=2 LOCAL_WORLD_SIZE=2 MASTER_ADDR=127.0.0.1 MASTER_PORT=",
        port.value_or(0), " MUSTER_PROJECT_DIR=", project,
        "; RANK=1 LOCAL_RANK=1 tests/e2e/resume_worker ", arguments,
        " 2>&1 & RANK=0 LOCAL_RANK=0 tests/e2e/resume_worker ", arguments,
        " 2>&1; first=$?; wait $! && exit $first"));
  });
}

TEST_F(ResumeWithoutCoordinator, Torchrun_TenAndTenSteps_AreTwentyBitForBit) {
  const std::string python = testing_support::PythonWith("torch");
  if (python.empty()) return;
  CheckResume([&](const std::string& project, const std::string& arguments) {
    return RunCommand(
        absl::StrCat("MUSTER_CPU=yes OMP_NUM_THREADS=1 MUSTER_PROJECT_DIR=", project, " ", python,
                     " -m torch.distributed.run --standalone --no_python",
                     " --nproc_per_node 2 tests/e2e/resume_worker ", arguments, " 2>&1"));
  });
}

INSTANTIATE_TEST_SUITE_P(Ranks, Resume, testing::Range(1, 5));

}  // namespace
}  // namespace muster
