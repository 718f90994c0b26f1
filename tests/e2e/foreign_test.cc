// Programs that know nothing of Muster, under `muster launch` and `muster submit`: plain Python
// always, PyTorch and Accelerate if a Python has them. MUSTER_TEST_TORCH_PYTHON names that Python;
// without it python3 is tried.
#include <sys/wait.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "tests/e2e/launch_fixture.h"
#include "tests/support/python.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class ForeignTest : public ClusterFixture {
 protected:
  void SetUp() override {
    ClusterFixture::SetUp();
    program_ = Runfile("tests/e2e/python_program.py");
    ddp_ = Runfile("tests/e2e/python_ddp.py");
  }

  // Returns what `muster COMMAND...` prints, once it succeeds with a text that `is_it`.
  template <typename IsIt>
  std::string RunUntil(const std::vector<std::string>& args, const IsIt& is_it) {
    std::string text;
    WaitUntil([&] {
      const std::unique_ptr<Command> command = Muster(args);
      if (command->Wait() != 0) return false;
      text = command->out_text();
      return is_it(text);
    });
    return text;
  }
  std::string Run(const std::vector<std::string>& args) {
    const std::unique_ptr<Command> command = Muster(args);
    EXPECT_EQ(command->Wait(), 0) << command->err_text();
    return command->out_text();
  }

  // Starts a coordinator and one node that runs submitted jobs.
  void StartCluster() {
    coordinator_ = StartCoordinator();
    node_ = std::make_unique<Command>(
        *host_,
        std::vector<std::string>{Runfile("agent/cmd/muster-agent"), "--serve", "--coordinator",
                                 address_, "--state_dir", Temp("node"), "--node", "a", "--cpus",
                                 "2"},
        env_);
    RunUntil({"nodes", "--coordinator", address_, "-o", "json"}, [](const std::string& text) {
      const Json nodes = Json::parse(text);
      return nodes.size() == 1 && nodes[0]["state"] == "READY";
    });
  }
  std::string Submit(std::vector<std::string> options, const std::vector<std::string>& program) {
    std::vector<std::string> args = {"submit", "--coordinator", address_, "--processes", "2"};
    args.insert(args.end(), options.begin(), options.end());
    args.emplace_back("--");
    args.insert(args.end(), program.begin(), program.end());
    return Run(args);
  }
  std::string WaitForEnd(const std::string& job) {
    const std::string text =
        RunUntil({"describe", job, "--coordinator", address_, "-o", "json"},
                 [](const std::string& description) {
                   const std::string state = Json::parse(description)["state"];
                   return state == "SUCCEEDED" || state == "FAILED" || state == "CANCELLED";
                 });
    return Json::parse(text)["state"];
  }

  std::string AccelerateScript(const std::string& python) {
    Command where(*host_,
                  {python, "-c",
                   "import importlib.util as u; "
                   "print(u.find_spec('accelerate.test_utils.scripts.test_script').origin)"},
                  env_);
    EXPECT_EQ(where.Wait(), 0) << where.err_text();
    return where.out().empty() ? "" : where.out().back();
  }

  std::string program_, ddp_;
  std::unique_ptr<Command> coordinator_, node_;
};

constexpr char kPython[] = "/usr/bin/python3";

bool HasBothStanding(const std::string& text) {
  return absl::StrContains(text, "ranks 0,1 are at the same place") &&
         absl::StrContains(text, "stand_still (");
}

TEST_F(ForeignTest, Launch_EnvironmentStacksRestartsAndLogs) {
  const std::unique_ptr<Command> launch =
      Muster({"launch", "--num_processes", "2", "--cpu", "--max_restarts", "1", "--job_name",
              "night", "--log_dir", Temp("logs"), "--tee", "--", kPython, program_, temp_});
  // Both stand at the same line or in the check for the file, and in the same functions.
  const std::string stacks = RunUntil({"stacks", "night"}, HasBothStanding);
  EXPECT_THAT(stacks, AllOf(HasSubstr("Python 3."), HasSubstr("py#0 "), HasSubstr(" main ("),
                            HasSubstr(" <module> ("), HasSubstr("python_program.py:"),
                            Not(HasSubstr(", step "))));
  EXPECT_THAT(Run({"stacks", "night", "--rank", "1", "-o", "json"}), HasSubstr("stand_still"));
  ASSERT_TRUE(WriteFileAtomically(Temp("go"), "").ok());
  EXPECT_EQ(launch->Wait(), 0) << launch->err_text();
  EXPECT_THAT(launch->out_text(), HasSubstr("rank 0 of 2, attempt 0, 0 2 127.0.0.1 1 true"));
  EXPECT_THAT(launch->out_text(), HasSubstr("rank 1 of 2, attempt 1, 1 2 127.0.0.1 1 true"));
  EXPECT_THAT(launch->out_text(), HasSubstr("rank 1 is done"));
  // The diagnosis names the process that was killed, and its last words.
  EXPECT_THAT(launch->err_text(),
              AllOf(HasSubstr("rank 1 (pid "), HasSubstr("was killed by signal 9 (SIGKILL)"),
                    HasSubstr("rank 1 ends here")));
  EXPECT_THAT(ReadFile(Temp("logs/attempt_1/rank_1.log")).value_or(""),
              HasSubstr("rank 1 is done\n"));
}

TEST_F(ForeignTest, Submit_EnvironmentStacksRestartsAndLogs) {
  StartCluster();
  const std::string job =
      Submit({"--max_restarts", "1", "--name", "night"}, {kPython, program_, temp_});
  const std::string stacks = RunUntil({"stacks", job, "--coordinator", address_}, HasBothStanding);
  EXPECT_THAT(stacks,
              AllOf(HasSubstr("Python 3."), HasSubstr(" main ("), HasSubstr("python_program.py:")));
  ASSERT_TRUE(WriteFileAtomically(Temp("go"), "").ok());
  EXPECT_EQ(WaitForEnd(job), "SUCCEEDED");
  EXPECT_THAT(Run({"logs", job, "--coordinator", address_, "--rank", "1"}),
              AllOf(HasSubstr("rank 1 of 2, attempt 1, 1 2 127.0.0.1 1 true"),
                    HasSubstr("rank 1 is done")));
  EXPECT_THAT(Run({"incidents", job, "--coordinator", address_}),
              AllOf(HasSubstr("SIGKILL"), HasSubstr("rank 1 ends here")));
}

TEST_F(ForeignTest, ScriptThatStartsPython_ShowsThePythonItWaitsFor) {
  const std::unique_ptr<Command> launch =
      Launch({"--num_processes", "2", "--cpu", "--job_name", "night"},
             absl::StrCat(kPython, " ", program_, " ", temp_, "; echo ended with $?"));
  const std::string stacks = RunUntil({"stacks", "night"}, HasBothStanding);
  EXPECT_THAT(stacks, HasSubstr("python_program.py:"));
}

TEST_F(ForeignTest, Ddp_UnderLaunch_ContinuesAfterAKilledRank) {
  const std::string python = testing_support::PythonWith("torch");
  if (python.empty()) return;
  const std::unique_ptr<Command> whole =
      Muster({"launch", "--num_processes", "2", "--cpu", "--", python, ddp_, Temp("whole.pt")});
  EXPECT_EQ(whole->Wait(), 0) << whole->err_text();
  EXPECT_THAT(whole->out_text(), HasSubstr("rank 1 of 2 starts at step 0"));
  const std::string weights = whole->WaitForLine("[0]: rank 0: weights sum up to ");
  const std::unique_ptr<Command> killed =
      Muster({"launch", "--num_processes", "2", "--cpu", "--max_restarts", "1", "--", python, ddp_,
              Temp("killed.pt"), "--kill-rank-at", "12"});
  EXPECT_EQ(killed->Wait(), 0) << killed->err_text();
  EXPECT_THAT(killed->err_text(), HasSubstr("was killed by signal 9 (SIGKILL)"));
  EXPECT_THAT(killed->out_text(), HasSubstr("rank 1 of 2 starts at step 10"));
  EXPECT_THAT(killed->out_text(), HasSubstr(absl::StrCat("rank 1: weights sum up to ", weights)));
}

TEST_F(ForeignTest, Ddp_UnderSubmit_ContinuesAfterAKilledRank) {
  const std::string python = testing_support::PythonWith("torch");
  if (python.empty()) return;
  StartCluster();
  const std::string job =
      Submit({"--max_restarts", "1"}, {python, ddp_, Temp("killed.pt"), "--kill-rank-at", "12"});
  EXPECT_EQ(WaitForEnd(job), "SUCCEEDED");
  EXPECT_THAT(Run({"logs", job, "--coordinator", address_, "--rank", "1"}),
              AllOf(HasSubstr("rank 1 of 2 starts at step 10"), HasSubstr("weights sum up to")));
  EXPECT_THAT(Run({"incidents", job, "--coordinator", address_}), HasSubstr("SIGKILL"));
}

TEST_F(ForeignTest, AcceleratesOwnScript_PassesUnderLaunch) {
  const std::string python = testing_support::PythonWith("torch, accelerate");
  if (python.empty()) return;
  const std::unique_ptr<Command> launch =
      Muster({"launch", "--num_processes", "2", "--cpu", "--", python, AccelerateScript(python)});
  EXPECT_EQ(launch->Wait(), 0) << launch->out_text() << launch->err_text();
  EXPECT_THAT(launch->out_text(),
              AllOf(HasSubstr("DistributedType.MULTI_CPU"), HasSubstr("Num processes: 2")));
}

TEST_F(ForeignTest, AcceleratesOwnScript_PassesUnderSubmit) {
  const std::string python = testing_support::PythonWith("torch, accelerate");
  if (python.empty()) return;
  StartCluster();
  const std::string job = Submit({}, {python, AccelerateScript(python)});
  const std::string state = WaitForEnd(job);
  const std::string log = Run({"logs", job, "--coordinator", address_, "--rank", "0"});
  EXPECT_EQ(state, "SUCCEEDED") << log;
  EXPECT_THAT(log, AllOf(HasSubstr("DistributedType.MULTI_CPU"), HasSubstr("Num processes: 2")));
}

}  // namespace
}  // namespace muster
