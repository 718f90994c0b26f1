#include "agent/agent.h"

#include <fcntl.h>
#include <signal.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "agent/control_group.h"
#include "agent/fake_control_groups.h"
#include "agent/fake_job_coordination.h"
#include "agent/log_folder.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::UnorderedElementsAre;

// A gate whose decisions the test makes. Thread-safe.
class FakeGate final : public RestartGate {
 public:
  bool MayAsk(int restart, const WorkerEnd& cause) const override {
    return restart <= 2 && cause.exit.exit_code != 2;
  }
  absl::Status Await(int restart, const JobResult& result) override {
    MutexLock lock(&mu_);
    asked_.push_back(absl::StrCat(restart, " ", result.failed_here.has_value()));
    changed_.SignalAll();
    while (!cancelled_ && (delays_ || allowed_ < restart)) changed_.Wait(&mu_);
    if (!cancelled_) return absl::OkStatus();
    return allowed_ < restart ? absl::CancelledError("cancelled") : absl::AbortedError("cancelled");
  }
  void Cancel() override {
    MutexLock lock(&mu_);
    cancelled_ = true;
    changed_.SignalAll();
  }

  void Allow(int restarts) {
    MutexLock lock(&mu_);
    allowed_ = restarts;
    changed_.SignalAll();
  }
  // Allows all restarts, with a delay that does not end.
  void AllowWithDelay() {
    MutexLock lock(&mu_);
    allowed_ = 100;
    delays_ = true;
  }
  // Waits for `count` requests: "RESTART WHETHER-IT-FAILED-HERE" of each.
  std::vector<std::string> Asked(size_t count) {
    MutexLock lock(&mu_);
    while (asked_.size() < count) changed_.Wait(&mu_);
    return asked_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<std::string> asked_ ABSL_GUARDED_BY(mu_);
  int allowed_ ABSL_GUARDED_BY(mu_) = 0;
  bool delays_ ABSL_GUARDED_BY(mu_) = false;
  bool cancelled_ ABSL_GUARDED_BY(mu_) = false;
};

// Runs an agent on a thread; the output of the workers is read line by line.
class AgentTest : public ::testing::Test {
 protected:
  void SetUp() override {
    host_ = *ProcessHost::Start();
    ASSERT_EQ(pipe2(pipe_, O_CLOEXEC), 0);
    output_ = std::make_unique<OutputMux>(
        OutputOptions{.stdout_fd = pipe_[1], .stderr_fd = pipe_[1], .prefix = true});
    options_.inherited = {{"PATH", "/usr/bin:/bin"}};
    options_.stop_grace = absl::Hours(1);
    options_.failure_grace = absl::Hours(1);
  }
  void TearDown() override {
    if (thread_.joinable()) thread_.join();
    output_.reset();
    close(pipe_[0]);
    close(pipe_[1]);
  }

  void Start(const std::string& script) {
    options_.argv = {"/bin/sh", "-c", script};
    agent_ = std::make_unique<Agent>(options_, *host_, *output_, coordination_);
    thread_ = std::thread([this] { result_ = agent_->Run(); });
  }
  JobResult Join() {
    thread_.join();
    output_->Flush(absl::InfiniteDuration());
    return result_;
  }
  JobResult Run(const std::string& script) {
    Start(script);
    return Join();
  }
  std::string ReadLine() {
    std::string line;
    char c;
    while (read(pipe_[0], &c, 1) == 1 && c != '\n') line += c;
    return line;
  }
  // Returns the values of "[RANK]: NAME VALUE" lines of `count` workers, by rank.
  std::map<int, std::string> ReadValues(int count) {
    std::map<int, std::string> values;
    for (int i = 0; i < count; ++i) {
      const std::vector<std::string> parts = absl::StrSplit(ReadLine(), absl::MaxSplits(": ", 1));
      int rank = -1;
      if (parts.size() == 2 && absl::SimpleAtoi(parts[0].substr(1, parts[0].size() - 2), &rank)) {
        values[rank] = parts[1];
      }
    }
    return values;
  }

  int pipe_[2];
  AgentOptions options_;
  FakeJobCoordination coordination_;
  std::unique_ptr<ProcessHost> host_;
  std::unique_ptr<OutputMux> output_;
  std::unique_ptr<Agent> agent_;
  JobResult result_;
  std::thread thread_;
};

TEST_F(AgentTest, UserErrorAfterAnotherFailureElsewhere_IsToldWhenTheNodesMeetAgain) {
  options_.max_restarts = 3;
  coordination_.FailsElsewhereFirst({"rank 5 was killed", {}});
  const JobResult result = Run("echo runs; exit 2");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(result.failure.why, AllOf(HasSubstr("exited with code 2"),
                                        HasSubstr("; a restart does not help after a user error")));
  EXPECT_THAT(coordination_.attempts(), ElementsAre(0, 1));
  EXPECT_EQ(ReadLine(), "[0]: runs");
  output_->Note("end");
  EXPECT_EQ(ReadLine(), "end") << "it has run once, and nobody has said that it starts again";
}

TEST_F(AgentTest, UserErrorOfAnotherNode_StartsNothing) {
  Meeting meeting;
  meeting.attempt = 2;
  meeting.counted.total = 2;
  meeting.counted.last = {"rank 5 exited with code 2", {}};
  meeting.counted.last.end_class = v1::END_CLASS_USER_ERROR;
  coordination_.SetMeeting(meeting);
  options_.max_restarts = 3;
  const JobResult result = Run("echo runs");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_EQ(result.failure.why,
            "rank 5 exited with code 2; a restart does not help after a user error");
  output_->Note("end");
  EXPECT_EQ(ReadLine(), "end");
}

TEST_F(AgentTest, NodeThatIsNotReady_StartsNothing) {
  options_.ready = [] { return absl::InternalError("the disk is full"); };
  const JobResult result = Run("echo runs");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kRefused);
  EXPECT_EQ(result.status, absl::InternalError("the disk is full"));
  output_->Note("end");
  EXPECT_EQ(ReadLine(), "end");
}

TEST_F(AgentTest, AllSucceed_EachSawItsPlace) {
  options_.slots = 3;
  const JobResult result =
      Run("echo $MUSTER_RANK/$MUSTER_WORLD_SIZE $LOCAL_RANK $MUSTER_WORKER_ID");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kSucceeded);
  const std::map<int, std::string> expected = {{0, "0/3 0 w0"}, {1, "1/3 1 w1"}, {2, "2/3 2 w2"}};
  EXPECT_EQ(ReadValues(3), expected);
  EXPECT_THAT(coordination_.ends(), SizeIs(3));
}

TEST_F(AgentTest, WorkerKilledAtItsLimit_IsToldWithTheLimit) {
  const TestFolder folder;
  FakeControlGroups::MakeRoot(folder.Path("attempt"), "memory");
  ASSERT_TRUE(
      ControlGroup(folder.Path("attempt"), FakeControlGroups::Calls()).Enable({"memory"}).ok());
  const WorkerGroups groups({.folder = folder.Path("attempt"),
                             .memory_bytes = int64_t{2} << 30,
                             .calls = FakeControlGroups::Calls()});
  options_.groups = &groups;
  options_.slots = 2;
  options_.failure_grace = absl::ZeroDuration();
  options_.inherited["GROUPS"] = folder.Path("attempt");
  // Like the kernel at a limit.
  const JobResult result =
      Run("cd $GROUPS/rank_$RANK; [ $RANK = 0 ] && exec sleep 1000; "
          "printf 'oom 1\noom_kill 1\n' > memory.events; echo 2147483648 > memory.peak; "
          "kill -9 $$");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(result.failure.why,
              ::testing::MatchesRegex(
                  "rank 1 \\(pid [0-9]+ on .*\\) was killed by signal 9 \\(SIGKILL\\), by the "
                  "kernel for memory, because it reached its limit of 2.00 GiB; it had 2.00 GiB at "
                  "most: give it a larger memory_per_process"));
  EXPECT_TRUE(result.failed_here->counts_memory_kills);
  EXPECT_EQ(FakeControlGroups::Get(folder.Path("attempt/rank_1/cgroup.procs")), "0");
}

TEST_F(AgentTest, GroupThatCannotBeMade_StartsNothing) {
  const WorkerGroups groups({.folder = "/no/such/group"});
  options_.groups = &groups;
  const JobResult result = Run("echo it runs");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kRefused);
  EXPECT_THAT(std::string(result.status.message()), HasSubstr("/no/such/group/rank_0"));
}

TEST_F(AgentTest, OneFails_OthersAreStoppedAndTheCauseIsTold) {
  options_.slots = 3;
  const JobResult result =
      Run("if [ $RANK = 1 ]; then echo last words; exit 3; fi; trap 'exit 0' TERM; while :; do "
          "sleep 1000 & wait; done");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(result.failure.why,
              ::testing::MatchesRegex("rank 1 \\(pid [0-9]+ on .*\\) exited with code 3"));
  EXPECT_THAT(result.failure.last_lines, ElementsAre("last words"));
  EXPECT_THAT(coordination_.failures(), SizeIs(1));
  EXPECT_THAT(coordination_.ends(), SizeIs(3));
}

TEST_F(AgentTest, WorkerKilled_CoordinatorLearnsWhichStartOfWhichWorker) {
  options_.slots = 2;
  Start("echo $MUSTER_INCARNATION $$; exec sleep 1000");
  const std::map<int, std::string> values = ReadValues(2);
  const std::vector<std::string> first = absl::StrSplit(values.at(1), ' ');
  int pid = 0;
  ASSERT_TRUE(absl::SimpleAtoi(first[1], &pid));
  kill(pid, SIGKILL);
  const JobResult result = Join();
  EXPECT_THAT(result.failure.why, HasSubstr("rank 1"));
  EXPECT_THAT(result.failure.why, HasSubstr("was killed by signal 9 (SIGKILL)"));
  const WorkerEnd end = coordination_.ends()[0];
  EXPECT_EQ(end.worker_id, "w1");
  EXPECT_EQ(absl::StrCat(end.incarnation), first[0]);
  EXPECT_EQ(end.pid, pid);
  EXPECT_EQ(end.exit.signal, SIGKILL);
}

TEST_F(AgentTest, Kill_EndsThatStartOfThatWorkerAndSaysWhy) {
  options_.slots = 2;
  Start("trap 'exit 0' TERM; echo $MUSTER_INCARNATION; while :; do sleep 1000 & wait; done");
  const std::map<int, std::string> values = ReadValues(2);
  uint64_t incarnation = 0;
  ASSERT_TRUE(absl::SimpleAtoi(values.at(1), &incarnation));
  agent_->Kill("w1", incarnation + 1, "of another start");
  agent_->Kill("w7", incarnation, "of another worker");
  agent_->Kill("w1", incarnation, "a newer incarnation took its seat");
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(result.failure.why, HasSubstr("rank 1"));
  EXPECT_THAT(result.failure.why, HasSubstr(", because a newer incarnation took its seat"));
}

TEST_F(AgentTest, EchoOfADeath_TheKilledWorkerIsTheCulprit) {
  options_.slots = 2;
  options_.settle = absl::Hours(1);
  // Rank 0 notices at once and fails first, as a collective would; rank 1 is killed a little later.
  const JobResult result = Run("if [ $RANK = 0 ]; then exit 1; fi; kill -9 $$");
  EXPECT_THAT(result.failure.why, HasSubstr("rank 1"));
}

TEST_F(AgentTest, UserErrorBesideAnotherFailure_IsTheCulprit) {
  options_.slots = 2;
  options_.settle = absl::Hours(1);
  options_.user_error_codes = {3};
  // The first failure that is seen is a consequence of the other.
  const JobResult result = Run("[ $RANK = 0 ] && exit 1; exit 3");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(result.failure.why, HasSubstr("exited with code 3"));
  EXPECT_EQ(result.failed_here->rank, 1);
}

TEST_F(AgentTest, UserError_IsNotRestarted) {
  options_.max_restarts = 5;
  const JobResult result = Run("exit 2");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_EQ(result.restarts, 0);
  EXPECT_THAT(result.failure.why, HasSubstr("exited with code 2; a restart does not help"));
}

TEST_F(AgentTest, FailurePolicy_LimitsTheRestartsOfEachClass) {
  options_.max_restarts = 5;
  options_.class_limits = ToClassCounts({{"failed", 2}});
  const JobResult result = Run("exit 1");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_EQ(result.restarts, 2);
  EXPECT_THAT(result.failure.why,
              HasSubstr("; its failure policy allows 2 restarts after PROCESS_FAILED"));
  std::vector<bool> may_restart;
  for (const WorkerEnd& end : coordination_.ends()) may_restart.push_back(end.may_restart);
  EXPECT_THAT(may_restart, ElementsAre(true, true, false));
}

TEST_F(AgentTest, WorkerKilledForAHang_CountsAsOne) {
  options_.max_restarts = 5;
  options_.class_limits = ToClassCounts({{"hang", 0}});
  Start("trap 'exit 2' TERM; echo $MUSTER_INCARNATION; while :; do sleep 1000 & wait; done");
  uint64_t incarnation = 0;
  ASSERT_TRUE(absl::SimpleAtoi(ReadValues(1).at(0), &incarnation));
  agent_->Kill("w0", incarnation, "the job hangs", v1::END_CLASS_HANG);
  const JobResult result = Join();
  EXPECT_EQ(result.restarts, 0);
  EXPECT_THAT(result.failure.why, HasSubstr("its failure policy allows 0 restarts after HANG"));
}

TEST_F(AgentTest, Restart_AllStartAgainWithNewIncarnations) {
  options_.slots = 2;
  options_.max_restarts = 2;
  const JobResult result =
      Run("echo $TORCHELASTIC_RESTART_COUNT $MUSTER_INCARNATION; if [ $TORCHELASTIC_RESTART_COUNT "
          "= 0 -a $RANK = 1 ]; "
          "then exit 9; fi");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kSucceeded);
  EXPECT_EQ(result.restarts, 1);
  EXPECT_THAT(coordination_.attempts(), ElementsAre(0, 1));
  output_.reset();
  close(std::exchange(pipe_[1], -1));
  std::string text;
  char buffer[4096];
  for (ssize_t n; (n = read(pipe_[0], buffer, sizeof(buffer))) > 0;) text.append(buffer, n);
  EXPECT_THAT(text, HasSubstr("exited with code 9; starting all workers again (restart 1 of 2)"));
  std::map<std::string, int> incarnations;
  for (const absl::string_view line : absl::StrSplit(text, '\n')) {
    const std::vector<std::string> words = absl::StrSplit(line, ' ');
    if (words.size() == 3) ++incarnations[words[2]];
  }
  EXPECT_THAT(incarnations, SizeIs(::testing::Ge(3u)));
}

TEST_F(AgentTest, RestartsUsedUp_Fails) {
  options_.max_restarts = 1;
  const JobResult result = Run("exit 4");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_EQ(result.restarts, 1);
  EXPECT_THAT(result.failure.why, HasSubstr("exited with code 4"));
  // Reported so that the coordinator knows after which attempt the job is over.
  const std::vector<WorkerEnd> ends = coordination_.ends();
  ASSERT_THAT(ends, SizeIs(2));
  EXPECT_TRUE(ends[0].may_restart);
  EXPECT_FALSE(ends[1].may_restart);
}

// Two workers that print their names and exit with the code that they receive.
class ReentryTest : public AgentTest {
 protected:
  void SetUp() override {
    AgentTest::SetUp();
    options_.slots = 2;
    options_.max_restarts = 1;
    for (int rank = 0; rank < 4; ++rank) {
      const std::string path = folder_.Path(absl::StrCat("orders", rank));
      ASSERT_EQ(mkfifo(path.c_str(), 0600), 0);
      // Opened for both directions, so that neither side waits for the other to open it.
      orders_[rank] = OwnedFd(open(path.c_str(), O_RDWR | O_CLOEXEC));
    }
    options_.inherited["ORDERS"] = folder_.Path("orders");
  }
  void StartWorkers() {
    Start("echo $$ $TORCHELASTIC_RESTART_COUNT; read code < $ORDERS$RANK; exit $code");
    pids_ = ReadValues(2);
  }
  void End(int rank, int code) {
    const std::string order = absl::StrCat(code, "\n");
    ASSERT_EQ(write(orders_[rank].get(), order.data(), order.size()),
              static_cast<ssize_t>(order.size()));
  }
  // Loses rank 1, which does not re-enter; rank 0 does.
  void LoseRankOne() {
    agent_->Reenters("w0", Reentry::kAble);
    End(1, 9);
    EXPECT_THAT(ReadLine(),
                HasSubstr("exited with code 9; starting 1 of 2 workers again, the others continue "
                          "in their processes (restart 1 of "));
  }
  std::vector<std::string> Ends() {
    std::vector<std::string> ends;
    for (const WorkerEnd& end : coordination_.ends()) {
      ends.push_back(absl::StrCat(end.rank, " ", end.exit.signal, " ", end.exit.exit_code));
    }
    return ends;
  }

  const TestFolder folder_;
  OwnedFd orders_[4];
  std::map<int, std::string> pids_;
};

TEST_F(ReentryTest, SurvivorReenters_OnlyTheLostOneStartsAgain) {
  StartWorkers();
  LoseRankOne();
  const std::string again = ReadLine();
  EXPECT_THAT(again, ::testing::MatchesRegex("\\[1\\]: [0-9]+ 1"));
  EXPECT_NE(again, "[1]: " + pids_[1]);
  agent_->Reenters("w0", Reentry::kReturned);
  agent_->Reenters("w0", Reentry::kAble);
  End(0, 0);
  End(1, 0);
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kSucceeded);
  EXPECT_EQ(result.restarts, 1);
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 9", "0 0 0", "1 0 0"));
}

TEST_F(ReentryTest, SurvivorDoesNotReturn_IsStartedAgainInTheSameAttempt) {
  options_.reentry_timeout = absl::ZeroDuration();
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  End(1, 9);
  // The lines of the workers and of the agent come in any order.
  std::vector<std::string> lines;
  while (lines.size() < 5) lines.push_back(ReadLine());
  EXPECT_THAT(lines, Contains(HasSubstr("has not joined the others again within 0")));
  EXPECT_THAT(lines, Contains(::testing::MatchesRegex("\\[0\\]: [0-9]+ 1")));
  EXPECT_THAT(lines, Contains(::testing::MatchesRegex("\\[1\\]: [0-9]+ 1")));
  End(0, 0);
  End(1, 0);
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kSucceeded);
  EXPECT_EQ(result.restarts, 1);
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 9", "0 15 0", "0 0 0", "1 0 0"));
}

TEST_F(ReentryTest, SurvivorEndsBeforeItReturns_IsStartedAgainInTheSameAttempt) {
  StartWorkers();
  LoseRankOne();
  EXPECT_THAT(ReadLine(), HasSubstr("[1]: "));
  End(0, 5);
  EXPECT_THAT(ReadLine(), HasSubstr("exited with code 5 before it has joined the others again"));
  EXPECT_THAT(ReadLine(), ::testing::MatchesRegex("\\[0\\]: [0-9]+ 1"));
  End(0, 0);
  End(1, 0);
  EXPECT_EQ(Join().restarts, 1);
}

TEST_F(ReentryTest, SurvivorEndsBeforeItHasASeat_IsStartedAgainInTheSameAttempt) {
  StartWorkers();
  LoseRankOne();
  EXPECT_THAT(ReadLine(), HasSubstr("[1]: "));
  agent_->Reenters("w0", Reentry::kReturned);
  End(0, 1);
  EXPECT_THAT(ReadLine(), HasSubstr("exited with code 1 before it has joined the others again"));
  EXPECT_THAT(ReadLine(), ::testing::MatchesRegex("\\[0\\]: [0-9]+ 1"));
  End(0, 0);
  End(1, 0);
  EXPECT_EQ(Join().restarts, 1);
}

TEST_F(ReentryTest, SurvivorEndsAfterItHasASeat_CountsAsAnotherRestart) {
  options_.max_restarts = 2;
  StartWorkers();
  LoseRankOne();
  EXPECT_THAT(ReadLine(), HasSubstr("[1]: "));
  agent_->Reenters("w0", Reentry::kReturned);
  agent_->Reenters("w0", Reentry::kAble);
  agent_->Reenters("w1", Reentry::kAble);
  End(0, 5);
  EXPECT_THAT(ReadLine(), HasSubstr("exited with code 5; starting 1 of 2 workers again"));
  EXPECT_THAT(ReadLine(), ::testing::MatchesRegex("\\[0\\]: [0-9]+ 2"));
  agent_->Reenters("w1", Reentry::kReturned);
  agent_->Reenters("w1", Reentry::kAble);
  End(0, 0);
  End(1, 0);
  EXPECT_EQ(Join().restarts, 2);
}

TEST_F(ReentryTest, SurvivorHasFinished_IsStartedAgain) {
  StartWorkers();
  LoseRankOne();
  EXPECT_THAT(ReadLine(), HasSubstr("[1]: "));
  agent_->Reenters("w0", Reentry::kNone);
  EXPECT_THAT(ReadLine(), HasSubstr("signal 15 (SIGTERM) before it has joined the others again"));
  EXPECT_THAT(ReadLine(), ::testing::MatchesRegex("\\[0\\]: [0-9]+ 1"));
  End(0, 0);
  End(1, 0);
  EXPECT_EQ(Join().restarts, 1);
}

TEST_F(ReentryTest, NodeGetsAnotherNumber_SurvivorWouldBeAnotherRank) {
  StartWorkers();
  coordination_.SetMeeting({.node_rank = 1, .num_nodes = 2});
  LoseRankOne();
  const std::map<int, std::string> others = ReadValues(2);
  EXPECT_EQ(others.count(2) + others.count(3), 2u);
  EXPECT_THAT(Ends(), ElementsAre("1 0 9", "0 15 0"));
  End(2, 0);
  End(3, 0);
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kSucceeded);
}

TEST_F(ReentryTest, NoRestartIsLeft_SurvivorIsStopped) {
  options_.max_restarts = 0;
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  End(1, 9);
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(Ends(), ElementsAre("1 0 9", "0 15 0"));
}

TEST_F(ReentryTest, NextAttemptDoesNotBegin_SurvivorIsStopped) {
  StartWorkers();
  coordination_.FailMeet(absl::DeadlineExceededError("machine 1 did not come"));
  LoseRankOne();
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(Ends(), ElementsAre("1 0 9", "0 15 0"));
}

TEST_F(ReentryTest, StoppedDuringReentry_AllEnd) {
  StartWorkers();
  LoseRankOne();
  EXPECT_THAT(ReadLine(), HasSubstr("[1]: "));
  agent_->Stop();
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kStopped);
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 9", "0 15 0", "1 15 0"));
}

TEST_F(ReentryTest, AnotherNodeFails_SurvivorsHereContinue) {
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  agent_->Reenters("w1", Reentry::kReturned);
  coordination_.EndElsewhere({"rank 5 (pid 7 on other) exited with code 1", {}});
  EXPECT_THAT(ReadLine(), HasSubstr("starting 0 of 2 workers again"));
  agent_->Reenters("w0", Reentry::kReturned);
  agent_->Reenters("w0", Reentry::kAble);
  agent_->Reenters("w1", Reentry::kAble);
  End(0, 0);
  End(1, 0);
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kSucceeded);
  EXPECT_THAT(Ends(), UnorderedElementsAre("0 0 0", "1 0 0"));
}

class GateTest : public ReentryTest {
 protected:
  void SetUp() override {
    ReentryTest::SetUp();
    options_.max_restarts = 0;
    options_.gate = &gate_;
    options_.log_dir = folder_.Path("logs");
  }
  std::string LogOf(int rank) {
    return ReadFile(folder_.Path(absl::StrCat("logs/attempt_0/rank_", rank, ".log"))).value_or("");
  }

  FakeGate gate_;
};

TEST_F(GateTest, OneIsLost_WaitsForTheGate_AndItsLogGoesOn) {
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  End(1, 9);
  EXPECT_THAT(gate_.Asked(1), ElementsAre("1 1"));
  agent_->Reenters("w0", Reentry::kReturned);
  gate_.Allow(1);
  EXPECT_THAT(ReadLine(), HasSubstr("starting 1 of 2 workers again, the others continue in their "
                                    "processes (restart 1 within the attempt)"));
  EXPECT_THAT(ReadLine(), HasSubstr("exited with code 9; rank 1 starts again"));
  EXPECT_THAT(ReadLine(), ::testing::MatchesRegex("\\[1\\]: [0-9]+ 1"));
  agent_->Reenters("w0", Reentry::kAble);
  End(0, 0);
  End(1, 0);
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kSucceeded);
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 9", "0 0 0", "1 0 0"));
  EXPECT_THAT(LogOf(1),
              ::testing::MatchesRegex("[0-9]+ 0\nmuster: rank 1 .* starts again\n[0-9]+ 1\n"));
  EXPECT_TRUE(coordination_.failures()[0].restarts);
  EXPECT_TRUE(coordination_.ends()[0].may_restart);
}

TEST_F(GateTest, NobodyCanGoOn_FailsWithoutAsking) {
  StartWorkers();
  End(1, 9);
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_FALSE(coordination_.failures()[0].restarts);
  EXPECT_THAT(coordination_.attempts(), SizeIs(1));
}

TEST_F(GateTest, EndAfterWhichNoRestartHelps_FailsWithoutAsking) {
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  End(1, 2);
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 2", "0 15 0"));
}

TEST_F(GateTest, KilledForAReason_FailsWithoutAsking) {
  Start("echo $MUSTER_INCARNATION; read code < $ORDERS$RANK; exit $code");
  uint64_t incarnation = 0;
  ASSERT_TRUE(absl::SimpleAtoi(ReadValues(2).at(1), &incarnation));
  agent_->Reenters("w0", Reentry::kAble);
  agent_->Kill("w1", incarnation, "the job hangs");
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 15 0", "0 15 0"));
}

TEST_F(GateTest, StoppedWhileItWaits_HasItsFailure) {
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  End(1, 9);
  gate_.Asked(1);
  agent_->Stop();
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kStopped);
  ASSERT_TRUE(result.failed_here.has_value());
  EXPECT_EQ(result.failure.why, result.failed_here->ToString());
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 9", "0 15 0"));
}

TEST_F(GateTest, StoppedWhileItWaits_SurvivorsMayCleanUp) {
  Start(
      "echo up; if [ $RANK = 1 ]; then read code < $ORDERS$RANK; exit $code; fi; "
      "trap 'read code < $ORDERS$RANK; exit $code' TERM; while :; do sleep 1000 & wait; done");
  EXPECT_THAT(ReadValues(2), SizeIs(2));
  agent_->Reenters("w0", Reentry::kAble);
  End(1, 9);
  gate_.Asked(1);
  End(0, 5);
  agent_->Stop();
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kStopped);
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 9", "0 0 5"));
}

TEST_F(GateTest, StoppedTwiceWhileItWaits_KillsAtOnce) {
  Start(
      "echo up; if [ $RANK = 1 ]; then read code < $ORDERS$RANK; exit $code; fi; "
      "trap '' TERM; while :; do sleep 1000 & wait; done");
  EXPECT_THAT(ReadValues(2), SizeIs(2));
  agent_->Reenters("w0", Reentry::kAble);
  End(1, 9);
  gate_.Asked(1);
  agent_->Stop();
  agent_->Stop();
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kStopped);
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 9", "0 9 0"));
}

TEST_F(GateTest, StoppedDuringTheDelay_HasNoFailureThatIsNotCountedYet) {
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  gate_.AllowWithDelay();
  End(1, 9);
  gate_.Asked(1);
  agent_->Stop();
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kStopped);
  EXPECT_FALSE(result.failed_here.has_value());
  EXPECT_EQ(result.failure.why, "");
}

TEST_F(GateTest, EndAfterWhichNoRestartHelps_IsToldAlsoAfterAnotherNodesFailure) {
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  coordination_.FailsElsewhereFirst(
      {.why = "rank 5 (pid 7 on other) was killed", .last_lines = {}, .restarts = true});
  End(1, 2);
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  ASSERT_TRUE(result.failed_here.has_value());
  EXPECT_EQ(result.failure.why, result.failed_here->ToString());
  EXPECT_THAT(result.failure.why, HasSubstr("exited with code 2"));
  EXPECT_THAT(Ends(), UnorderedElementsAre("1 0 2", "0 15 0"));
}

TEST_F(GateTest, StoppedAfterTheRestart_IsNotBlamedForTheFailureBefore) {
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  End(1, 9);
  gate_.Allow(1);
  ReadLine();
  ReadLine();
  ReadLine();
  agent_->Stop();
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kStopped);
  EXPECT_FALSE(result.failed_here.has_value());
}

TEST_F(GateTest, EndOfAnotherNode_RestartsOrEndsAsItSays) {
  StartWorkers();
  agent_->Reenters("w0", Reentry::kAble);
  agent_->Reenters("w1", Reentry::kAble);
  coordination_.EndElsewhere(
      {.why = "rank 5 (pid 7 on other) exited with code 1", .last_lines = {}, .restarts = true});
  EXPECT_THAT(gate_.Asked(1), ElementsAre("1 0"));
  gate_.Allow(1);
  EXPECT_THAT(ReadLine(), HasSubstr("starting 0 of 2 workers again"));
  for (const char* const worker : {"w0", "w1"}) {
    agent_->Reenters(worker, Reentry::kReturned);
    agent_->Reenters(worker, Reentry::kAble);
  }
  coordination_.EndElsewhere({"rank 5 (pid 8 on other) exited with code 2", {}});
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(Ends(), UnorderedElementsAre("0 15 0", "1 15 0"));
}

TEST_F(AgentTest, Stop_WorkersMayCleanUp) {
  options_.slots = 2;
  Start("trap 'echo bye; exit 0' TERM; echo up; while :; do sleep 1000 & wait; done");
  EXPECT_THAT(ReadValues(2), SizeIs(2));
  agent_->Stop();
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kStopped);
  const std::map<int, std::string> expected = {{0, "bye"}, {1, "bye"}};
  EXPECT_EQ(ReadValues(2), expected);
}

TEST_F(AgentTest, StopTwice_KillsAtOnce) {
  Start("trap 'echo asked' TERM; echo up; while :; do sleep 1000 & wait; done");
  EXPECT_EQ(ReadLine(), "[0]: up");
  agent_->Stop();
  EXPECT_EQ(ReadLine(), "[0]: asked");
  agent_->Stop();
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kStopped);
  EXPECT_EQ(coordination_.ends()[0].exit.signal, SIGKILL);
}

// Behaves as if the kernel could not end the process.
int DeafToKill(pid_t pid, int signal) { return signal == SIGKILL ? 0 : kill(pid, signal); }

ProcessHostOptions WithDeafProcesses() {
  return {.deaf_after = absl::ZeroDuration(),
          .give_up_after = absl::Milliseconds(1),
          .kill = DeafToKill};
}

TEST_F(AgentTest, StoppedWorkerDeafToSigkill_IsNamedAndTheJobHasFailed) {
  host_ = *ProcessHost::Start(WithDeafProcesses());
  options_.stop_grace = absl::ZeroDuration();
  Start("echo $$; while :; do sleep 1000; done");
  const std::string pid = ReadValues(1).at(0);
  agent_->Stop();
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(result.failure.why, HasSubstr(absl::StrCat("rank 0 (pid ", pid)));
  EXPECT_THAT(result.failure.why, HasSubstr("does not end after SIGKILL: "));
  EXPECT_THAT(ReadLine(), HasSubstr("muster: rank 0 on "));
}

TEST_F(AgentTest, WorkerDeafToSigkill_NothingIsStartedBesideIt) {
  host_ = *ProcessHost::Start(WithDeafProcesses());
  options_.slots = 2;
  options_.max_restarts = 3;
  options_.failure_grace = absl::ZeroDuration();
  const JobResult result = Run("if [ $RANK = 0 ]; then exit 3; fi; while :; do sleep 1000; done");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_THAT(result.failure.why, HasSubstr("exited with code 3; and rank 1 "));
  EXPECT_THAT(coordination_.attempts(), ElementsAre(0));
}

TEST_F(AgentTest, AnotherNodeFails_WorkersHereAreStopped) {
  options_.slots = 2;
  Start("echo up; exec sleep 1000");
  ReadValues(2);
  coordination_.EndElsewhere({"rank 5 (pid 7 on other) exited with code 1", {"there"}});
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_EQ(result.failure.why, "rank 5 (pid 7 on other) exited with code 1");
  EXPECT_THAT(coordination_.failures(), IsEmpty());
}

TEST_F(AgentTest, AnotherNodeFailsAfterWorkersHereAreDone_JobHasFailed) {
  coordination_.HoldFinish();
  Start("exit 0");
  coordination_.WaitForFinish();
  coordination_.EndElsewhere({"rank 5 failed", {}});
  coordination_.ReleaseFinish(absl::AbortedError("the attempt has ended"));
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed);
  EXPECT_EQ(result.failure.why, "rank 5 failed");
}

// A launch of MIN:MAX machines.
TEST_F(AgentTest, MachineComes_AllStartAgainAndItIsNotCounted) {
  options_.elastic = true;
  Start(
      "echo up at $TORCHELASTIC_RESTART_COUNT; [ $TORCHELASTIC_RESTART_COUNT = 7 ] && exit 3; "
      "exec sleep 1000");
  EXPECT_EQ(ReadLine(), "muster: the job runs on 1 machine, of which this one is number 0");
  EXPECT_EQ(ReadLine(), "[0]: up at 0");
  Meeting meeting;
  meeting.num_nodes = 2;
  meeting.attempt = 7;  // the newcomer was there before
  coordination_.SetMeeting(meeting);
  coordination_.EndElsewhere({"one came", {}, AttemptEnd::Cause::kMachineCame});
  EXPECT_EQ(ReadLine(), "muster: one came; starting all workers again (not counted as a restart)");
  EXPECT_EQ(ReadLine(), "muster: the job runs on 2 machines, of which this one is number 0");
  const JobResult result = Join();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kFailed) << "no restart is allowed";
  EXPECT_THAT(result.failure.why, HasSubstr("exited with code 3"));
  EXPECT_EQ(result.restarts, 7);
  EXPECT_THAT(coordination_.attempts(), ElementsAre(0, 1));
}

TEST_F(AgentTest, StoppedAmongMachinesThatMayGo_LeavesTheJobToThem) {
  options_.elastic = true;
  Start("trap 'exit 0' TERM; echo up; while :; do sleep 1000 & wait; done");
  ReadLine();
  ReadLine();
  agent_->Stop();
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kStopped);
  const std::vector<AttemptEnd> failures = coordination_.failures();
  ASSERT_THAT(failures, SizeIs(1));
  EXPECT_EQ(failures[0].cause, AttemptEnd::Cause::kMachineLeft);
}

TEST_F(AgentTest, CannotStartAmongMachinesThatMayGo_LeavesTheJobToThem) {
  options_.elastic = true;
  options_.log_dir = "/dev/null/logs";
  Start("echo never");
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kRefused);
  const std::vector<AttemptEnd> failures = coordination_.failures();
  ASSERT_THAT(failures, SizeIs(1));
  EXPECT_EQ(failures[0].cause, AttemptEnd::Cause::kMachineLeft);
}

TEST_F(AgentTest, StopWhileWaitingForOtherNodes_Ends) {
  coordination_.HoldFinish();
  Start("exit 0");
  coordination_.WaitForFinish();
  agent_->Stop();
  EXPECT_EQ(Join().outcome, JobResult::Outcome::kStopped);
}

TEST_F(AgentTest, NodesDoNotMeet_NothingIsStarted) {
  coordination_.FailMeet(absl::DeadlineExceededError("machine 1 did not come"));
  const JobResult result = Run("echo started");
  EXPECT_EQ(result.outcome, JobResult::Outcome::kRefused);
  EXPECT_EQ(result.status.message(), "machine 1 did not come");
  EXPECT_THAT(coordination_.ends(), IsEmpty());
}

TEST_F(AgentTest, AllNodesHadFinishedBeforeThisStart_SucceedsWithoutAWorker) {
  FakeJobCoordination finished(Meeting{.finished = true});
  options_.argv = {"/bin/false"};
  Agent agent(options_, *host_, *output_, finished);
  EXPECT_EQ(agent.Run().outcome, JobResult::Outcome::kSucceeded);
  EXPECT_THAT(finished.ends(), IsEmpty());
  EXPECT_THAT(ReadLine(), HasSubstr("the job has already succeeded on all machines"));
}

TEST_F(AgentTest, ProgramMissing_IsRefusedWithoutRestarts) {
  options_.max_restarts = 3;
  options_.argv = {"/nowhere/train"};
  agent_ = std::make_unique<Agent>(options_, *host_, *output_, coordination_);
  const JobResult result = agent_->Run();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kRefused);
  EXPECT_EQ(result.status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(coordination_.attempts(), ElementsAre(0));
}

TEST_F(AgentTest, LogFolder_HasAFilePerWorkerAndAttempt) {
  options_.slots = 2;
  options_.log_dir = TestPath("agent_logs");
  EXPECT_EQ(Run("echo hello $RANK").outcome, JobResult::Outcome::kSucceeded);
  char buffer[64] = "";
  const int fd = open((options_.log_dir + "/attempt_0/rank_1.log").c_str(), O_RDONLY);
  ASSERT_GE(fd, 0);
  ASSERT_GT(read(fd, buffer, sizeof(buffer) - 1), 0);
  EXPECT_STREQ(buffer, "hello 1\n");
  close(fd);
}

// The machines of one launch share the folder; a machine of a later launch moves their logs.
TEST_F(AgentTest, LogFolder_HasThoseOfOneLaunch) {
  options_.log_dir = TestPath("agent_launches");
  options_.slots = 1;
  const auto run = [&](const Meeting& meeting) {
    FakeJobCoordination coordination(meeting);
    options_.argv = {"/bin/sh", "-c", "echo $RANK of $WORLD_SIZE"};
    Agent agent(options_, *host_, *output_, coordination);
    EXPECT_EQ(agent.Run().outcome, JobResult::Outcome::kSucceeded);
  };
  const auto log_of = [&](const std::string& name) {
    return ReadFile(JoinPath(options_.log_dir, name)).value_or("none");
  };
  // The output of processes is written by a separate thread.
  const auto has = [&](const std::string& name, const std::string& text) {
    WaitUntil([&] { return log_of(name) == text; });
  };
  run({.node_rank = 0, .num_nodes = 2, .launch = "a"});
  run({.node_rank = 1, .num_nodes = 2, .launch = "a"});
  has("attempt_0/rank_0.log", "0 of 2\n");
  has("attempt_0/rank_1.log", "1 of 2\n");
  run({.launch = "b"});
  has("attempt_0/rank_0.log", "0 of 1\n");
  EXPECT_EQ(log_of("attempt_0/rank_1.log"), "none");
  EXPECT_EQ(log_of("before_1/attempt_0/rank_0.log"), "0 of 2\n");
  EXPECT_EQ(log_of("before_1/attempt_0/rank_1.log"), "1 of 2\n");
}

TEST_F(AgentTest, LogFolderOfALaunchThatRuns_IsRefused) {
  options_.log_dir = TestPath("agent_busy_logs");
  const absl::StatusOr<LogFolder> busy = BeginLogFolder(options_.log_dir, "a");
  ASSERT_TRUE(busy.ok()) << busy.status();
  FakeJobCoordination coordination({.launch = "b"});
  options_.argv = {"/bin/true"};
  Agent agent(options_, *host_, *output_, coordination);
  const JobResult result = agent.Run();
  EXPECT_EQ(result.outcome, JobResult::Outcome::kRefused);
  EXPECT_THAT(std::string(result.status.message()),
              ::testing::StartsWith(absl::StrCat("log_dir: ", options_.log_dir,
                                                 " has the logs of another launch that still "
                                                 "runs")));
}

TEST_F(AgentTest, LogFolderOfAnAgentThatRuns_IsRefusedToOthersUntilItsEnd) {
  options_.log_dir = TestPath("agent_locks_logs");
  const std::string go = TestPath("agent_locks_logs_go");
  options_.argv = {"/bin/sh", "-c",
                   absl::StrCat("echo on; until [ -e ", go, " ]; do sleep 0.02; done")};
  FakeJobCoordination coordination({.launch = "a"});
  Agent agent(options_, *host_, *output_, coordination);
  std::thread runs([&] { EXPECT_EQ(agent.Run().outcome, JobResult::Outcome::kSucceeded); });
  WaitUntil([&] {
    return ReadFile(JoinPath(options_.log_dir, "attempt_0/rank_0.log")).value_or("") == "on\n";
  });
  EXPECT_EQ(BeginLogFolder(options_.log_dir, "b").status().code(),
            absl::StatusCode::kAlreadyExists);
  EXPECT_TRUE(WriteFileAtomically(go, "").ok());
  runs.join();
}

TEST_F(AgentTest, SecondNode_RanksGoOn) {
  FakeJobCoordination coordination(
      {.node_rank = 1, .num_nodes = 3, .master_addr = "10.0.0.1", .master_port = 7});
  options_.slots = 2;
  options_.argv = {"/bin/sh", "-c", "echo $RANK/$WORLD_SIZE $GROUP_RANK $MASTER_ADDR:$MASTER_PORT"};
  Agent agent(options_, *host_, *output_, coordination);
  EXPECT_EQ(agent.Run().outcome, JobResult::Outcome::kSucceeded);
  const std::map<int, std::string> expected = {{2, "2/6 1 10.0.0.1:7"}, {3, "3/6 1 10.0.0.1:7"}};
  EXPECT_EQ(ReadValues(2), expected);
}

TEST(FindFreePort, IsAPort) {
  const auto port = FindFreePort();
  ASSERT_TRUE(port.ok());
  EXPECT_GT(*port, 0);
  EXPECT_LT(*port, 65536);
}

}  // namespace
}  // namespace muster::agent
