// Triggers with real processes: whoever is asked, all ranks act after the same step.
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

class TriggerTest : public LaunchFixture {
 protected:
  std::unique_ptr<Command> Train() {
    return Muster({"launch", "--cpu", "--num_processes", "3", "--no_prefix", "--",
                   Runfile("tests/e2e/triggered"), Temp("run")});
  }
  // What follows `prefix` in each line that begins with it.
  static std::vector<std::string> All(const Command& command, absl::string_view prefix) {
    std::vector<std::string> rests;
    for (const std::string& line : command.out()) {
      if (absl::StartsWith(line, prefix)) rests.push_back(line.substr(prefix.size()));
    }
    return rests;
  }
  void ExpectSameStepAndCheckpoint(const Command& command) {
    const std::vector<std::string> steps = All(command, "stopped after ");
    EXPECT_EQ(steps.size(), 3u) << command.out_text() << command.err_text();
    EXPECT_EQ(std::set<std::string>(steps.begin(), steps.end()).size(), 1u) << command.out_text();
    EXPECT_TRUE(PathExists(Temp("run"))) << command.out_text();
  }
};

TEST_F(TriggerTest, SigtermAtOneRank_AllStopAfterTheSameStepWithACheckpoint) {
  const auto command = Train();
  const std::string rest = command->WaitForLine("pid ");
  command->WaitForLine("marked after ", 3);
  ASSERT_EQ(kill(Numbers(rest).at(0), SIGTERM), 0);
  EXPECT_EQ(command->Wait(), 0) << command->err_text();
  ExpectSameStepAndCheckpoint(*command);
  // And the trigger that rank 2 raised on the way.
  const std::vector<std::string> marks = All(*command, "marked after ");
  EXPECT_EQ(marks.size(), 3u);
  EXPECT_EQ(std::set<std::string>(marks.begin(), marks.end()).size(), 1u) << command->out_text();
  EXPECT_TRUE(absl::EndsWith(marks.at(0), " by 2: from 2")) << marks.at(0);
}

TEST_F(TriggerTest, SigtermAtTheLauncher_AllStopAfterTheSameStepWithinTheGrace) {
  const auto command = Train();
  command->WaitForLine("marked after ", 3);
  ASSERT_EQ(kill(command->pid(), SIGTERM), 0);
  EXPECT_EQ(command->Wait(), 128 + SIGTERM) << command->err_text();
  ExpectSameStepAndCheckpoint(*command);
}

}  // namespace
}  // namespace muster
