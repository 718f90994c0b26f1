// Triggers with real processes: whoever is asked, all ranks act after the same step.
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "tests/e2e/launch_fixture.h"
#include "worker/agent/job_link.h"

namespace muster {
namespace {

class TriggerTest : public LaunchFixture {
 protected:
  std::unique_ptr<Command> Train(std::vector<std::string> options = {}) {
    std::vector<std::string> args = {"launch", "--cpu", "--num_processes", "3", "--no_prefix"};
    args.insert(args.end(), options.begin(), options.end());
    args.insert(args.end(), {"--", Runfile("tests/e2e/triggered"), Temp("run")});
    return Muster(std::move(args));
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

TEST_F(TriggerTest, Operator_StopsAllAfterTheSameStep) {
  const auto port = agent::FindFreePort();
  ASSERT_TRUE(port.ok()) << port.status();
  const std::string address = absl::StrCat("127.0.0.1:", *port);
  const auto command = Train({"--coordinator", address, "--job_name", "night"});
  command->WaitForLine("marked after ", 3);
  const auto nobody = Muster({"trigger", "day", "stop", "--coordinator", address});
  EXPECT_EQ(nobody->Wait(), 3) << nobody->err_text();
  const auto operator_ = Muster(
      {"trigger", "night", "stop", "--payload", "enough for today", "--coordinator", address});
  EXPECT_EQ(operator_->Wait(), 0) << operator_->err_text();
  EXPECT_EQ(operator_->out_text(), "raised stop for night");
  EXPECT_EQ(command->Wait(), 0) << command->err_text();
  ExpectSameStepAndCheckpoint(*command);
}

}  // namespace
}  // namespace muster
