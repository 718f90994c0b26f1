#include "worker/agent/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <fstream>
#include <string>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "base/mutex.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

// Waits until `pid` has ended (it may still be a zombie of somebody else). False after a minute.
bool WaitUntilEnded(pid_t pid) {
  const int fd = static_cast<int>(syscall(SYS_pidfd_open, pid, 0));
  if (fd < 0) return errno == ESRCH;
  pollfd event = {fd, POLLIN, 0};
  const bool ended = poll(&event, 1, 60'000) == 1;
  close(fd);
  return ended;
}

// What a process wrote, and a way to wait for a line.
class Output {
 public:
  void Add(OutputStream stream, absl::string_view line) {
    MutexLock lock(&mu_);
    lines_.push_back(absl::StrCat(stream == OutputStream::kStdout ? "out:" : "err:", line));
    changed_.SignalAll();
  }
  std::string WaitForLine(absl::string_view prefix) {
    MutexLock lock(&mu_);
    for (;;) {
      for (const std::string& line : lines_) {
        if (absl::StartsWith(line, prefix)) return line.substr(prefix.size());
      }
      if (changed_.WaitWithTimeout(&mu_, absl::Minutes(1))) return "no such line";
    }
  }
  std::vector<std::string> lines() {
    MutexLock lock(&mu_);
    return lines_;
  }

 private:
  Mutex mu_;
  CondVar changed_;
  std::vector<std::string> lines_ ABSL_GUARDED_BY(mu_);
};

class ProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto host = ProcessHost::Start();
    ASSERT_TRUE(host.ok()) << host.status();
    host_ = *std::move(host);
  }

  ProcessOptions Shell(const std::string& script) {
    ProcessOptions options;
    options.argv = {"/bin/sh", "-c", script};
    options.env = {"PATH=/usr/bin:/bin"};
    options.on_line = [this](OutputStream stream, absl::string_view line) {
      output_.Add(stream, line);
    };
    return options;
  }

  std::shared_ptr<Process> Spawn(ProcessOptions options) {
    auto process = host_->Spawn(std::move(options));
    EXPECT_TRUE(process.ok()) << process.status();
    return process.ok() ? *process : nullptr;
  }

  Output output_;
  std::unique_ptr<ProcessHost> host_;
};

TEST_F(ProcessTest, Output_BothStreams_ArrivesInLinesBeforeTheExit) {
  Notification exited;
  ProcessOptions options = Shell("echo one; echo two >&2; printf three");
  std::vector<std::string> at_exit;
  options.on_exit = [&](const ProcessExit&) {
    at_exit = output_.lines();
    exited.Notify();
  };
  auto process = Spawn(std::move(options));
  EXPECT_TRUE(process->Wait().ok());
  ASSERT_TRUE(exited.HasBeenNotified());
  EXPECT_THAT(at_exit, ::testing::UnorderedElementsAre("out:one", "err:two", "out:three"));
}

TEST_F(ProcessTest, ExitCode_IsTold) {
  const ProcessExit exit = Spawn(Shell("exit 7"))->Wait();
  EXPECT_EQ(exit.exit_code, 7);
  EXPECT_EQ(exit.signal, 0);
  EXPECT_EQ(exit.ToString(), "exited with code 7");
}

TEST_F(ProcessTest, KilledBySignal_IsTold) {
  auto process = Spawn(Shell("echo up; read never <&0; exec sleep 1000"));
  output_.WaitForLine("out:up");
  kill(process->pid(), SIGKILL);
  const ProcessExit exit = process->Wait();
  EXPECT_EQ(exit.signal, SIGKILL);
  EXPECT_FALSE(exit.ok());
  EXPECT_EQ(exit.ToString(), "was killed by signal 9 (SIGKILL)");
}

TEST_F(ProcessTest, Environment_IsExactlyWhatWasGivenAndTheMark) {
  ProcessOptions options = Shell("");
  options.argv = {"env"};
  options.env = {"PATH=/usr/bin:/bin", "A=b c", "MUSTER_PROCESS_TREE=outer"};
  Spawn(std::move(options))->Wait();
  EXPECT_THAT(output_.lines(),
              ElementsAre("out:PATH=/usr/bin:/bin", "out:A=b c",
                          absl::StrCat("out:MUSTER_PROCESS_TREE=outer/", host_->mark())));
}

TEST_F(ProcessTest, Arguments_PassThroughNoShell) {
  ProcessOptions options = Shell("");
  options.argv = {"/usr/bin/printf", "%s\\n", "a b", "$HOME", "*", "", "; exit 3"};
  EXPECT_TRUE(Spawn(std::move(options))->Wait().ok());
  EXPECT_THAT(output_.lines(),
              ElementsAre("out:a b", "out:$HOME", "out:*", "out:", "out:; exit 3"));
}

TEST_F(ProcessTest, OpenDescriptorsOfTheHost_AreNotInherited) {
  const int leaked =
      open("/etc/passwd", O_RDONLY);  // Without O_CLOEXEC, as a careless library would.
  ASSERT_GT(leaked, 2);
  EXPECT_TRUE(Spawn(Shell(absl::StrCat("! test -e /proc/self/fd/", leaked)))->Wait().ok());
  close(leaked);
}

TEST_F(ProcessTest, StandardInput_DefaultIsEmpty) {
  EXPECT_EQ(Spawn(Shell("read line"))->Wait().exit_code, 1);
}

TEST_F(ProcessTest, SignalState_IsFreshForTheProcess) {
  signal(SIGUSR1, SIG_IGN);
  auto process = Spawn(Shell("kill -USR1 $$; echo survived"));
  EXPECT_EQ(process->Wait().signal, SIGUSR1);
  signal(SIGUSR1, SIG_DFL);
}

TEST_F(ProcessTest, Stop_ProcessThatCleansUp_ExitsByItself) {
  auto process =
      Spawn(Shell("trap 'echo bye; exit 5' TERM; echo up; while :; do sleep 1000 & wait; done"));
  output_.WaitForLine("out:up");
  process->Stop(absl::Hours(1));
  EXPECT_EQ(process->Wait().exit_code, 5);
  EXPECT_THAT(output_.lines(), Contains("out:bye"));
}

TEST_F(ProcessTest, Stop_ProcessThatIgnoresTerm_IsKilledAfterTheGrace) {
  auto process = Spawn(Shell("trap '' TERM; echo up; while :; do sleep 1000; done"));
  output_.WaitForLine("out:up");
  process->Stop(absl::Milliseconds(20));
  EXPECT_EQ(process->Wait().signal, SIGKILL);
}

TEST_F(ProcessTest, Stop_StoppedProcess_HearsTheTerm) {
  auto process = Spawn(Shell("trap 'exit 6' TERM; echo up; while :; do sleep 1000 & wait; done"));
  output_.WaitForLine("out:up");
  process->Signal(SIGSTOP);
  process->Stop(absl::Hours(1));
  EXPECT_EQ(process->Wait().exit_code, 6);
}

TEST_F(ProcessTest, LeaderEnds_RestOfItsGroupIsKilled) {
  auto process = Spawn(Shell("sleep 1000 & echo child $!; exit 0"));
  EXPECT_TRUE(process->Wait().ok());
  int child = 0;
  ASSERT_TRUE(absl::SimpleAtoi(output_.WaitForLine("out:child "), &child));
  EXPECT_TRUE(WaitUntilEnded(child));
}

TEST_F(ProcessTest, LastLines_KeepsTheNewest) {
  ProcessOptions options = Shell("for i in 1 2 3 4 5; do echo line $i; done");
  options.kept_lines = 2;
  auto process = Spawn(std::move(options));
  process->Wait();
  EXPECT_THAT(process->LastLines(), ElementsAre("line 4", "line 5"));
}

TEST_F(ProcessTest, Terminal_ProcessSeesOneAndNewlinesStay) {
  ProcessOptions options = Shell("test -t 1 && echo yes; test -t 2 || echo no >&2");
  options.stdout_terminal = true;
  Spawn(std::move(options))->Wait();
  EXPECT_THAT(output_.lines(), ::testing::UnorderedElementsAre("out:yes", "err:no"));
}

TEST_F(ProcessTest, PausedOutput_NothingIsLost) {
  host_->PauseOutput(true);
  ProcessOptions options =
      Shell("i=0; while [ $i -lt 20000 ]; do echo 0123456789; i=$((i+1)); done; echo end");
  int lines = 0;
  options.on_line = [&](OutputStream, absl::string_view) { ++lines; };
  auto process = Spawn(std::move(options));
  host_->PauseOutput(false);
  EXPECT_TRUE(process->Wait().ok());
  EXPECT_EQ(lines, 20001);
}

TEST_F(ProcessTest, WaitFor_StillRunning_SaysSo) {
  auto process = Spawn(Shell("exec sleep 1000"));
  EXPECT_EQ(process->WaitFor(absl::ZeroDuration()), std::nullopt);
  process->Stop(absl::ZeroDuration());
  EXPECT_EQ(process->Wait().signal, SIGKILL);
  EXPECT_TRUE(process->WaitFor(absl::ZeroDuration()).has_value());
}

TEST_F(ProcessTest, HostDestroyed_ProcessesAreGoneAndHandlesStayValid) {
  auto process =
      Spawn(Shell("setsid sleep 1000 & echo stray $!; trap '' TERM; while :; do sleep 1000; done"));
  int stray = 0;
  ASSERT_TRUE(absl::SimpleAtoi(output_.WaitForLine("out:stray "), &stray));
  const pid_t guard = host_->guard_pid();
  host_.reset();
  EXPECT_EQ(process->Wait().signal, SIGKILL);
  EXPECT_EQ(kill(guard, 0), -1);
  EXPECT_TRUE(WaitUntilEnded(stray));
  process->Stop(absl::ZeroDuration());
}

// The host's process is killed with -9: the direct child, its child in the same group, and one that
// left for a session of its own must all end.
TEST(ProcessHost, OwnerKilled_NothingSurvives) {
  int fds[2];
  ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
  const pid_t owner = fork();
  if (owner == 0) {
    auto host = ProcessHost::Start();
    ProcessOptions options;
    options.argv = {"/bin/sh", "-c",
                    "sleep 1000 & g=$!; setsid sleep 1001 & echo pids $$ $g $!; wait"};
    options.env = {"PATH=/usr/bin:/bin"};
    options.on_line = [&](OutputStream, absl::string_view line) {
      const std::string text = absl::StrCat(line, "\n");
      if (write(fds[1], text.data(), text.size()) < 0) _exit(1);
    };
    auto process = (*host)->Spawn(std::move(options));
    (*process)->Wait();
    _exit(0);
  }
  close(fds[1]);
  std::string line;
  char c;
  while (read(fds[0], &c, 1) == 1 && c != '\n') line += c;
  std::vector<int> pids;
  for (absl::string_view word : absl::StrSplit(line, ' ')) {
    int pid = 0;
    if (absl::SimpleAtoi(word, &pid)) pids.push_back(pid);
  }
  ASSERT_EQ(pids.size(), 3u) << line;
  for (const int pid : pids) EXPECT_EQ(kill(pid, 0), 0);
  kill(owner, SIGKILL);
  waitpid(owner, nullptr, 0);
  for (const int pid : pids) EXPECT_TRUE(WaitUntilEnded(pid)) << pid;
  close(fds[0]);
}

TEST_F(ProcessTest, StartErrors_NameTheFileAndTheWayOut) {
  const std::string dir = ::testing::TempDir();
  const auto spawn = [&](const std::string& program, const std::string& cwd = "") {
    ProcessOptions options = Shell("");
    options.argv = {program};
    options.working_directory = cwd;
    return host_->Spawn(std::move(options)).status();
  };
  absl::Status status = spawn(dir + "/missing");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("missing not found"));

  status = spawn("no-such-program-anywhere");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("not found in PATH"));

  status = spawn(dir);
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("is a directory"));

  const std::string plain = dir + "/plain.txt";
  std::ofstream(plain) << "hello\n";
  ASSERT_EQ(chmod(plain.c_str(), 0644), 0);
  status = spawn(plain);
  EXPECT_EQ(status.code(), absl::StatusCode::kPermissionDenied);
  EXPECT_THAT(status.message(), HasSubstr("chmod +x"));

  ASSERT_EQ(chmod(plain.c_str(), 0755), 0);
  status = spawn(plain);
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(status.message(), HasSubstr("#!"));

  status = spawn("/bin/true", dir + "/nowhere");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("working directory"));

  EXPECT_EQ(spawn("").code(), absl::StatusCode::kInvalidArgument);
}

TEST(FindProgram, NameInPath_FirstExecutableWins) {
  EXPECT_EQ(*FindProgram("sh", "/nowhere:/bin:/usr/bin"), "/bin/sh");
  EXPECT_EQ(*FindProgram("/bin/sh", ""), "/bin/sh");
}

TEST(SignalName, KnownAndUnknown) {
  EXPECT_EQ(SignalName(SIGKILL), "SIGKILL");
  EXPECT_EQ(SignalName(77), "signal 77");
}

}  // namespace
}  // namespace muster::agent
