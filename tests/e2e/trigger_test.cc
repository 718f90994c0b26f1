// Triggers with real processes: all ranks act after the same step, wherever the trigger is raised.
#include <gtest/gtest.h>
#include <signal.h>

#include <memory>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "agent/job_coordination.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

class TriggerTest : public ClusterFixture {
 protected:
  std::unique_ptr<Command> Train(std::vector<std::string> options = {},
                                 const std::string& folder = "run") {
    std::vector<std::string> args = {"launch", "--cpu", "--num_processes", "3", "--no_prefix"};
    args.insert(args.end(), options.begin(), options.end());
    args.insert(args.end(), {"--", Runfile("tests/e2e/triggered"), Temp(folder)});
    return Muster(std::move(args));
  }
  // Returns what follows `prefix` in each line that begins with it.
  static std::vector<std::string> All(const Command& command, absl::string_view prefix) {
    std::vector<std::string> rests;
    for (const std::string& line : command.out()) {
      if (absl::StartsWith(line, prefix)) rests.push_back(line.substr(prefix.size()));
    }
    return rests;
  }
  // Expects also that another job which loads it continues from there. Returns "STEP with weight
  // W".
  std::string ExpectSameStepAndCheckpoint(const Command& command) {
    const std::vector<std::string> steps = All(command, "stopped after ");
    EXPECT_EQ(steps.size(), 3u) << command.out_text() << command.err_text();
    const std::set<std::string> stopped(steps.begin(), steps.end());
    EXPECT_EQ(stopped.size(), 1u) << command.out_text();
    const auto resume = Muster({"launch", "--cpu", "--num_processes", "2", "--no_prefix", "--",
                                Runfile("tests/e2e/triggered"), "resume", Temp("run")});
    EXPECT_EQ(resume->Wait(), 0) << resume->err_text();
    const std::vector<std::string> resumed = All(*resume, "resumed after ");
    EXPECT_EQ(resumed.size(), 2u) << resume->out_text();
    EXPECT_EQ(std::set<std::string>(resumed.begin(), resumed.end()), stopped);
    return stopped.empty() ? "" : *stopped.begin();
  }
  // Returns a coordinator's address for Train() and for operators.
  std::string Address() {
    const auto port = agent::FindFreePort();
    EXPECT_TRUE(port.ok()) << port.status();
    return absl::StrCat("127.0.0.1:", port.value_or(0));
  }
};

TEST_F(TriggerTest, SigtermAtOneRank_AllStopAfterTheSameStepWithACheckpoint) {
  const auto command = Train();
  const std::string rest = command->WaitForLine("pid ");
  command->WaitForLine("marked after ", 3);
  ASSERT_EQ(kill(Numbers(rest).at(0), SIGTERM), 0);
  EXPECT_EQ(command->Wait(), 0) << command->err_text();
  ExpectSameStepAndCheckpoint(*command);
  // So did the trigger that rank 2 raised on the way.
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
  const std::string address = Address();
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

// The job's name is enough without an address, even if another launch runs.
TEST_F(TriggerTest, OperatorNamesOnlyTheJob_ItsLaunchIsFound) {
  const auto night = Train({"--job_name", "night"});
  const auto day = Train({"--job_name", "day"}, "another");
  night->WaitForLine("marked after ", 3);
  day->WaitForLine("marked after ", 3);
  const auto status = Muster({"status", "night"});
  EXPECT_EQ(status->Wait(), 0) << status->err_text();
  EXPECT_NE(status->out_text().find("night: generation 1"), std::string::npos)
      << status->out_text();
  const auto nobody = Muster({"trigger", "dusk", "stop"});
  EXPECT_EQ(nobody->Wait(), 2) << nobody->out_text();
  for (const auto& [job, command] :
       {std::pair("night", night.get()), std::pair("day", day.get())}) {
    const auto operator_ = Muster({"trigger", job, "stop"});
    EXPECT_EQ(operator_->Wait(), 0) << operator_->err_text();
    EXPECT_EQ(command->Wait(), 0) << command->err_text();
  }
  ExpectSameStepAndCheckpoint(*night);
}

TEST_F(TriggerTest, WorkerWithoutAnAgent_BringsTheTokenOfItsEnvironment) {
  const std::string token = TokenFile();
  const auto coordinator = StartCoordinator({"--log_level", "error"}, {"--token_file", token});
  env_.insert({{"MUSTER_COORDINATOR", address_},
               {"MUSTER_JOB", "alone"},
               {"MUSTER_WORKER_ID", "w0"},
               {"MUSTER_RANK", "0"},
               {"MUSTER_WORLD_SIZE", "1"},
               {"MUSTER_CPU", "true"}});
  const std::vector<std::string> program = {Runfile("tests/e2e/triggered"), Temp("run")};
  Command stranger(*host_, program, env_);
  EXPECT_NE(stranger.Wait(), 0);
  EXPECT_NE(stranger.err_text().find("MUSTER_TOKEN_FILE"), std::string::npos)
      << stranger.err_text();
  env_["MUSTER_TOKEN_FILE"] = token;
  Command worker(*host_, program, env_);
  worker.WaitForLine("pid ");
  const auto operator_ = Muster({"trigger", "alone", "stop"});  // both by their variables
  EXPECT_EQ(operator_->Wait(), 0) << operator_->err_text();
  EXPECT_EQ(worker.Wait(), 0) << worker.err_text();
}

TEST_F(TriggerTest, OperatorsOwnTrigger_ReachesAllWithItsPayloadAtTheSameStep) {
  const std::string address = Address();
  const auto command = Train({"--coordinator", address, "--job_name", "night"});
  command->WaitForLine("marked after ", 3);
  const auto mark = Muster(
      {"trigger", "night", "mark", "--payload", "the loss \"spikes\"", "--coordinator", address});
  EXPECT_EQ(mark->Wait(), 0) << mark->err_text();
  command->WaitForLine("marked after ", 6);
  const auto stop = Muster({"trigger", "night", "stop", "--coordinator", address});
  EXPECT_EQ(stop->Wait(), 0) << stop->err_text();
  EXPECT_EQ(command->Wait(), 0) << command->err_text();
  const std::vector<std::string> marks = All(*command, "marked after ");
  ASSERT_EQ(marks.size(), 6u) << command->out_text();
  EXPECT_EQ(std::set<std::string>(marks.begin() + 3, marks.end()).size(), 1u);
  EXPECT_TRUE(absl::EndsWith(marks.at(3), " by -1: the loss \"spikes\"")) << marks.at(3);
}

TEST_F(TriggerTest, AtStep_AllActBeforeExactlyThatStep_AndAPassedOneIsRefused) {
  const std::string address = Address();
  const auto command = Train({"--coordinator", address, "--job_name", "night"});
  const int marked = Numbers(command->WaitForLine("marked after ", 3)).at(0);
  const auto late =
      Muster({"trigger", "night", "stop", "--at_step", "3", "--coordinator", address});
  EXPECT_EQ(late->Wait(), 2) << late->out_text();
  EXPECT_NE(late->err_text().find("asks for step 3, but a rank has already finished step "),
            std::string::npos)
      << late->err_text();
  // Far enough that no rank passes it before it knows of it.
  const int step = marked + 10'000;
  const auto stop = Muster(
      {"trigger", "night", "stop", "--at_step", absl::StrCat(step), "--coordinator", address});
  EXPECT_EQ(stop->Wait(), 0) << stop->err_text();
  EXPECT_EQ(stop->out_text(), absl::StrCat("raised stop for night, before step ", step));
  EXPECT_EQ(command->Wait(), 0) << command->err_text();
  const std::string stopped = ExpectSameStepAndCheckpoint(*command);
  EXPECT_TRUE(absl::StartsWith(stopped, absl::StrCat(step - 1, " with "))) << stopped;
}

}  // namespace
}  // namespace muster
