// Submitted jobs with real programs: a coordinator, agents that wait for jobs, and `muster`.
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <map>
#include <memory>
#include <nlohmann/json.hpp>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "agent/node_groups.h"
#include "base/file.h"
#include "base/secret_file.h"
#include "base/signature.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "tests/e2e/jobs_fixture.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ContainsRegex;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::Not;
using Json = nlohmann::json;

class JobsTest : public JobsFixture {
 protected:
  // Submits training with checkpoints in memory, on up to two nodes, as many as there are.
  std::string Train(const std::string& name, const std::string& project,
                    std::vector<std::string> options = {"--processes_per_node", "1"}) {
    options.insert(options.end(), {"--processes", "2", "--stop_grace", "1s", "--env",
                                   absl::StrCat("MUSTER_PROJECT_DIR=", project)});
    return Submit(options,
                  absl::StrCat("echo $$ > ", Temp("pid"), "$RANK; exec ",
                               Runfile("tests/e2e/memory_worker"), " ", name, " 20 13 1000"));
  }
  // Waits for words in the output of rank 0 of a running job.
  void WaitForWords(const std::string& job, const std::string& words) {
    WaitForState(job, "RUNNING");
    WaitUntil([&] { return absl::StrContains(Run({"logs", job}), words); });
  }
  std::string WeightsOf(const std::string& job) {
    const std::string log = Run({"logs", job});
    const size_t at = log.find("weights ");
    EXPECT_NE(at, std::string::npos) << log;
    return at == std::string::npos ? "" : log.substr(at, 24);
  }
  static std::vector<pid_t> ChildrenOf(pid_t parent) {
    std::vector<pid_t> children;
    const std::vector<std::string> processes = *ListDirectory("/proc");
    for (const std::string& other : processes) {
      int number = 0;
      if (!absl::SimpleAtoi(other, &number)) continue;
      const absl::StatusOr<std::string> stat =
          ReadFile(absl::StrCat("/proc/", other, "/stat"), 4096);
      if (!stat.ok()) continue;
      const std::vector<std::string> fields =
          absl::StrSplit(stat->substr(stat->rfind(')') + 2), ' ');
      if (fields.size() > 1 && fields[1] == absl::StrCat(parent)) children.push_back(number);
    }
    return children;
  }
  // Returns whether this machine lets a test make control groups below its own.
  static bool MayMakeGroups() {
    const absl::StatusOr<agent::OwnGroup> own = agent::FindOwnGroup(
        *ReadFile("/proc/self/cgroup", 1 << 20), *ReadFile("/proc/self/mountinfo", 1 << 20));
    if (!own.ok()) return false;
    const std::string probe = JoinPath(own->folder(), "muster-probe-" + RandomHex());
    if (mkdir(probe.c_str(), 0700) != 0) return false;
    rmdir(probe.c_str());
    return !PathExists("/run/systemd/system");
  }
};

TEST_F(JobsTest, WholeStory_FromSubmissionToTheLogs) {
  const auto a = StartNode("a"), b = StartNode("b");
  EXPECT_THAT(
      Run({"submit", "--dry_run", "--processes", "4", "--", "/bin/true"}),
      AllOf(HasSubstr("starts now"), HasSubstr("  a: 2 processes"), HasSubstr("  b: 2 processes")));
  ASSERT_TRUE(
      WriteFileAtomically(Temp("job.yaml"),
                          "name: hello\n"
                          "command: [/bin/sh, -c, 'echo rank $RANK of $WORLD_SIZE: $WORD']\n"
                          "processes: 2\n"
                          "env: {WORD: file}\n")
          .ok());
  EXPECT_EQ(Run({"submit", Temp("job.yaml"), "--processes", "4", "--env", "WORD=flag", "--wait"}),
            "hello-1");
  EXPECT_THAT(Run({"watch", "hello-1"}),
              HasSubstr("hello-1 SUCCEEDED: all processes have succeeded"));
  EXPECT_EQ(Run({"logs", "hello-1", "--rank", "3"}), "rank 3 of 4: flag");
  EXPECT_THAT(absl::StrSplit(Run({"logs", "hello-1", "--rank", "all"}), '\n'),
              ElementsAre("[0]: rank 0 of 4: flag", "[1]: rank 1 of 4: flag",
                          "[2]: rank 2 of 4: flag", "[3]: rank 3 of 4: flag"));
  EXPECT_EQ(Run({"list", "-o", "name"}), "hello-1");
  // On one node no process joins anything for a program without Muster's library.
  EXPECT_EQ(Run({"submit", "--name", "one", "--wait", "--", "/bin/true"}), "one-2");
  EXPECT_THAT(Run({"status", "one-2"}, 3), HasSubstr("muster describe one-2 shows"));
  for (const char* const command : {"logs", "top", "status", "stacks", "barrier", "remove"}) {
    EXPECT_THAT(Run({command, "helo-1"}, 3), HasSubstr("did you mean hello-1?")) << command;
  }
  EXPECT_THAT(Run({"trigger", "helo-1", "checkpoint"}, 3), HasSubstr("did you mean hello-1?"));
  EXPECT_THAT(Run({"submit", "--processes", "5", "--", "/bin/true"}), HasSubstr("true-3"));
}

TEST_F(JobsTest, Cancel_EndsEveryProcess) {
  const auto a = StartNode("a");
  const std::string job =
      Submit({"--processes", "2"}, absl::StrCat("echo $$ > ", Temp("pid"), "$RANK; sleep 1000"));
  const pid_t pids[] = {PidIn("pid0"), PidIn("pid1")};
  EXPECT_THAT(Run({"cancel", job, "--why", "a test"}), HasSubstr("it was cancelled: a test"));
  for (const pid_t pid : pids) EXPECT_TRUE(WaitUntilEnded(pid));
  WaitForState(job, "CANCELLED");
  EXPECT_EQ(Run({"retry", job}).substr(0, 5), "job-1");
}

TEST_F(JobsTest, ElasticJob_ShrinksWithALostNode_GrowsWhenItIsBack_AndIsResized) {
  ShortenNodeLease();
  const auto a = StartNode("a");
  auto b = StartNode("b");
  // The first rank of each attempt prints how many there are, and whether it was asked to stop.
  const std::string job = Submit(
      {"--processes", "1:4", "--grow_after", "1s"},
      absl::StrCat("[ $RANK = 0 ] && echo $WORLD_SIZE >> ", Temp("sizes"),
                   "; trap 'echo saved $RANK >> ", Temp("saves"), "; exit 0' TERM; echo $$ > ",
                   Temp("pid"), "$RANK; while ! [ -e ", Temp("done"), " ]; do sleep 0.1; done"));
  const auto wait_for = [&](const std::string& sizes) { WaitForText(Temp("sizes"), sizes); };
  wait_for("4\n");
  WaitForState(job, "RUNNING");
  // The machine is gone with all that runs there.
  const pid_t there = PidIn("pid3");
  b->Signal(SIGKILL);
  b->Wait();
  wait_for("4\n2\n");
  kill(there, SIGKILL);
  b = StartNode("b");
  wait_for("4\n2\n4\n");
  WaitForState(job, "RUNNING");
  EXPECT_THAT(Run({"resize", job, "--processes", "3:4"}), HasSubstr("RUNNING"));
  EXPECT_THAT(Run({"resize", job, "--processes", "1", "--why", "a test"}),
              HasSubstr("it is resized from 4 to 1 process: a test"));
  wait_for("4\n2\n4\n1\n");
  ASSERT_TRUE(WriteFileAtomically(Temp("done"), "").ok());
  WaitForState(job, "SUCCEEDED");
  const Json record = Get(job);
  EXPECT_EQ(record["restarts"], 0);
  std::vector<std::string> classes;
  for (const Json& attempt : record["attempts"]) {
    classes.push_back(attempt["end"].is_null() ? "" : attempt["end"]["class"].get<std::string>());
  }
  EXPECT_THAT(classes, ElementsAre("NODE_LOST", "RESIZED", "RESIZED", ""));
  EXPECT_THAT(Run({"resize", job, "--processes", "2"}, 4), HasSubstr("has succeeded"));
}

TEST_F(JobsTest, LostNode_IsReplacedByTheSpare_AlthoughAnotherJobWaits) {
  ShortenNodeLease();
  const auto a = StartNode("a");
  auto b = StartNode("b");
  const auto c = StartNode("c");
  const std::string script = absl::StrCat("echo $$ > ", Temp("pid"), "$RANK; while ! [ -e ",
                                          Temp("done"), " ]; do sleep 0.1; done");
  EXPECT_THAT(Run({"submit", "--dry_run", "--processes", "4", "--spare_nodes", "1", "--", "x"}),
              HasSubstr("  c: spare, room for 2 processes"));
  const std::string job = Submit({"--processes", "4", "--spare_nodes", "1"}, script);
  const std::string late = Submit({"--processes", "1"}, "true");
  WaitForState(job, "RUNNING");
  EXPECT_EQ(Get(job)["spares"][0]["node"], "c");
  EXPECT_THAT(Run({"nodes"}), HasSubstr(job + " (spare)"));
  EXPECT_EQ(StateOf(late), "QUEUED");
  const pid_t there = PidIn("pid3");
  b->Signal(SIGKILL);
  b->Wait();
  WaitUntil([&] { return Get(job)["attempts"].size() == 2u && StateOf(job) == "RUNNING"; });
  EXPECT_EQ(Get(job)["attempts"][1]["placements"][1]["node"], "c");
  EXPECT_EQ(StateOf(late), "QUEUED");
  kill(there, SIGKILL);
  b = StartNode("b");
  WaitForState(late, "SUCCEEDED");
  ASSERT_TRUE(WriteFileAtomically(Temp("done"), "").ok());
  WaitForState(job, "SUCCEEDED");
  EXPECT_EQ(Get(job)["restarts"], 0);
}

TEST_F(JobsTest, FilesOfASubmission_AreInTheFolderOfEachAttempt) {
  const auto a = StartNode("a");
  ASSERT_TRUE(MakeDirectories(Temp("conf/deep")).ok());
  ASSERT_TRUE(WriteFileAtomically(Temp("conf/deep/text"), "lr: 1").ok());
  ASSERT_TRUE(WriteFileAtomically(Temp("run.sh"),
                                  "#!/bin/sh\ncat conf/deep/text\nrm -r conf\n"
                                  "exit $TORCHELASTIC_RESTART_COUNT\n")
                  .ok());
  ASSERT_EQ(chmod(Temp("run.sh").c_str(), 0755), 0);
  ASSERT_TRUE(WriteFileAtomically(Temp("job.yaml"),
                                  "name: job\ncommand: [./run.sh]\nfiles: [conf, run.sh]\n"
                                  "retention: 24h\nfailure_policy: {failed: 1}\n")
                  .ok());
  const std::string job = Run({"submit", Temp("job.yaml")});
  WaitForState(job, "SUCCEEDED");
  EXPECT_THAT(Run({"logs", job}), HasSubstr("lr: 1"));
  const Json spec = Get(job)["spec"];
  EXPECT_EQ(spec["files"][0]["path"], "conf/deep/text");
  EXPECT_EQ(spec["files"][0]["size"], 5);
  EXPECT_EQ(spec["retention"], "24h");
  EXPECT_EQ(spec["max_restarts"], 1);
}

TEST_F(JobsTest, ElasticTraining_LosesANodeAndGetsItBack_TrainsEverySampleOnce) {
  ShortenNodeLease();
  const auto a = StartNode("a");
  auto b = StartNode("b");
  const std::string folder = Temp("elastic");
  ASSERT_EQ(mkdir(folder.c_str(), 0700), 0);
  const std::string job = Run({"submit", "--processes", "1:4", "--grow_after", "1s", "--name",
                               "job", "--", Runfile("tests/e2e/elastic_worker"), folder});
  WaitForText(folder + "/sizes", "4\n");
  // The machine is gone, with all that runs there.
  b->Signal(SIGKILL);
  b->Wait();
  const pid_t runner = RunnerOn("b");
  ASSERT_GT(runner, 0);
  kill(runner, SIGKILL);
  WaitForText(folder + "/sizes", "4\n2\n");
  ASSERT_TRUE(WriteFileAtomically(absl::StrCat(folder, "/grown"), "").ok());
  b = StartNode("b");
  WaitForState(job, "SUCCEEDED");
  EXPECT_THAT(Run({"logs", job}), AllOf(HasSubstr("began after some samples; 0 inexact epochs of "),
                                        Not(HasSubstr("passing over"))));
  const Json record = Get(job);
  ASSERT_EQ(record["attempts"].size(), 3u);
  EXPECT_EQ(record["attempts"][1]["end"]["class"], "RESIZED");
  EXPECT_EQ(record["restarts"], 0);
  // Attempt 2 continued from a checkpoint of attempt 1, and attempt 3 from the one that attempt 2
  // made when it was stopped.
  EXPECT_THAT(Run({"logs", job, "--attempt", "2"}), Not(HasSubstr("passing over")));
  // They belong to the job, by its own name, whichever attempt has made them.
  const auto checkpoints = [&](std::vector<std::string> args, int code) {
    args.insert(args.begin(), "checkpoints");
    args.insert(args.end(), {"--coordinator", address_});
    const auto command = Muster(args);
    EXPECT_EQ(command->Wait(), code) << command->err_text();
    return command->out_text();
  };
  const Json registered = Json::parse(checkpoints({"registered", job, "-o", "json"}, 0));
  ASSERT_FALSE(registered.empty());
  const std::string last = absl::StrCat(registered.back()["id"].get<int64_t>());
  EXPECT_THAT(checkpoints({"pin", job, last}, 0), HasSubstr("is pinned"));
  checkpoints({"pin", job, "checkpoint_999"}, 3);
  // The same holds for where another job with this project folder would begin.
  const Json plan = Json::parse(
      Run({"submit", "--dry_run", "-o", "json", "--env",
           absl::StrCat("MUSTER_PROJECT_DIR=", folder, "/checkpoints"), "--", "x"}))["plan"];
  EXPECT_EQ(plan["checkpoint"]["resume_from"], registered.back()["path"]) << plan;
}

TEST_F(JobsTest, TrainingThatLosesTheNodeOfRankZero_ContinuesFromItsPeersMemory) {
  ShortenNodeLease();
  std::map<std::string, std::unique_ptr<Command>> nodes;
  nodes["a"] = StartNode("a");
  nodes["b"] = StartNode("b");
  const std::string whole = Train("none", Temp("whole"));
  WaitForState(whole, "SUCCEEDED");
  const std::string weights = WeightsOf(whole);
  const std::string job = Train("wait", Temp("project"));
  WaitForWords(job, "waits at 13");
  // The machine is gone, with all that runs there; an empty one waits.
  const std::string lost = Get(job)["attempts"][0]["placements"][0]["node"];
  const pid_t runner = RunnerOn(lost, job);
  nodes[lost]->Signal(SIGKILL);
  nodes[lost]->Wait();
  kill(runner, SIGKILL);
  nodes["c"] = StartNode("c");
  WaitForState(job, "SUCCEEDED");
  EXPECT_EQ(Get(job)["attempts"][0]["end"]["class"], "NODE_LOST");
  EXPECT_THAT(Run({"logs", job}), HasSubstr("begins at 13"));
  EXPECT_FALSE(PathExists(Temp("project/checkpoints/checkpoint_0")));
  EXPECT_EQ(WeightsOf(job), weights);
}

// This works even if the node's agent was away for a time: the runner hands over what it holds.
TEST_F(JobsTest, TrainingThatIsKilled_ContinuesFromTheMemoryOfItsNode) {
  auto a = StartNode("a");
  const std::string job =
      Train("wait", Temp("project"), {"--max_restarts", "1", "--restart_delay", "1s"});
  WaitForWords(job, "waits at 13");
  a->Signal(SIGKILL);
  a->Wait();
  a = StartNode("a");
  kill(PidIn("pid1"), SIGKILL);
  WaitForState(job, "SUCCEEDED");
  EXPECT_EQ(Get(job)["attempts"][0]["end"]["class"], "PROCESS_FAILED");
  EXPECT_THAT(Run({"logs", job}), HasSubstr("begins at 13"));
  EXPECT_FALSE(PathExists(Temp("project/checkpoints/checkpoint_0")));
}

// The memory is freed at once, not only when no next attempt may follow any longer.
TEST_F(JobsTest, TrainingThatIsCancelled_LeavesNothingInMemory) {
  const auto a = StartNode("a");
  const std::string job = Train("wait", Temp("project"), {});
  WaitForWords(job, "waits at 13");
  Run({"cancel", job});
  WaitForState(job, "CANCELLED");
  WaitUntil([&] { return absl::StrContains(a->err_text(), "checkpoints in memory are dropped"); });
}

TEST_F(JobsTest, FailedProgram_IsRestarted_AndItsLastLinesAreKept) {
  const auto a = StartNode("a"), b = StartNode("b");
  const std::string job = Submit({"--processes", "4", "--max_restarts", "1"},
                                 "echo no luck; [ $RANK = 3 ] && exit 7; sleep 1000");
  WaitForState(job, "FAILED");
  const Json record = Get(job);
  EXPECT_EQ(record["attempts"].size(), 2u);
  for (const Json& attempt : record["attempts"]) {
    EXPECT_EQ(attempt["end"]["class"], "PROCESS_FAILED") << attempt.dump();
    EXPECT_EQ(attempt["end"]["rank"], 3);
    EXPECT_EQ(attempt["end"]["exit_code"], 7);
    EXPECT_EQ(attempt["end"]["last_lines"][0], "no luck");
  }
  const Json incidents = Json::parse(Run({"incidents", job, "-o", "json"}))["incidents"];
  ASSERT_EQ(incidents.size(), 2u);
  EXPECT_EQ(incidents[0]["rank"], 3);
  EXPECT_GE(incidents[0]["ran_s"], 0);
  EXPECT_TRUE(incidents[0]["down_s"].is_number()) << incidents;
  EXPECT_TRUE(incidents[1]["down_s"].is_null()) << incidents;
  const Json& recovery = incidents[0]["recovery"];
  for (const char* const known : {"detect_s", "decide_s", "fence_s", "place_s", "rendezvous_s"}) {
    EXPECT_TRUE(recovery[known].is_number()) << known << " in " << recovery;
  }
  // A foreign program reports neither, and nothing has followed the last attempt.
  EXPECT_TRUE(recovery["restore_s"].is_null()) << recovery;
  EXPECT_TRUE(recovery["first_step_s"].is_null()) << recovery;
  EXPECT_TRUE(incidents[1]["recovery"]["place_s"].is_null()) << incidents;
  EXPECT_THAT(Run({"incidents", job}), HasSubstr("exited with code 7"));
}

TEST_F(JobsTest, HungJob_IsRestarted_AndTheStacksOfAllRanksAreKept) {
  const auto a = StartNode("a"), b = StartNode("b");
  const std::string job = Run(
      {"submit", "--name", "job", "--processes", "2", "--processes_per_node", "1", "--hang_timeout",
       "10s", "--max_restarts", "1", "--", Runfile("tests/e2e/barrier_worker"), "stuck"});
  WaitForState(job, "SUCCEEDED");
  const Json record = Get(job);
  EXPECT_EQ(record["restarts"], 1);
  const Json incidents = Json::parse(Run({"incidents", job, "-o", "json"}))["incidents"];
  ASSERT_EQ(incidents.size(), 1u);
  const Json& hang = incidents[0];
  EXPECT_EQ(hang["class"], "HANG") << hang;
  EXPECT_EQ(hang["rank"], 1) << hang;
  EXPECT_THAT(std::string(hang["why"]),
              AllOf(HasSubstr("no rank has shown progress for 10s: rank 1 (pid "),
                    HasSubstr("between steps, AllReduce #1 (1,024 Float), done"),
                    HasSubstr("1 other waits: rank 0 (pid ")));
  ASSERT_EQ(hang["hung"].size(), 2u) << hang;
  EXPECT_EQ(hang["hung"][0]["ranks"], Json({0}));
  EXPECT_THAT(std::string(hang["hung"][0]["stack"]), HasSubstr("Barrier"));
  EXPECT_THAT(std::string(hang["hung"][1]["stack"]), HasSubstr("ReadShardForever()"));
  EXPECT_THAT(Run({"incidents", job}),
              AllOf(HasSubstr("attempt 1, rank 1 hung: step "), HasSubstr("ReadShardForever()")));
}

TEST_F(JobsTest, HungLaunch_PrintsTheStacksOfAllRanks_AndRestarts) {
  const auto launch =
      Muster({"launch", "--cpu", "--num_processes", "2", "--hang_timeout", "10s", "--max_restarts",
              "1", "--", Runfile("tests/e2e/barrier_worker"), "stuck"});
  EXPECT_EQ(launch->Wait(), 0) << launch->err_text();
  EXPECT_THAT(launch->err_text(),
              AllOf(HasSubstr("the job hangs: no rank has shown progress for 10s: rank 1 (pid "),
                    HasSubstr("muster: rank 0: step 7"), HasSubstr("ReadShardForever()"),
                    HasSubstr("(restart 1 of 1)")));
}

TEST_F(JobsTest, KilledWorker_HasTheTimeOfEachStageOfItsRecovery_AlsoAfterARestart) {
  const auto a = StartNode("a");
  const std::string job = Submit({"--processes", "2", "--max_restarts", "1"},
                                 absl::StrCat("echo $$ > ", Temp("pid"), "$RANK; exec ",
                                              Runfile("tests/e2e/barrier_worker"), " recover"));
  const auto steps = [&](int attempt) {
    return Get(job)["attempts"].size() >= static_cast<size_t>(attempt) &&
           absl::StrContains(Run({"logs", job, "--rank", "1", "--attempt", absl::StrCat(attempt)}),
                             "stepping");
  };
  WaitUntil([&] { return steps(1); });
  ASSERT_EQ(kill(PidIn("pid1"), SIGKILL), 0);
  WaitUntil([&] { return steps(2); });
  const auto recovery = [&] {
    const Json incidents = Json::parse(Run({"incidents", job, "-o", "json"}))["incidents"];
    EXPECT_EQ(incidents.size(), 1u) << incidents;
    return incidents[0]["recovery"];
  };
  // The beat that reports it may still be on its way.
  WaitUntil([&] { return recovery()["first_step_s"].is_number(); });
  const Json before = recovery();
  double sum = 0;
  for (const char* const stage : {"detect_s", "decide_s", "fence_s", "place_s", "rendezvous_s",
                                  "restore_s", "first_step_s"}) {
    ASSERT_TRUE(before[stage].is_number()) << stage << " in " << before;
    EXPECT_GE(before[stage].get<double>(), 0) << stage << " in " << before;
    sum += before[stage].get<double>();
  }
  EXPECT_NEAR(before["total_s"].get<double>(), sum, 1e-6);
  EXPECT_GT(sum, 0);
  coordinator_->Signal(SIGKILL);
  coordinator_->Wait();
  coordinator_ = StartCoordinator();
  EXPECT_EQ(recovery(), before);
  EXPECT_THAT(Run({"incidents", job}), HasSubstr("RENDEZVOUS"));
  Run({"cancel", job});
  WaitForState(job, "CANCELLED");
}

TEST_F(JobsTest, ReportThatCannotBeWritten_DoesNotHideHowTheJobEnded) {
  const auto a = StartNode("a");
  // Imitates a full disk: the runner's report, next to the work folder, cannot take its name.
  const std::string good = Submit({}, "mkdir ../end.json");
  WaitForState(good, "SUCCEEDED");
  EXPECT_EQ(Get(good)["attempts"].size(), 1u);
  const std::string bad = Submit({}, "mkdir ../end.json; exit 7");
  WaitForState(bad, "FAILED");
  const Json record = Get(bad);
  ASSERT_EQ(record["attempts"].size(), 1u);
  EXPECT_EQ(record["attempts"][0]["end"]["class"], "PROCESS_FAILED");
  EXPECT_THAT(record["why"].get<std::string>(), HasSubstr("the program has failed"));
}

TEST_F(JobsTest, ProgramThatIsNotThere_IsNotRetried) {
  const auto a = StartNode("a");
  const std::string job = Run({"submit", "--max_restarts", "5", "--", "/no/such/program"});
  WaitForState(job, "FAILED");
  EXPECT_EQ(Get(job)["attempts"].size(), 1u);
  EXPECT_THAT(Get(job)["why"].get<std::string>(), HasSubstr("/no/such/program"));
  // The same holds for a file that is no program, and for a folder in which none can run.
  ASSERT_TRUE(WriteFileAtomically(Temp("plain"), "text").ok());
  const std::string plain = Run({"submit", "--max_restarts", "5", "--", Temp("plain")});
  WaitForState(plain, "FAILED");
  EXPECT_EQ(Get(plain)["attempts"].size(), 1u);
  EXPECT_EQ(Get(plain)["attempts"][0]["end"]["class"], "USER_ERROR");
  EXPECT_THAT(Get(plain)["why"].get<std::string>(), HasSubstr(Temp("plain")));
  const std::string lost =
      Run({"submit", "--max_restarts", "5", "--workdir", "/no/such/folder", "--", "/bin/true"});
  WaitForState(lost, "FAILED");
  EXPECT_THAT(Get(lost)["why"].get<std::string>(), HasSubstr("/no/such/folder"));
}

// The variables are for the processes only: the runner has to start whatever a job sets.
TEST_F(JobsTest, VariablesOfTheDynamicLinker_ReachTheProcessesOnly) {
  const auto a = StartNode("a");
  ASSERT_TRUE(MakeDirectories(Temp("lib")).ok());
  ASSERT_TRUE(WriteFileAtomically(Temp("lib/libstdc++.so.6"), "no library").ok());
  ASSERT_TRUE(WriteFileAtomically(Temp("lib/only_here"),
                                  "#!/bin/sh\necho $LD_LIBRARY_PATH, $MUSTER_LOG_LEVEL\n")
                  .ok());
  ASSERT_EQ(chmod(Temp("lib/only_here").c_str(), 0700), 0);
  const std::string job = Run({"submit", "--wait", "--env", "LD_LIBRARY_PATH=" + Temp("lib"),
                               "--env", "PATH=" + Temp("lib") + ":/usr/bin:/bin", "--env",
                               "MUSTER_LOG_LEVEL=loud", "--", "only_here"});
  EXPECT_EQ(Run({"logs", job}), Temp("lib") + ", loud");
}

// The agent's own limit is higher, and select() and loops over all descriptors want a low one.
TEST_F(JobsTest, LimitOfOpenFiles_IsTheOneThatTheAgentWasStartedWith) {
  Command node(*host_,
               {"/bin/sh", "-c", "ulimit -Sn 500; exec \"$@\"", "sh",
                Runfile("agent/cmd/muster-agent"), "--serve", "--coordinator", address_,
                "--state_dir", Temp("a"), "--node", "a", "--cpus", "2"},
               env_);
  WaitUntil([&] { return NodeState("a") == "READY"; });
  EXPECT_EQ(Run({"logs", Run({"submit", "--wait", "--", "/bin/sh", "-c", "ulimit -Sn"})}), "500");
}

TEST_F(JobsTest, KilledAgent_LeavesItsProcessesRunning_AndTheNextOneAdoptsThem) {
  auto a = StartNode("a");
  ASSERT_EQ(mkfifo(Temp("fifo").c_str(), 0600), 0);
  const std::string job = Submit(
      {"--processes", "1"},
      absl::StrCat("echo $$ > ", Temp("pid"), "$RANK; read x < ", Temp("fifo"), "; echo got $x"));
  const pid_t pid = PidIn("pid0");
  a->Signal(SIGKILL);
  a->Wait();
  const auto again = StartNode("a");
  EXPECT_EQ(StateOf(job), "RUNNING");
  EXPECT_EQ(kill(pid, 0), 0);
  Command writer(*host_, {"/bin/sh", "-c", absl::StrCat("echo word > ", Temp("fifo"))}, env_);
  WaitForState(job, "SUCCEEDED");
  EXPECT_EQ(Run({"logs", job}), "got word");
  EXPECT_EQ(Get(job)["attempts"].size(), 1u);
}

TEST_F(JobsTest, LaunchOfASubmittedJobsName_IsSaidToBeOne) {
  const auto a = StartNode("a");
  const std::string job = Submit({}, "sleep 1000");
  WaitForState(job, "RUNNING");
  const auto launch = Agent(job, 1, 2, {Runfile("tests/e2e/barrier_worker"), "elastic"});
  WaitUntil([&] {
    return Muster({"status", "launch:" + job, "--coordinator", address_})->Wait() == 0;
  });
  for (const char* const verb : {"status", "stacks"}) {
    EXPECT_THAT(OneLine({verb, job}, 2), AllOf(HasSubstr("is both a submitted job and a launch"),
                                               HasSubstr("launch:" + job), HasSubstr(job + ".1")));
  }
  WaitUntil([&] {
    const auto stacks = Muster({"stacks", job + ".1", "--coordinator", address_});
    return stacks->Wait() == 0 && absl::StrContains(stacks->out_text(), "sleep");
  });
  EXPECT_THAT(Run({"status", "launch:" + job}), Not(HasSubstr(job + ".1")));
  Run({"cancel", job});
}

// Without control groups, only its helpers end what a runner has left.
TEST_F(JobsTest, KilledRunner_IsNotOverBeforeItsProcesses) {
  const auto a = StartNode("a", {"--control_groups", "off"});
  const std::string job =
      Submit({"--processes", "1"}, absl::StrCat("echo $$ > ", Temp("pid"), "$RANK; sleep 1000"));
  const pid_t pid = PidIn("pid0");
  const pid_t runner = RunnerOn("a");
  ASSERT_GT(runner, 0);
  // No process cleans up after it for now: the process lives on.
  const std::vector<pid_t> helpers = ChildrenOf(runner);
  ASSERT_FALSE(helpers.empty());
  for (const pid_t helper : helpers) kill(helper, SIGSTOP);
  kill(runner, SIGKILL);
  const std::string queued = Submit({"--processes", "2"}, "true");
  // A job that needs the room of the first one waits for as long as the process lives.
  EXPECT_EQ(kill(pid, 0), 0);
  EXPECT_EQ(StateOf(queued), "QUEUED");
  EXPECT_EQ(Get(job)["attempts"].size(), 1u);
  for (const pid_t helper : helpers) kill(helper, SIGCONT);
  EXPECT_TRUE(WaitUntilEnded(pid));
  WaitForState(queued, "SUCCEEDED");
  Run({"cancel", job});
}

// A process has left everything by which it could be found, and no other process looks after it any
// longer.
TEST_F(JobsTest, ControlGroup_EndsWhatARunnerHasLeft_AndIsRemoved) {
  auto a = StartNode("a");
  const std::string job = Submit(
      {"--processes", "1"},
      absl::StrCat("cat /proc/self/cgroup > ", Temp("group"),
                   "; env -i setsid /bin/bash -c 'exec 200>&-; echo $$ > ", Temp("pid"),
                   "1; exec /bin/sleep 1000' & echo $$ > ", Temp("pid"), "$RANK; sleep 1000"));
  const pid_t pid = PidIn("pid0"), stray = PidIn("pid1");
  const std::string groups = *ReadFile(Temp("group"));
  const std::string own = *ReadFile("/proc/self/cgroup", 1 << 20);
  const Json node = Json::parse(Run({"nodes", "-o", "json"}))[0];
  const bool used = MayMakeGroups();
  if (!used) {
    std::printf("this machine allows no control groups here: only that a job runs without\n");
    EXPECT_EQ(groups, own);
    EXPECT_NE(node["limits_why"], "");
    Run({"cancel", job});
    EXPECT_TRUE(WaitUntilEnded(pid));
    return;
  }
  EXPECT_THAT(groups, ContainsRegex(absl::StrCat("0::.*/muster-[0-9a-f]+/", job, ".1-.*/rank_0")));
  EXPECT_EQ(node["limits"].empty(), node["limits_why"] != "") << node;
  // The agent ends and starts again: the group is that of the running attempt.
  a->Signal(SIGKILL);
  a->Wait();
  a = StartNode("a");
  EXPECT_EQ(kill(stray, 0), 0);
  const pid_t runner = RunnerOn("a");
  const std::vector<pid_t> helpers = ChildrenOf(runner);
  ASSERT_FALSE(helpers.empty());
  for (const pid_t helper : helpers) kill(helper, SIGSTOP);
  kill(runner, SIGKILL);
  EXPECT_TRUE(WaitUntilEnded(pid));
  EXPECT_TRUE(WaitUntilEnded(stray));
  Run({"cancel", job});
  WaitForState(job, "CANCELLED");
  const agent::OwnGroup place =
      *agent::FindOwnGroup(groups, *ReadFile("/proc/self/mountinfo", 1 << 20));
  EXPECT_FALSE(PathExists(ParentPath(place.folder()))) << place.folder();
  // An agent that was killed is followed by one that removes what it has left.
  const std::string left = JoinPath(ParentPath(ParentPath(place.folder())), "left");
  ASSERT_EQ(mkdir(left.c_str(), 0755), 0);
  a->Signal(SIGKILL);
  a->Wait();
  // The node is still known as ready, which says nothing about the new agent.
  a = StartNode("a");
  WaitUntil([&] { return !PathExists(left); });
}

TEST_F(JobsTest, KilledCoordinator_KnowsItsJobsAgain) {
  const auto a = StartNode("a");
  const std::string job =
      Submit({"--processes", "2"}, absl::StrCat("echo $$ > ", Temp("pid"), "$RANK; sleep 1000"));
  const pid_t pid = PidIn("pid0");
  const std::string queued = Submit({"--processes", "2"}, "echo second");
  coordinator_->Signal(SIGKILL);
  coordinator_->Wait();
  coordinator_ = StartCoordinator();
  WaitUntil([&] { return NodeState("a") == "READY"; });
  EXPECT_EQ(StateOf(job), "RUNNING");
  EXPECT_EQ(StateOf(queued), "QUEUED");
  EXPECT_EQ(kill(pid, 0), 0);
  Run({"cancel", job});
  WaitForState(queued, "SUCCEEDED");
  EXPECT_EQ(Run({"logs", queued}), "second");
}

TEST_F(JobsTest, AgentThatIsThereBeforeItsCoordinator_SaysSoOnceAndFindsIt) {
  coordinator_->Signal(SIGTERM);
  coordinator_->Wait();
  const auto a = StartAgent("a");
  const auto told = [&](const std::string& words) {
    const std::vector<std::string> lines = a->err();
    return std::count_if(lines.begin(), lines.end(),
                         [&](const std::string& line) { return absl::StrContains(line, words); });
  };
  WaitUntil([&] { return told(" does not answer: ") > 0; });
  coordinator_ = StartCoordinator();
  WaitUntil([&] { return NodeState("a") == "READY"; });
  WaitForState(Submit({}, "true"), "SUCCEEDED");
  EXPECT_EQ(told(" does not answer: "), 1);
  EXPECT_EQ(told(" answers again"), 1);
}

TEST_F(JobsTest, Watches_GoOnOverARestartOfTheCoordinator_AndPrintNothingTwice) {
  const auto a = StartNode("a");
  ASSERT_EQ(mkfifo(Temp("fifo").c_str(), 0600), 0);
  const std::string job =
      Submit({"--processes", "1"}, absl::StrCat("read x < ", Temp("fifo"), "; exit 0"));
  const auto one = Muster({"watch", "--coordinator", address_, job}),
             all = Muster({"list", "--coordinator", address_, "--watch"});
  for (const auto* watch : {&one, &all}) (*watch)->WaitForLine(job + " RUNNING");
  coordinator_->Signal(SIGKILL);
  coordinator_->Wait();
  coordinator_ = StartCoordinator();
  WaitUntil([&] { return NodeState("a") == "READY"; });
  Command writer(*host_, {"/bin/sh", "-c", absl::StrCat("echo word > ", Temp("fifo"))}, env_);
  EXPECT_EQ(one->Wait(), 0) << one->err_text();
  all->WaitForLine(job + " SUCCEEDED");
  for (const auto* watch : {&one, &all}) {
    std::map<std::string, int> times;
    for (const std::string& line : (*watch)->out()) ++times[line];
    for (const auto& [line, count] : times) EXPECT_EQ(count, 1) << line;
  }
  Run({"remove", job});
  all->WaitForLine(job + " is gone");
  all->Signal(SIGTERM);
  EXPECT_EQ(all->Wait(), -SIGTERM);
}

TEST_F(JobsTest, SecondAgent_OfTheSameFolderOrName_IsRefused) {
  const auto a = StartNode("a");
  const auto start = [&](const std::string& folder) {
    Command second(*host_,
                   {Runfile("agent/cmd/muster-agent"), "--serve", "--coordinator", address_,
                    "--state_dir", Temp(folder), "--node", "a"},
                   env_);
    EXPECT_EQ(second.Wait(), 4);
    return second.err_text();
  };
  EXPECT_THAT(start("a"), HasSubstr("another agent uses "));
  EXPECT_THAT(start("other"), HasSubstr("another agent of the name \"a\" is connected"));
}

// Users with roles, each with its token in its settings.
class UsersTest : public JobsFixture {
 protected:
  void SetUp() override {
    ClusterFixture::SetUp();
    std::string users;
    for (const auto& [name, role] : std::map<std::string, std::string>{{"ann", "submit"},
                                                                       {"bob", "submit"},
                                                                       {"eve", "view"},
                                                                       {"nodes", "node"},
                                                                       {"root", "admin"}}) {
      ASSERT_TRUE(WriteSecretFile(Temp(name), absl::StrCat("token-of-", name, "\n")).ok());
      absl::StrAppend(&users, name, " ", role,
                      " sha256:", absl::BytesToHexString(Sha256(absl::StrCat("token-of-", name))),
                      "\n");
    }
    ASSERT_TRUE(WriteSecretFile(Temp("users"), users).ok());
    coordinator_ = StartCoordinator({"--log_level", "warning", "--audit_log", Temp("audit")},
                                    {"--users_file", Temp("users")});
    As("nodes");
  }
  // Makes the next commands those of this user.
  void As(const std::string& name) { env_["MUSTER_TOKEN_FILE"] = Temp(name); }
};

TEST_F(UsersTest, Jobs_BelongToWhomSubmittedThem_AndRunWithATokenOfTheirOwn) {
  auto node = std::make_unique<Command>(
      *host_,
      std::vector<std::string>{Runfile("agent/cmd/muster-agent"), "--serve", "--coordinator",
                               address_, "--state_dir", Temp("a"), "--node", "a", "--cpus", "2"},
      env_);
  As("ann");
  WaitUntil([&] { return NodeState("a") == "READY"; });
  // Workers that join the job's group prove that their agent was admitted; MUSTER_TOKEN_FILE is
  // neither the node's nor theirs.
  const std::string job =
      Submit({"--processes", "2"},
             absl::StrCat("echo ${MUSTER_TOKEN_FILE-none} > ", Temp("told"), "$RANK; sleep 1000"));
  WaitForState(job, "RUNNING");
  WaitUntil([&] {
    const absl::StatusOr<std::string> told = ReadFile(Temp("told1"));
    return told.ok() && absl::EndsWith(*told, "\n");
  });
  EXPECT_EQ(*ReadFile(Temp("told1")), "none\n");
  EXPECT_EQ(Get(job)["owner"], "ann");
  const std::vector<std::string> attempts = *ListDirectory(absl::StrCat(Temp("a"), "/attempts"));
  ASSERT_EQ(attempts.size(), 1u);
  EXPECT_THAT(*ReadSecretFile(absl::StrCat(Temp("a"), "/attempts/", attempts[0], "/token"), "token",
                              "token", 4096),
              HasSubstr(absl::StrCat("attempt.", job, ".1.")));
  As("bob");
  EXPECT_THAT(Run({"cancel", job}, 8),
              AllOf(HasSubstr("user \"bob\" of role submit may not call control_job"),
                    HasSubstr("the owner of the job")));
  As("eve");
  EXPECT_EQ(StateOf(job), "RUNNING");
  EXPECT_THAT(Run({"submit", "--", "/bin/true"}, 8), HasSubstr("of role view may not"));
  EXPECT_THAT(Run({"drain", "a"}, 8), HasSubstr("it needs role admin"));
  // How much the coordinator logs does not concern jobs.
  EXPECT_THAT(Run({"log-level"}, 8), HasSubstr("it needs role admin"));
  As(absl::StrCat("a/attempts/", attempts[0], "/token"));
  EXPECT_THAT(Run({"log-level", "debug"}, 8), HasSubstr("set the log level"));
  As("root");
  EXPECT_THAT(
      Run({"log-level", "info", "--for", "10m"}),
      AllOf(HasSubstr(" logs from info on for another "), HasSubstr(", then from warning on")));
  EXPECT_THAT(Run({"log-level", "error"}), HasSubstr(" logs from error on"));
  EXPECT_THAT(Run({"log-level"}), HasSubstr(" logs from error on"));
  EXPECT_THAT(Run({"log-level", "loud"}, 2), HasSubstr("'loud': debug, info, warning or error"));
  EXPECT_THAT(Run({"log-level", "debug", "--for", "2d"}, 2), HasSubstr("--for 2d: write"));
  EXPECT_THAT(Run({"log-level", "--for", "10m"}, 2), HasSubstr("--for needs a level"));
  // Sets the level of an agent.
  EXPECT_THAT(Run({"log-level", "debug", "--node", "a"}),
              HasSubstr("the agent of node a logs from debug on"));
  WaitUntil([&] { return absl::StrContains(Run({"log-level", "--node", "a"}), "from debug on"); });
  EXPECT_THAT(Run({"log-level", "debug", "--node", "aa"}, 3), HasSubstr("no node"));
  As("ann");
  EXPECT_THAT(Run({"log-level", "debug", "--node", "a"}, 8), HasSubstr("it needs role admin"));
  As("ann");
  Run({"cancel", job});
  WaitForState(job, "CANCELLED");
  EXPECT_THAT(
      *ReadFile(Temp("audit")),
      AllOf(HasSubstr("\"user\":\"ann\""), HasSubstr("\"result\":\"PERMISSION_DENIED\""),
            HasSubstr("\"call\":\"set the log level to info for 10m00s\",\"result\":\"OK\"")));
}

TEST_F(UsersTest, WrongTokenOrNone_IsOneLineThatSaysWhatToGive) {
  ASSERT_TRUE(WriteSecretFile(Temp("stranger"), "token-of-nobody\n").ok());
  const std::vector<std::vector<std::string>> commands = {{"list"},
                                                          {"nodes"},
                                                          {"describe", "a-1"},
                                                          {"cancel", "a-1"},
                                                          {"drain", "a"},
                                                          {"logs", "a-1"},
                                                          {"status", "a-1"},
                                                          {"watch", "a-1"},
                                                          {"log-level"},
                                                          {"stacks", "a-1"},
                                                          {"submit", "--", "/bin/true"},
                                                          {"remove", "a-1"},
                                                          {"incidents", "a-1"}};
  for (const std::vector<std::string>& command : commands) {
    As("stranger");
    EXPECT_THAT(OneLine(command, 8), HasSubstr("token")) << command[0];
    env_.erase("MUSTER_TOKEN_FILE");
    EXPECT_THAT(OneLine(command, 8), HasSubstr("--token_file")) << command[0];
  }
}

TEST_F(JobsTest, BadInput_IsNamed) {
  const auto a = StartNode("a");
  EXPECT_THAT(Run({"submit", "--processes", "many", "--", "/bin/true"}, 2),
              AllOf(HasSubstr("processes"), HasSubstr("many")));
  EXPECT_THAT(Run({"submit"}, 2), HasSubstr("no program"));
  EXPECT_THAT(Run({"describe", "none-1"}, 3), HasSubstr("no job \"none-1\""));
  EXPECT_THAT(Run({"drain", "nowhere"}, 3), HasSubstr("no node \"nowhere\""));
  for (const char* const verb : {"watch", "logs", "cancel", "suspend", "resume", "retry", "remove",
                                 "incidents", "status", "stacks", "barriers"}) {
    EXPECT_THAT(OneLine({verb, "none-1"}, 3), HasSubstr("none-1")) << verb;
  }
  EXPECT_THAT(OneLine({"resize", "none-1", "--processes", "2"}, 3), HasSubstr("none-1"));
  const auto refused = [&](std::vector<std::string> flags) {
    flags.insert(flags.begin(), "submit");
    flags.insert(flags.end(), {"--", "/bin/true"});
    return OneLine(std::move(flags), 2);
  };
  // Before all nodes have had the time to come, a job may be larger than the nodes that have.
  ShortenNodeLease();
  WaitUntil([&] {
    return NodeState("a") == "READY" && Muster({"submit", "--coordinator", address_, "--dry_run",
                                                "--processes", "99", "--", "x"})
                                                ->Wait() == 2;
  });
  EXPECT_THAT(refused({"--processes", "99"}),
              AllOf(HasSubstr("larger than all nodes together"), HasSubstr("ask for less")));
  EXPECT_THAT(refused({"--gpu_memory", "80GiB"}), HasSubstr("gpu_memory_bytes is that of each"));
  EXPECT_THAT(refused({"--hang_timeout", "1s"}), HasSubstr("hang_timeout is 1s: give 10s"));
  EXPECT_THAT(refused({"--name", "a b"}), HasSubstr("\"a b\" does not name a job"));
  Command bad(*host_, {Runfile("agent/cmd/muster-agent"), "--serve", "--coordinator", address_},
              env_);
  EXPECT_EQ(bad.Wait(), 2);
  EXPECT_THAT(bad.err_text(), HasSubstr("--state_dir"));
}

}  // namespace
}  // namespace muster
