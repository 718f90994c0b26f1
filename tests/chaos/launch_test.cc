// Failpoints of agents, and of workers that train: under `muster launch`, with a real training run
// whose weights must come out the same, bit for bit, whatever was killed on the way.
#include <signal.h>

#include <cstdio>
#include <cstdlib>
#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_replace.h"
#include "base/clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/chaos/child.h"

namespace muster::chaos {
namespace {

using ::testing::HasSubstr;

class Launch {
 public:
  explicit Launch(const std::string& name)
      : dir_(TestPath(name)), host_(*agent::ProcessHost::Start()) {
    EXPECT_TRUE(RemoveTree(dir_).ok());
    EXPECT_TRUE(MakeDirectories(dir_).ok());
  }

  // Starts two processes, which are started again at most twice.
  std::unique_ptr<Child> Start(const std::string& failpoints, bool asynchronous = false) {
    std::map<std::string, std::string> env = {{"PATH", "/usr/bin:/bin"},
                                              {"HOME", dir_},
                                              {"CUDA_VISIBLE_DEVICES", ""},
                                              {"MUSTER_PREFIX", "true"},
                                              {"MUSTER_PROJECT_DIR", dir_ + "/run"}};
    if (asynchronous) env["MUSTER_CHAOS_ASYNCHRONOUS"] = "1";
    if (!failpoints.empty()) {
      env["MUSTER_FAILPOINTS"] = failpoints;
      env["MUSTER_FAILPOINTS_ONCE"] = dir_ + "/fired";
    }
    return std::make_unique<Child>(
        *host_,
        std::vector<std::string>{ProgramPath("client/cli/muster"), "launch", "--cpu",
                                 "--num_processes", "2", "--max_restarts", "2", "--",
                                 ProgramPath("tests/chaos/training")},
        env, [] {});
  }
  // Waits until no process of these launches lives: all carry the run's folder in their
  // environment. Returns false after 20 s.
  bool NobodyIsLeft() const {
    for (int i = 0; i < 2000; ++i) {
      bool found = false;
      const auto processes = ListDirectory("/proc");
      for (const std::string& pid : *processes) {
        const auto environment = ReadFile(absl::StrCat("/proc/", pid, "/environ"));
        found = found ||
                (environment.ok() && absl::StrContains(*environment, "MUSTER_PROJECT_DIR=" + dir_));
      }
      if (!found) return true;
      Notification().WaitForNotificationWithTimeout(absl::Milliseconds(10));
    }
    return false;
  }
  bool fired() const { return PathExists(dir_ + "/fired"); }

 private:
  const std::string dir_;
  const std::unique_ptr<agent::ProcessHost> host_;
};

std::string WeightsOf(const Child& launch) { return launch.Newest("[0]: weights ").value_or(""); }

// The weights of a run that nothing disturbs.
const std::string& Weights() {
  static const std::string* const weights = [] {
    Launch launch("undisturbed");
    const auto child = launch.Start("");
    EXPECT_EQ(child->Wait(), 0) << child->text();
    EXPECT_NE(WeightsOf(*child), "") << child->text();
    return new std::string(WeightsOf(*child));
  }();
  return *weights;
}

class KilledTraining : public ::testing::TestWithParam<std::string> {};

TEST_P(KilledTraining, StartsAgainAndEndsWithTheSameWeights) {
  Launch launch("training");
  const auto child = launch.Start(GetParam());
  EXPECT_EQ(child->Wait(), 0) << child->text();
  EXPECT_TRUE(launch.fired()) << GetParam() << " was never reached";
  EXPECT_THAT(child->text(), HasSubstr("SIGKILL"));
  EXPECT_EQ(WeightsOf(*child), Weights()) << child->text();
}

const auto kNameOf = [](const auto& info) {
  return absl::StrReplaceAll(info.param, {{".", "_"}, {"=", "_"}, {"@", "_"}});
};

INSTANTIATE_TEST_SUITE_P(At, KilledTraining,
                         ::testing::Values("worker.group_begin=kill", "worker.group_built=kill",
                                           "worker.step=kill@8", "worker.checkpoint_staged=kill@2",
                                           "worker.checkpoint_publish=kill@2",
                                           "worker.checkpoint_renamed=kill@2"),
                         kNameOf);

class KilledAsynchronousSave : public ::testing::TestWithParam<std::string> {};

TEST_P(KilledAsynchronousSave, StartsAgainAndEndsWithTheWeightsOfSynchronousSaves) {
  Launch launch("asynchronous");
  const auto child = launch.Start(GetParam(), /*asynchronous=*/true);
  EXPECT_EQ(child->Wait(), 0) << child->text();
  EXPECT_TRUE(launch.fired()) << GetParam() << " was never reached";
  EXPECT_THAT(child->text(), HasSubstr("SIGKILL"));
  EXPECT_EQ(WeightsOf(*child), Weights()) << child->text();
}

INSTANTIATE_TEST_SUITE_P(At, KilledAsynchronousSave,
                         ::testing::Values("worker.checkpoint_block=kill@5",
                                           "worker.checkpoint_sync=kill@5",
                                           "worker.checkpoint_staged=kill@2",
                                           "worker.checkpoint_publish=kill@2",
                                           "worker.checkpoint_renamed=kill@2"),
                         kNameOf);

class KilledAgent : public ::testing::TestWithParam<std::string> {};

// The launcher holds agent and coordinator, so a failpoint of either kills both. Nothing is left of
// it, and the next launch continues from the saved state.
TEST_P(KilledAgent, LeavesNothingBehind_AndTheNextLaunchGoesOn) {
  Launch launch("agent");
  const auto killed = launch.Start(GetParam());
  EXPECT_EQ(killed->Wait(), -SIGKILL) << killed->text();
  EXPECT_TRUE(launch.NobodyIsLeft());
  EXPECT_TRUE(launch.fired()) << GetParam() << " was never reached";
  const auto child = launch.Start("");
  EXPECT_EQ(child->Wait(), 0) << child->text();
  EXPECT_EQ(WeightsOf(*child), Weights()) << child->text();
}

INSTANTIATE_TEST_SUITE_P(At, KilledAgent,
                         ::testing::Values("agent.before_fork=kill@2", "agent.after_fork=kill@2",
                                           "agent.spawned=kill@2", "agent.output=kill@3",
                                           "agent.reaped=kill", "engine.hello=kill",
                                           "engine.welcome=kill", "engine.directive=kill",
                                           "engine.session_end=kill"),
                         kNameOf);

// Ctrl-C in a terminal: the signal goes to the whole foreground group, at drawn moments.
//   MUSTER_INTERRUPTS=100 bazel-bin/tests/chaos/launch_test --gtest_filter='Interrupted*'
// is the long run; see docs/failpoints.md.
TEST(InterruptedLaunch, AtAnyMoment_LeavesNothingBehind_AndTheNextLaunchGoesOn) {
  int runs = 6;
  if (const char* const text = std::getenv("MUSTER_INTERRUPTS")) {
    ASSERT_TRUE(absl::SimpleAtoi(text, &runs)) << text;
  }
  Weights();
  const absl::Time start = Clock::Real().Now();
  {
    Launch whole("timed");
    ASSERT_EQ(whole.Start("")->Wait(), 0);
  }
  const absl::Duration duration = Clock::Real().Now() - start;
  std::mt19937_64 random(7);
  int launches = 0;
  // Launches that had ended before do not count.
  for (int interrupted = 0; interrupted < runs && !HasFailure();) {
    ASSERT_LT(++launches, 20 * runs) << interrupted << " were interrupted";
    Launch launch("interrupted");
    const auto child = launch.Start("");
    const double moment = std::uniform_real_distribution<double>(0, 1)(random);
    child->WaitFor("a line that nobody writes", moment * duration);
    kill(-child->pid(), SIGINT);
    const int code = child->Wait();
    EXPECT_TRUE(launch.NobodyIsLeft()) << "after " << moment << " of a run, " << launches;
    if (code == 0) continue;
    ++interrupted;
    // The launcher may have no handler yet.
    EXPECT_TRUE(code == 130 || code == -SIGINT) << code << ": " << child->text();
    const auto next = launch.Start("");
    EXPECT_EQ(next->Wait(), 0) << next->text();
    EXPECT_EQ(WeightsOf(*next), Weights()) << next->text();
  }
  std::printf("%d of %d launches were interrupted\n", runs, launches);
}

// One worker dies, and the agent dies while it stops the other.
TEST(StoppedAgent, WhileItStopsWorkers_LeavesNothingBehind) {
  Launch launch("agent");
  const auto killed = launch.Start("agent.stop_worker=kill");
  ASSERT_TRUE(killed->WaitFor("round 0 is saved", absl::Seconds(60))) << killed->text();
  kill(killed->pid(), SIGINT);
  EXPECT_EQ(killed->Wait(), -SIGKILL) << killed->text();
  EXPECT_TRUE(launch.NobodyIsLeft());
  const auto child = launch.Start("");
  EXPECT_EQ(child->Wait(), 0) << child->text();
  EXPECT_EQ(WeightsOf(*child), Weights()) << child->text();
}

}  // namespace
}  // namespace muster::chaos
