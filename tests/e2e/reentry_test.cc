// Survivors of a lost process continue in their own processes: `muster launch` and muster-agent
// with programs that use run_elastic.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/launch_fixture.h"

namespace muster {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::SizeIs;

// The output and the files of a run.
struct Course {
  int code = -1;
  std::map<int, std::vector<std::string>> pids;   // by rank, of each beginning in order
  std::map<int, std::vector<std::string>> steps;  // at which it began
  std::map<int, std::set<double>> losses;         // by step; one each if replays are exact
  std::string out, err;

  // Returns in how many processes a rank has run.
  size_t processes(int rank) const {
    const auto it = pids.find(rank);
    return it == pids.end() ? 0
                            : std::set<std::string>(it->second.begin(), it->second.end()).size();
  }
};

class ReentryTest : public ClusterFixture {
 protected:
  std::vector<std::string> Program(const std::string& name, const std::string& mode,
                                   const std::string& kills) {
    EXPECT_TRUE(MakeDirectories(Temp(name)).ok());
    return {Runfile("tests/e2e/reentry_worker"), Temp(name), mode, kills};
  }
  std::unique_ptr<Command> Start(const std::string& name, int processes, const std::string& mode,
                                 const std::string& kills, int max_restarts) {
    std::vector<std::string> args = {"launch",
                                     "--cpu",
                                     "--num_processes",
                                     absl::StrCat(processes),
                                     "--max_restarts",
                                     absl::StrCat(max_restarts),
                                     "--"};
    for (std::string& word : Program(name, mode, kills)) args.push_back(std::move(word));
    return Muster(std::move(args));
  }
  void Read(const Command& command, const std::string& name, Course* run) {
    run->out += command.out_text();
    run->err += command.err_text();
    for (const std::string& line : command.out()) {
      const size_t at = line.find("begin ");
      if (at == std::string::npos) continue;
      const std::vector<std::string> words = absl::StrSplit(line.substr(at), ' ');
      if (words.size() != 4) continue;
      int rank = -1;
      EXPECT_TRUE(absl::SimpleAtoi(words[1], &rank));
      run->pids[rank].push_back(words[2]);
      run->steps[rank].push_back(words[3]);
    }
    run->losses.clear();
    const auto text = ReadFile(Temp(name) + "/losses", 1 << 20);
    if (!text.ok()) return;
    for (const auto& line : absl::StrSplit(*text, '\n', absl::SkipEmpty())) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      int step = 0;
      double loss = 0;
      EXPECT_TRUE(words.size() == 2 && absl::SimpleAtoi(words[0], &step) &&
                  absl::SimpleAtod(words[1], &loss))
          << line;
      run->losses[step].insert(loss);
    }
  }
  Course Launch(const std::string& name, int processes, const std::string& mode,
                const std::string& kills, int max_restarts = 3) {
    const auto command = Start(name, processes, mode, kills, max_restarts);
    Course run;
    run.code = command->Wait();
    Read(*command, name, &run);
    return run;
  }
  // Expects the same losses at the same steps as in an undisturbed run, and no sample twice.
  void ExpectUndisturbed(const Course& run, int processes) {
    EXPECT_EQ(run.code, 0) << run.err;
    EXPECT_THAT(run.out, HasSubstr(" 0 inexact epochs of 2")) << run.err;
    const std::string name = absl::StrCat("calm", ++calm_runs_);
    const Course calm = Launch(name, processes, "", "", 0);
    ASSERT_EQ(calm.code, 0) << calm.err;
    ASSERT_EQ(run.losses.size(), calm.losses.size());
    for (const auto& [step, losses] : calm.losses) {
      for (const double loss : run.losses.at(step)) {
        EXPECT_NEAR(loss, *losses.begin(), 1e-6) << "step " << step;
      }
    }
  }

  int calm_runs_ = 0;
};

TEST_F(ReentryTest, TwoProcesses_OneKilled_TheOtherContinues) {
  const Course run = Launch("run", 2, "elastic", "1@6");
  ExpectUndisturbed(run, 2);
  EXPECT_EQ(run.processes(0), 1u);
  EXPECT_EQ(run.processes(1), 2u);
  // Training continued from the checkpoint of step 4.
  EXPECT_THAT(run.steps.at(0), ::testing::ElementsAre("0", "4"));
  EXPECT_THAT(run.steps.at(1), ::testing::ElementsAre("0", "4"));
  EXPECT_THAT(run.err, HasSubstr("starting 1 of 2 workers again"));
}

TEST_F(ReentryTest, BeforeTheFirstCheckpoint_BeginsAnewWithTheSameWeights) {
  const Course run = Launch("run", 2, "elastic", "1@2");
  ExpectUndisturbed(run, 2);
  EXPECT_EQ(run.processes(0), 1u);
  EXPECT_THAT(run.steps.at(0), ::testing::ElementsAre("0", "0"));
}

TEST_F(ReentryTest, ThreeProcesses_RankZeroKilled_TheOthersContinue) {
  const Course run = Launch("run", 3, "elastic", "0@6");
  ExpectUndisturbed(run, 3);
  EXPECT_EQ(run.processes(0), 2u);
  EXPECT_EQ(run.processes(1), 1u);
  EXPECT_EQ(run.processes(2), 1u);
}

TEST_F(ReentryTest, KilledOneAfterTheOther_EachCountsAsARestart) {
  const Course run = Launch("run", 3, "elastic", "1@2,0@5,2@9", 3);
  ExpectUndisturbed(run, 3);
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(run.processes(rank), 2u) << rank;
  EXPECT_THAT(run.err, HasSubstr("(restart 3 of 3)"));
}

TEST_F(ReentryTest, TwoKilledAtOnce_TheThirdContinues) {
  const Course run = Launch("run", 3, "elastic", "0@6,2@6");
  ExpectUndisturbed(run, 3);
  EXPECT_EQ(run.processes(1), 1u);
}

TEST_F(ReentryTest, KilledWhileItJoins_SurvivorsJoinTheGenerationAfterThat) {
  for (const std::string place : {"worker.group_begin", "worker.group_built"}) {
    const Course run = Launch(place, 3, "elastic," + place, "1@6");
    ExpectUndisturbed(run, 3);
    EXPECT_EQ(run.processes(0), 1u);
    EXPECT_EQ(run.processes(2), 1u);
    EXPECT_THAT(run.err, HasSubstr("(restart 2 of 3)"));
  }
}

TEST_F(ReentryTest, RestartsUsedUp_Fails) {
  const Course run = Launch("run", 2, "elastic", "1@2,0@6", 1);
  EXPECT_NE(run.code, 0);
  EXPECT_THAT(run.err, HasSubstr("was killed by signal 9"));
}

TEST_F(ReentryTest, NoRestarts_FailsAsAnyProgram) {
  const Course run = Launch("run", 2, "elastic", "1@2", 0);
  EXPECT_NE(run.code, 0);
  EXPECT_THAT(run.err, HasSubstr("was killed by signal 9"));
  EXPECT_THAT(run.pids.at(0), SizeIs(1));
}

TEST_F(ReentryTest, ProgramThatDoesNotReenter_StartsAgainAsAWhole) {
  const Course run = Launch("run", 2, "", "1@6");
  ExpectUndisturbed(run, 2);
  EXPECT_EQ(run.processes(0), 2u);
  EXPECT_EQ(run.processes(1), 2u);
  EXPECT_THAT(run.err, HasSubstr("starting all workers again"));
}

TEST_F(ReentryTest, AgentThatDoesNotSupportIt_AllStartAgain) {
  std::vector<std::string> args = {
      "launch", "--cpu", "--num_processes", "2",  "--max_restarts",
      "1",      "--",    "/usr/bin/env",    "-u", "MUSTER_MEMORY_SOCKET"};
  for (std::string& word : Program("run", "elastic", "1@6")) args.push_back(std::move(word));
  const auto command = Muster(std::move(args));
  Course run;
  run.code = command->Wait();
  Read(*command, "run", &run);
  ExpectUndisturbed(run, 2);
  EXPECT_EQ(run.processes(0), 2u);
  EXPECT_THAT(run.err, HasSubstr("if a process of this job is lost, all start again"));
}

TEST_F(ReentryTest, ErrorOfTheProgram_EndsItsProcess) {
  const Course run = Launch("run", 2, "elastic,error", "", 1);
  EXPECT_NE(run.code, 0);
  EXPECT_THAT(run.err, HasSubstr("the loss is NaN"));
  // Only the process that has thrown it is started again.
  EXPECT_EQ(run.processes(0), 1u);
  EXPECT_EQ(run.processes(1), 2u);
}

TEST_F(ReentryTest, ModelThatOutlivesTheFunction_IsRefusedAndItsProcessStartsAgain) {
  const Course run = Launch("run", 2, "elastic,keeps", "1@6");
  ExpectUndisturbed(run, 2);
  EXPECT_EQ(run.processes(0), 2u);
  EXPECT_THAT(run.err, HasSubstr("outlives the function given to run_elastic()"));
  EXPECT_THAT(run.err, Not(HasSubstr("restart 2")));
}

TEST_F(ReentryTest, AsynchronousSaves_EndBeforeTheNextGeneration) {
  const Course run = Launch("run", 2, "elastic,async", "1@4,0@9");
  ExpectUndisturbed(run, 2);
  EXPECT_EQ(run.processes(0), 2u);
  EXPECT_EQ(run.processes(1), 2u);
}

TEST_F(ReentryTest, SavesInMemory_AreFoundBySurvivorAndNewProcess) {
  const Course run = Launch("run", 2, "elastic,memory", "1@6");
  ExpectUndisturbed(run, 2);
  EXPECT_EQ(run.processes(0), 1u);
}

TEST_F(ReentryTest, ShardedModel_Continues) {
  const Course run = Launch("run", 2, "elastic,zero3", "1@6");
  EXPECT_EQ(run.code, 0) << run.err;
  EXPECT_THAT(run.out, HasSubstr(" 0 inexact epochs of 2")) << run.err;
  EXPECT_EQ(run.processes(0), 1u);
}

TEST_F(ReentryTest, StoppedDuringReentry_EndsAtOnce) {
  for (const char* mode : {"elastic,holds", "elastic,holds,stops"}) {
    const std::string name = absl::StrCat("run", mode);
    std::vector<std::string> args = {
        "launch", "--cpu", "--num_processes", "2", "--max_restarts", "1", "--stop_grace",
        "1h",     "--"};
    for (std::string& word : Program(name, mode, "1@6")) args.push_back(std::move(word));
    const auto command = Muster(std::move(args));
    EXPECT_THAT(command->WaitForLine("muster: rank 1 "), HasSubstr("starting 1 of 2 workers"));
    command->Signal(SIGTERM);
    EXPECT_EQ(command->Wait(), 128 + SIGTERM) << command->err_text();
  }
}

TEST_F(ReentryTest, TwoMachines_OneProcessKilled_AllOthersContinue) {
  const auto coordinator = StartCoordinator();
  const std::vector<std::string> program = Program("run", "elastic", "3@6");
  const auto first = Agent("j", 2, 4, program, {"--machine_rank", "0", "--max_restarts", "2"});
  const auto second = Agent("j", 2, 4, program, {"--machine_rank", "1", "--max_restarts", "2"});
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(second->Wait(), 0) << second->err_text();
  Course run;
  Read(*first, "run", &run);
  Read(*second, "run", &run);
  run.code = 0;
  for (int rank = 0; rank < 3; ++rank) EXPECT_EQ(run.processes(rank), 1u) << rank;
  EXPECT_EQ(run.processes(3), 2u);
  ExpectUndisturbed(run, 4);
}

TEST_F(ReentryTest, MachineIsLostAndComesBack_TheProcessesOfTheOtherContinue) {
  const auto coordinator = StartCoordinator();
  const std::vector<std::string> program = Program("run", "elastic", "");
  const std::string gate = Temp("run/gate_6");
  ASSERT_EQ(mkfifo(gate.c_str(), 0600), 0);
  const OwnedFd opened(open(gate.c_str(), O_RDWR | O_CLOEXEC));
  const auto first = Agent("j", 2, 2, program, {"--machine_rank", "0", "--max_restarts", "2"});
  const std::vector<std::string> rank_one = {"--machine_rank", "1", "--max_restarts", "2"};
  const auto second = Agent("j", 2, 2, program, rank_one);
  first->WaitForLine("[0]: at the gate");
  second->Signal(SIGKILL);
  second->Wait();
  const auto third = Agent("j", 2, 2, program, rank_one);
  // One comes before the loss is noticed, one in the next generation.
  ASSERT_EQ(write(opened.get(), "..", 2), 2);
  EXPECT_EQ(first->Wait(), 0) << first->err_text();
  EXPECT_EQ(third->Wait(), 0) << third->err_text();
  Course run;
  for (const auto* command : {&first, &second, &third}) Read(**command, "run", &run);
  run.code = 0;
  EXPECT_EQ(run.processes(0), 1u) << run.err;
  EXPECT_EQ(run.processes(1), 2u) << run.err;
  ExpectUndisturbed(run, 2);
}

}  // namespace
}  // namespace muster
