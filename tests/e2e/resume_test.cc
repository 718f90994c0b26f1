// Bit-exact resume as a user has it: processes under `muster launch` that are all killed.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/support/command.h"

namespace muster {
namespace {

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

// 40 rows on two ranks, 60 on three, 20 on two: an epoch.
TEST(ResumeOnOtherNumbers, TwoRanksThreeAndTwo_TrainEachRowOnce) {
  const std::string project = MakeTestDir("numbers");
  for (const auto& [ranks, arguments] :
       std::vector<std::pair<int, std::string>>{{2, "10 kill"}, {3, "20 kill"}}) {
    const CommandResult killed = Launch(project, ranks, arguments);
    EXPECT_NE(killed.exit_code, 0) << killed.output;
    EXPECT_THAT(killed.output, HasSubstr("signal 9"));
  }
  const CommandResult ended = Launch(project, 2, "25 end");
  ASSERT_EQ(ended.exit_code, 0) << ended.output;
  EXPECT_THAT(ended.after("begins at "), ElementsAre("20")) << ended.output;
  EXPECT_THAT(ended.after("rows "), ElementsAre("120, inexact 0")) << ended.output;
}

INSTANTIATE_TEST_SUITE_P(Ranks, Resume, testing::Range(1, 5));

}  // namespace
}  // namespace muster
