// A submitted job of two processes on two nodes, whose workers, runners, agents, nodes and
// coordinator are killed at drawn moments: it ends with the losses, to the last bit, and the
// samples of a training that nothing disturbs.
//   MUSTER_JOB_KILLS=200 MUSTER_JOB_KILLS_SEED=7 bazel-bin/tests/chaos/job_kills_test
// is the long run; see docs/failpoints.md.
#include <signal.h>
#include <sys/stat.h>

#include <cstdint>
#include <cstdlib>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "tests/e2e/jobs_fixture.h"

namespace muster::chaos {
namespace {

using ::testing::HasSubstr;

constexpr int kStepsOfEpoch = 30;  // of two processes, see curve_worker

int Number(const char* variable, int otherwise) {
  int number = otherwise;
  const char* const text = std::getenv(variable);
  if (text != nullptr) {
    EXPECT_TRUE(absl::SimpleAtoi(text, &number)) << variable << "=" << text;
  }
  return number;
}

class JobKillsTest : public JobsFixture {
 protected:
  void SetUp() override {
    JobsFixture::SetUp();
    env_["OMP_NUM_THREADS"] = "1";
    random_.seed(Number("MUSTER_JOB_KILLS_SEED", 1));
    nodes_["a"] = StartNode("a");
    nodes_["b"] = StartNode("b");
    folder_ = Temp("disturbed");
    ASSERT_EQ(mkdir(folder_.c_str(), 0700), 0);
  }

  int Draw(int below) { return std::uniform_int_distribution<int>(0, below - 1)(random_); }

  // Returns the last step in the curve; 0: there is none.
  int LastStep() const {
    const absl::StatusOr<std::string> curve = ReadFile(folder_ + "/curve");
    if (!curve.ok()) return 0;
    const size_t end = curve->rfind('\n');
    if (end == std::string::npos || end == 0) return 0;
    const size_t begin = curve->rfind('\n', end - 1) + 1;  // npos + 1 is 0
    const std::vector<std::string> words = absl::StrSplit(curve->substr(begin, end - begin), ' ');
    int step = 0;
    return absl::SimpleAtoi(words[0], &step) ? step : 0;
  }

  // Returns what the curve says of each step; equal lines of one step count once.
  static std::map<int, std::string> ReadCurve(const std::string& folder) {
    std::map<int, std::string> steps;
    const std::string curve = ReadFile(folder + "/curve").value_or("");
    for (const absl::string_view line : absl::StrSplit(curve, '\n', absl::SkipEmpty())) {
      const std::pair<absl::string_view, absl::string_view> parts =
          absl::StrSplit(line, absl::MaxSplits(' ', 1));
      int step = 0;
      EXPECT_TRUE(absl::SimpleAtoi(parts.first, &step)) << line;
      const auto [it, first] = steps.emplace(step, parts.second);
      EXPECT_TRUE(first || it->second == parts.second)
          << "step " << step << ": once " << it->second << ", once " << parts.second;
    }
    return steps;
  }

  // Kills a process of this test whose command line has `word`: its number may be another's by now.
  static bool Kill(pid_t pid, const std::string& word) {
    if (pid <= 0) return false;
    const std::string command = ReadFile(absl::StrCat("/proc/", pid, "/cmdline")).value_or("");
    return absl::StrContains(command, word) && kill(pid, SIGKILL) == 0;
  }
  bool KillRank(int rank) {
    int pid = 0;
    const std::string file = ReadFile(absl::StrCat(folder_, "/pid_", rank)).value_or("");
    return absl::SimpleAtoi(file, &pid) && Kill(pid, folder_);
  }
  bool KillRunner(const std::string& node) {
    bool killed = false;
    for (const pid_t pid : RunnersOn(node)) killed = Kill(pid, Temp(node)) || killed;
    return killed;
  }
  void KillAgent(const std::string& node) {
    nodes_[node]->Signal(SIGKILL);
    nodes_[node]->Wait();
  }
  void KillCoordinator() {
    coordinator_->Signal(SIGKILL);
    coordinator_->Wait();
  }
  void RestartCoordinator() { coordinator_ = StartCoordinator(); }

  // Returns false if the job has ended instead, for example because its program is missing.
  bool WaitWhileItRuns(const std::string& job, const std::function<bool()>& condition) {
    bool ended = false;
    int looks = 0;
    WaitUntil([&] {
      if (condition()) return true;
      ended = ++looks % 5000 == 0 && HasEnded(StateOf(job));
      return ended;
    });
    if (ended) std::printf("%s\n", Run({"describe", job}).c_str());
    return !ended;
  }

  // Returns the name of what it has killed.
  std::string KillSomething() {
    const std::string node = Draw(2) == 0 ? "a" : "b";
    const int rank = Draw(2);
    switch (Draw(6)) {
      case 0:
        return KillRank(rank) ? absl::StrCat("rank ", rank) : "";
      case 1:
        return KillRunner(node) ? absl::StrCat("runner on ", node) : "";
      case 2:
        KillAgent(node);
        nodes_[node] = StartAgent(node);
        return absl::StrCat("agent ", node);
      case 3:
        KillCoordinator();
        RestartCoordinator();
        return "coordinator";
      case 4:  // The machine: all that runs there, and it boots again.
        KillAgent(node);
        KillRunner(node);
        nodes_[node] = StartAgent(node);
        return absl::StrCat("node ", node);
      default:  // Two at once.
        KillCoordinator();
        KillRank(rank);
        RestartCoordinator();
        return absl::StrCat("coordinator and rank ", rank);
    }
  }

  std::mt19937 random_;
  std::map<std::string, std::unique_ptr<Command>> nodes_;
  std::string folder_;
};

TEST_F(JobKillsTest, Training_KilledAgainAndAgain_HasTheCurveOfOneThatNothingDisturbs) {
  const int kills = Number("MUSTER_JOB_KILLS", 8);
  const std::string job =
      Run({"submit", "--processes", "2", "--processes_per_node", "1", "--max_restarts", "100000",
           "--name", "job", "--", Runfile("tests/chaos/curve_worker"), folder_});
  ASSERT_FALSE(HasFailure());
  std::map<std::string, int> done;
  for (int i = 0; i < kills; ++i) {
    // One kill of four comes while the job still recovers from the one before.
    const int more = i > 0 && Draw(4) == 0 ? 0 : 1 + Draw(60);
    const int from = LastStep();
    ASSERT_TRUE(WaitWhileItRuns(job, [&] {
      const int last = LastStep();
      return last < from ? last > 0 && more == 0 : last >= from + more;
    }));
    const std::string killed = KillSomething();
    ++done[killed];
    if (kills > 20) {
      std::printf("kill %d after step %d: %s\n", i + 1, LastStep(),
                  killed.empty() ? "none there" : killed.c_str());
      std::fflush(stdout);
    }
  }
  // The process that was killed last may not have come back yet.
  const int from = LastStep();
  ASSERT_TRUE(WaitWhileItRuns(job, [&] { return LastStep() > from; }));
  const int epochs = LastStep() / kStepsOfEpoch + 10;
  ASSERT_TRUE(WriteFileAtomically(folder_ + "/epochs", absl::StrCat(epochs)).ok());
  WaitForState(job, "SUCCEEDED");

  const std::string undisturbed = Temp("undisturbed");
  ASSERT_EQ(mkdir(undisturbed.c_str(), 0700), 0);
  const std::map<int, std::string> curve = ReadCurve(folder_);
  ASSERT_FALSE(curve.empty());
  ASSERT_TRUE(WriteFileAtomically(undisturbed + "/epochs",
                                  absl::StrCat(curve.rbegin()->first / kStepsOfEpoch))
                  .ok());
  const auto alone = Muster({"launch", "--num_processes", "2", "--cpu", "--no_prefix", "--",
                             Runfile("tests/chaos/curve_worker"), undisturbed});
  ASSERT_EQ(alone->Wait(), 0) << alone->err_text();
  EXPECT_EQ(curve, ReadCurve(undisturbed));
  EXPECT_EQ(curve.size(), static_cast<size_t>(curve.rbegin()->first)) << "a step is missing";
  EXPECT_THAT(alone->out_text(), HasSubstr("weights "));
  EXPECT_THAT(Run({"logs", job}), HasSubstr(alone->out_text()));
  EXPECT_GT(done.size(), 1u);
}

}  // namespace
}  // namespace muster::chaos
