// Survivors of a lost process continue in their own processes, within an attempt of a submitted
// job.
#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/e2e/jobs_fixture.h"

namespace muster {
namespace {

using Json = nlohmann::json;
using ::testing::HasSubstr;
using ::testing::SizeIs;

class JobReentryTest : public JobsFixture {
 protected:
  // Submits reentry_worker, which trains 2 epochs; see there.
  std::string SubmitTraining(std::vector<std::string> options, const std::string& mode,
                             const std::string& kills) {
    EXPECT_TRUE(MakeDirectories(Temp("run")).ok());
    options.insert(options.begin(), "submit");
    options.insert(options.end(), {"--name", "job", "--workdir", Temp("run"), "--",
                                   Runfile("tests/e2e/reentry_worker"), Temp("run"), mode, kills});
    return Run(options);
  }
  // Returns "PID STEP" of each beginning of training that a rank has printed.
  std::vector<std::string> Begins(const std::string& job, int rank, int attempt = 1) {
    std::vector<std::string> begins;
    const std::string log =
        Run({"logs", job, "--rank", absl::StrCat(rank), "--attempt", absl::StrCat(attempt)});
    for (const absl::string_view line : absl::StrSplit(log, '\n')) {
      const std::vector<std::string> words = absl::StrSplit(line, ' ');
      if (words.size() == 4 && words[0] == "begin") {
        begins.push_back(absl::StrCat(words[2], " ", words[3]));
      }
    }
    return begins;
  }
  // Returns the first process of a rank; 0: it is not known.
  int ProcessOf(const std::string& job, int rank) {
    int pid = 0;
    const std::string begin = Begins(job, rank).at(0);
    EXPECT_TRUE(absl::SimpleAtoi(begin.substr(0, begin.find(' ')), &pid)) << begin;
    return pid;
  }
  // Starts two processes, of which rank 0 waits at its Gate().
  std::string TrainToTheGate() {
    const std::string job =
        SubmitTraining({"--processes", "2", "--max_restarts", "3"}, "elastic", "");
    WaitUntil([&] { return absl::StrContains(Run({"logs", job}), "at the gate"); });
    return job;
  }
  size_t Processes(const std::string& job, int rank) {
    std::set<std::string> pids;
    for (const std::string& begin : Begins(job, rank)) {
      pids.insert(begin.substr(0, begin.find(' ')));
    }
    return pids.size();
  }
  void ExpectEachSampleOnce(const std::string& job) {
    EXPECT_THAT(Run({"logs", job, "--rank", "0"}), HasSubstr("\n0 inexact epochs of 2"));
  }
  Json Incidents(const std::string& job) {
    return Json::parse(Run({"incidents", job, "-o", "json"}))["incidents"];
  }
  // Makes rank 0 wait before this step until a byte is written.
  OwnedFd Gate(int step) {
    EXPECT_TRUE(MakeDirectories(Temp("run")).ok());
    const std::string gate = Temp(absl::StrCat("run/gate_", step));
    EXPECT_EQ(mkfifo(gate.c_str(), 0600), 0);
    return OwnedFd(open(gate.c_str(), O_RDWR | O_CLOEXEC));
  }
  void WaitForRestarts(const std::string& job, int restarts) {
    WaitUntil([&] { return Get(job)["restarts"] == restarts; });
  }
};

TEST_F(JobReentryTest, OneOfTwoIsKilled_TheOtherContinues_AndTheIncidentIsKept) {
  const auto a = StartNode("a");
  const OwnedFd gate = Gate(7);
  const std::string job =
      SubmitTraining({"--processes", "2", "--max_restarts", "3"}, "elastic", "1@6");
  // A beat reports the first step, before the end.
  WaitForRestarts(job, 1);
  WaitUntil([&] { return Incidents(job)[0]["recovery"]["total_s"].is_number(); });
  ASSERT_EQ(write(gate.get(), ".", 1), 1);
  WaitForState(job, "SUCCEEDED");
  ExpectEachSampleOnce(job);
  EXPECT_EQ(Processes(job, 0), 1u);
  EXPECT_EQ(Processes(job, 1), 2u);
  // Training continued from the checkpoint of step 4.
  ASSERT_THAT(Begins(job, 0), SizeIs(2));
  EXPECT_THAT(Begins(job, 0)[1], HasSubstr(" 4"));
  // The output of its first process is still there, and so is the reason for a second.
  EXPECT_THAT(Run({"logs", job, "--rank", "1"}),
              HasSubstr("was killed by signal 9 (SIGKILL); rank 1 starts again"));
  const Json record = Get(job);
  EXPECT_EQ(record["restarts"], 1);
  EXPECT_EQ(record["attempts"].size(), 2u) << record["attempts"];
  EXPECT_EQ(record["attempts"][1]["number"], 1);
  const Json incidents = Incidents(job);
  ASSERT_EQ(incidents.size(), 1u) << incidents;
  EXPECT_EQ(incidents[0]["class"], "PROCESS_FAILED");
  EXPECT_EQ(incidents[0]["rank"], 1);
  EXPECT_EQ(incidents[0]["signal"], SIGKILL);
  EXPECT_EQ(incidents[0]["continued_in_place"], true);
  const Json recovery = incidents[0]["recovery"];
  double sum = 0;
  for (const char* const stage : {"detect_s", "decide_s", "fence_s", "place_s", "rendezvous_s",
                                  "restore_s", "first_step_s"}) {
    ASSERT_TRUE(recovery[stage].is_number()) << stage << " in " << recovery;
    sum += recovery[stage].get<double>();
  }
  EXPECT_NEAR(recovery["total_s"].get<double>(), sum, 1e-6);
}

TEST_F(JobReentryTest, TwoNodes_EachLosesAProcess_TheOthersContinue) {
  const auto a = StartNode("a"), b = StartNode("b");
  const std::string job =
      SubmitTraining({"--processes", "4", "--max_restarts", "2"}, "elastic", "3@6,1@9");
  WaitForState(job, "SUCCEEDED");
  ExpectEachSampleOnce(job);
  EXPECT_EQ(Get(job)["restarts"], 2);
  EXPECT_EQ(Processes(job, 0), 1u);
  EXPECT_EQ(Processes(job, 1), 2u);
  EXPECT_EQ(Processes(job, 2), 1u);
  EXPECT_EQ(Processes(job, 3), 2u);
  EXPECT_THAT(Incidents(job), SizeIs(2));
  EXPECT_EQ(Incidents(job)[0]["rank"], 3);
  EXPECT_EQ(Incidents(job)[1]["rank"], 1);
  EXPECT_THAT(Run({"incidents", job}), HasSubstr("1+1"));
}

TEST_F(JobReentryTest, RestartsAreUsedUp_FailsWithItsCause) {
  const auto a = StartNode("a");
  const std::string job =
      SubmitTraining({"--processes", "2", "--max_restarts", "1"}, "elastic", "1@2,0@6");
  WaitForState(job, "FAILED");
  EXPECT_EQ(Get(job)["restarts"], 1);
  EXPECT_THAT(Get(job)["why"], HasSubstr("it was restarted 1 time"));
}

TEST_F(JobReentryTest, NoRestarts_OrAProgramThatDoesNotReenter_AreAsBefore) {
  const auto a = StartNode("a");
  const std::string none = SubmitTraining({"--processes", "2"}, "elastic", "1@2");
  WaitForState(none, "FAILED");
  EXPECT_THAT(Get(none)["attempts"], SizeIs(1));
  ASSERT_TRUE(RemoveTree(Temp("run")).ok());
  const std::string whole = SubmitTraining({"--processes", "2", "--max_restarts", "1"}, "", "1@6");
  WaitForState(whole, "SUCCEEDED");
  ExpectEachSampleOnce(whole);
  EXPECT_EQ(Get(whole)["attempts"][1]["number"], 2);
}

TEST_F(JobReentryTest, CancelledBetweenTwoGenerations_LeavesNoProcess) {
  const auto a = StartNode("a");
  const std::string job =
      SubmitTraining({"--processes", "2", "--max_restarts", "3"}, "elastic,holds", "1@6");
  WaitForRestarts(job, 1);
  Run({"cancel", job});
  WaitForState(job, "CANCELLED");
  EXPECT_EQ(Get(job)["restarts"], 1);
  EXPECT_EQ(Get(job)["attempts"].back()["end"]["class"], "CANCELLED");
}

TEST_F(JobReentryTest, CancelledDuringTheRestartDelay_EndsAtOnce) {
  const auto a = StartNode("a");
  const std::string job = SubmitTraining(
      {"--processes", "2", "--max_restarts", "3", "--restart_delay", "5m"}, "elastic", "1@6");
  WaitForRestarts(job, 1);
  const absl::Time cancelled = absl::Now();
  Run({"cancel", job});
  WaitForState(job, "CANCELLED");
  EXPECT_LT(absl::Now() - cancelled, absl::Minutes(2));  // well below --restart_delay
}

TEST_F(JobReentryTest, CoordinatorIsAwayWhileAProcessIsLost_TheOtherContinues) {
  const auto a = StartNode("a");
  const OwnedFd gate = Gate(6);
  const std::string job = TrainToTheGate();
  const int pid = ProcessOf(job, 1);
  ASSERT_GT(pid, 0);
  coordinator_->Signal(SIGKILL);
  coordinator_->Wait();
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  ASSERT_EQ(write(gate.get(), "..", 2), 2);
  coordinator_ = StartCoordinator();
  WaitForState(job, "SUCCEEDED");
  ExpectEachSampleOnce(job);
  EXPECT_EQ(Get(job)["restarts"], 1);
  EXPECT_EQ(Processes(job, 0), 1u);
  EXPECT_EQ(Processes(job, 1), 2u);
}

TEST_F(JobReentryTest, RequestThatCannotBeReadAtFirst_IsReadLater) {
  const auto a = StartNode("a");
  const OwnedFd gate = Gate(6);
  const std::string job = TrainToTheGate();
  const std::vector<std::string> attempts = *ListDirectory(Temp("a/attempts"));
  ASSERT_THAT(attempts, SizeIs(1));
  const std::string folder = Temp("a/attempts/" + attempts[0]);
  // Hides the first report, as an error of the disk would.
  ASSERT_TRUE(WriteFileAtomically(folder + "/restart_2.json", "{}").ok());
  const int pid = ProcessOf(job, 1);
  ASSERT_GT(pid, 0);
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  WaitUntil([&] { return PathExists(folder + "/restart_1.json"); });
  // Its agent has learned of the file before it comes to this.
  Run({"logs", job});
  EXPECT_EQ(Get(job)["restarts"], 0);
  ASSERT_EQ(unlink((folder + "/restart_2.json").c_str()), 0);
  WaitForRestarts(job, 1);
  ASSERT_EQ(write(gate.get(), "..", 2), 2);
  WaitForState(job, "SUCCEEDED");
  ExpectEachSampleOnce(job);
}

TEST_F(JobReentryTest, AgentIsAwayWhileAProcessIsLost_TheNextOneAsks) {
  auto a = StartNode("a");
  const OwnedFd gate = Gate(6);
  const std::string job = TrainToTheGate();
  const int pid = ProcessOf(job, 1);
  ASSERT_GT(pid, 0);
  a->Signal(SIGKILL);
  a->Wait();
  ASSERT_EQ(kill(pid, SIGKILL), 0);
  ASSERT_EQ(write(gate.get(), "..", 2), 2);
  const std::vector<std::string> attempts = *ListDirectory(Temp("a/attempts"));
  ASSERT_THAT(attempts, SizeIs(1));
  WaitUntil([&] { return PathExists(Temp("a/attempts/" + attempts[0] + "/restart_1.json")); });
  a = StartNode("a");
  WaitForState(job, "SUCCEEDED");
  ExpectEachSampleOnce(job);
  EXPECT_EQ(Get(job)["restarts"], 1);
  EXPECT_EQ(Processes(job, 0), 1u);
}

}  // namespace
}  // namespace muster
