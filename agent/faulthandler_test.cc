#include "agent/faulthandler.h"

#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;

class FaulthandlerTest : public ::testing::Test {
 protected:
  void TearDown() override {
    if (pid_ <= 0) return;
    EXPECT_EQ(kill(pid_, SIGKILL), 0);
    int status = 0;
    EXPECT_EQ(waitpid(pid_, &status, 0), pid_);
    EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL) << "it has ended before";
  }
  // Starts a Python whose standard error goes to a file; it runs once it has written to the file.
  pid_t Start(const std::string& setup, const std::string& signal) {
    const std::string source =
        absl::StrCat("import faulthandler, signal, sys, time\n", setup,
                     "\nturns = open(sys.argv[1], 'w')"
                     "\ndef inner():\n  print('ready', file=sys.stderr, flush=True)\n"
                     "  while True:\n    time.sleep(0.01)\n"
                     "    turns.write('.')\n    turns.flush()\ninner()\n");
    EXPECT_TRUE(WriteFileAtomically(folder_.Path("program.py"), source).ok());
    pid_ = fork();
    if (pid_ == 0) {
      if (freopen(errors_.c_str(), "w", stderr) == nullptr) _exit(126);
      if (!signal.empty()) setenv("MUSTER_STACK_SIGNAL", signal.c_str(), 1);
      execl("/usr/bin/python3", "python3", folder_.Path("program.py").c_str(), turns_.c_str(),
            nullptr);
      _exit(127);
    }
    WaitUntil([&] { return absl::StrContains(Errors(), "ready"); });
    return pid_;
  }
  std::string Errors() const { return ReadFile(errors_).value_or(""); }
  // A signal that was sent earlier is handled by then, because Python handles signals between two
  // turns.
  void AwaitTurns() const {
    const size_t now = Turns();
    WaitUntil([&] { return Turns() >= now + 3; });
  }
  size_t Turns() const { return ReadFile(turns_).value_or("").size(); }

  const TestFolder folder_;
  const std::string errors_ = folder_.Path("errors");
  const std::string turns_ = folder_.Path("turns");
  pid_t pid_ = -1;
};

TEST_F(FaulthandlerTest, RegisteredSignal_MakesItPrintItsFunctionsAndGoOn) {
  const pid_t pid = Start("faulthandler.register(signal.SIGUSR1)", "SIGUSR1");
  EXPECT_THAT(AskFaulthandler(pid), HasSubstr("prints its functions (SIGUSR1)"));
  WaitUntil([&] { return absl::StrContains(Errors(), " in <module>"); });
  EXPECT_THAT(Errors(), HasSubstr(" in inner"));
  AwaitTurns();
}

TEST_F(FaulthandlerTest, SignalThatTheProgramDoesNotHandle_IsNotSent) {
  const pid_t pid = Start("", "USR1");
  EXPECT_THAT(AskFaulthandler(pid), HasSubstr("USR1, which the program does not handle: "
                                              "faulthandler.register(signal.SIGUSR1)"));
  AwaitTurns();
  EXPECT_EQ(Errors(), "ready\n");
}

TEST_F(FaulthandlerTest, WithoutTheVariable_SaysWhatTheProgramNeeds) {
  const pid_t pid = Start("faulthandler.register(signal.SIGUSR1)", "");
  EXPECT_THAT(AskFaulthandler(pid), HasSubstr("MUSTER_STACK_SIGNAL=USR1 in its environment"));
  AwaitTurns();
  EXPECT_EQ(Errors(), "ready\n");
}

// Python handles INT with an exception, and faulthandler.enable() handles ABRT by ending the
// process.
TEST_F(FaulthandlerTest, OtherSignal_IsNamedAndNotSent) {
  const pid_t pid = Start("faulthandler.enable()", "INT");
  EXPECT_THAT(AskFaulthandler(pid), HasSubstr("MUSTER_STACK_SIGNAL=INT is not USR1 or USR2"));
  AwaitTurns();
  EXPECT_EQ(Errors(), "ready\n") << "an exception would have ended it with a trace";
}

TEST_F(FaulthandlerTest, AskedAgain_ItPrintsAgain) {
  const pid_t pid = Start("faulthandler.register(signal.SIGUSR2)", "SIGUSR2");
  for (size_t times = 1; times <= 2; ++times) {
    EXPECT_THAT(AskFaulthandler(pid), HasSubstr("prints its functions (SIGUSR2)"));
    WaitUntil([&] {
      const std::vector<std::string> parts = absl::StrSplit(Errors(), " in <module>");
      return parts.size() > times;
    });
  }
}

TEST_F(FaulthandlerTest, ProcessThatIsGone_IsNoError) {
  const pid_t gone = fork();
  if (gone == 0) _exit(0);
  waitpid(gone, nullptr, 0);
  EXPECT_NE(AskFaulthandler(gone), "");
}

}  // namespace
}  // namespace muster::agent
