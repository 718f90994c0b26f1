#include "base/failpoint.h"

#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "base/test_folder.h"
#include "base/test_held_report.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

absl::Status FailingFunction() {
  MUSTER_FAILPOINT_STATUS("journal.before_fsync");
  return absl::OkStatus();
}
absl::StatusOr<int> FailingValue() {
  MUSTER_FAILPOINT_STATUS("journal.commit_begin");
  return 7;
}

class FailpointTest : public ::testing::Test {
 protected:
  void TearDown() override { ASSERT_TRUE(ArmFailpoints("", "", "").ok()); }
  static std::string Path(const std::string& name) {
    const std::string path = TestPath("failpoint_" + name);
    std::remove(path.c_str());
    return path;
  }
};

TEST_F(FailpointTest, NotArmed_DoesNothing) {
  EXPECT_TRUE(FailingFunction().ok());
  EXPECT_EQ(*FailingValue(), 7);
  ASSERT_TRUE(ArmFailpointsFromEnvironment().ok());
  EXPECT_TRUE(FailingFunction().ok());
}

TEST_F(FailpointTest, Error_ComesOnTheNthPassOnly) {
  ASSERT_TRUE(
      ArmFailpoints("journal.before_fsync=error:DATA_LOSS@2,journal.commit_begin=error", "", "")
          .ok());
  EXPECT_TRUE(FailingFunction().ok());
  EXPECT_EQ(FailingFunction(), absl::DataLossError("failpoint journal.before_fsync"));
  EXPECT_TRUE(FailingFunction().ok());
  EXPECT_EQ(FailingValue().status(), absl::UnavailableError("failpoint journal.commit_begin"));
  EXPECT_TRUE(FailingValue().ok());
}

TEST_F(FailpointTest, KillAndStop_HitThisProcess) {
  for (const auto& [action, signal] : {std::pair("kill", SIGKILL), std::pair("stop", SIGSTOP)}) {
    const pid_t child = fork();
    if (child == 0) {
      if (!ArmFailpoints(std::string("engine.apply=") + action, "", "").ok()) _exit(3);
      MUSTER_FAILPOINT("engine.apply");
      _exit(4);
    }
    int status = 0;
    ASSERT_EQ(waitpid(child, &status, WUNTRACED), child);
    if (signal == SIGKILL) {
      EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << status;
    } else {
      EXPECT_TRUE(WIFSTOPPED(status)) << status;
      kill(child, SIGCONT);
      ASSERT_EQ(waitpid(child, &status, 0), child);
      EXPECT_EQ(WEXITSTATUS(status), 4);  // it continues where it stopped
    }
  }
}

TEST_F(FailpointTest, Once_FiresInOneProcessOnly) {
  const std::string once = Path("once");
  ASSERT_TRUE(ArmFailpoints("journal.before_fsync=error", once, "").ok());
  EXPECT_FALSE(FailingFunction().ok());
  // What a process that was started again does.
  ASSERT_TRUE(ArmFailpoints("journal.before_fsync=error", once, "").ok());
  EXPECT_TRUE(FailingFunction().ok());
}

TEST_F(FailpointTest, Report_WritesEachPassedNameOnce) {
  const std::string report = Path("report");
  ASSERT_TRUE(ArmFailpoints("*=report,journal.commit_begin=error@2", "", report).ok());
  EXPECT_TRUE(FailingFunction().ok());
  EXPECT_TRUE(FailingFunction().ok());
  EXPECT_TRUE(FailingValue().ok());
  EXPECT_FALSE(FailingValue().ok());
  std::ifstream in(report);
  EXPECT_EQ(std::string(std::istreambuf_iterator<char>(in), {}),
            "journal.before_fsync\njournal.commit_begin\n");
}

// A reader that does not read the report must hold up a save only, and not the heartbeats.
TEST_F(FailpointTest, ReportThatIsHeld_HoldsUpItsOwnThreadOnly) {
  const std::string report = Path("held");
  HeldReport held(report);
  ASSERT_TRUE(
      ArmFailpoints("journal.before_fsync=report,journal.commit_begin=error@2", "", report).ok());
  std::thread waits([] { EXPECT_TRUE(FailingFunction().ok()); });
  held.WaitUntilHeld();
  EXPECT_TRUE(FailingFunction().ok()) << "it is reported once";
  EXPECT_TRUE(FailingValue().ok());
  EXPECT_FALSE(FailingValue().ok());
  held.Release();
  waits.join();
}

TEST_F(FailpointTest, WrongText_IsRefusedByName) {
  const struct {
    std::string spec, text;
  } kCases[] = {
      {"journal.before_fsyn=kill", "there is no failpoint of this name"},
      {"journal.before_fsync", "NAME=ACTION"},
      {"journal.before_fsync=explode", "kill, stop, error, delay and report"},
      {"journal.before_fsync=kill@0", "a number from 1 on"},
      {"journal.before_fsync=kill@x", "a number from 1 on"},
      {"journal.before_fsync=error:NO", "RESOURCE_EXHAUSTED"},
      {"engine.apply=error", "cannot return an error"},
      {"engine.apply=delay:soon", "delay:DURATION"},
      {"*=kill", "* takes only report"},
      {"engine.apply=report", "MUSTER_FAILPOINTS_REPORT"},
  };
  for (const auto& c : kCases) {
    const absl::Status status = ArmFailpoints(c.spec, "", "");
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.spec;
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr("MUSTER_FAILPOINTS: '" + c.spec + "'"), HasSubstr(c.text)));
  }
  EXPECT_TRUE(FailingFunction().ok());
}

TEST_F(FailpointTest, List_NamesThemAll) {
  EXPECT_THAT(ListFailpoints(),
              AllOf(HasSubstr("journal.before_fsync"), HasSubstr("engine.apply")));
}

}  // namespace
}  // namespace muster
