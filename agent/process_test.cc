#include "agent/process.h"

#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/ptrace.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <filesystem>
#include <fstream>
#include <map>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_split.h"
#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "agent/process_state.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_wait.h"
#include "base/text.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::EndsWith;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;

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

// Ignores a signal until the end of its scope.
class Ignored {
 public:
  explicit Ignored(int signal) : signal_(signal), before_(::signal(signal, SIG_IGN)) {}
  ~Ignored() { ::signal(signal_, before_); }

 private:
  const int signal_;
  const sighandler_t before_;
};

// Like kernels before 5.9.
int NoCloseRange(unsigned, unsigned, unsigned) {
  errno = ENOSYS;
  return -1;
}

// Behaves as if the kernel could not end the process.
int DeafToKill(pid_t pid, int signal) { return signal == SIGKILL ? 0 : kill(pid, signal); }

// The process that seems to belong to another user. In memory that is shared with the keeper.
std::atomic<pid_t>* const g_foreign =
    new (mmap(nullptr, sizeof(pid_t), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0))
        std::atomic<pid_t>(0);
int KillOwn(pid_t pid, int signal) {
  if (pid != *g_foreign) return kill(pid, signal);
  errno = EPERM;
  return -1;
}

// Refuses to add descriptors while this is above 0.
std::atomic<int> g_refusals{0};
int RefusingEpollCtl(int epoll, int op, int fd, epoll_event* event) {
  if (op == EPOLL_CTL_ADD && g_refusals > 0) {
    --g_refusals;
    errno = ENOSPC;
    return -1;
  }
  return epoll_ctl(epoll, op, fd, event);
}

// A process that has left the group, the session, the pipes and the environment, as daemons do; and
// a line that names it.
constexpr char kCleanedStray[] =
    "/usr/bin/env -i /usr/bin/setsid /bin/sh -c "
    "'echo stray $$; exec sleep 1000 </dev/null >/dev/null 2>&1' & ";

class ProcessTest : public ::testing::Test {
 protected:
  void SetUp() override {
    // Undoes the settings of the process that started the tests.
    for (const int signal : {SIGHUP, SIGINT, SIGQUIT}) ::signal(signal, SIG_DFL);
    StartHost({});
  }

  void StartHost(ProcessHostOptions options) {
    host_.reset();
    auto host = ProcessHost::Start(std::move(options));
    ASSERT_TRUE(host.ok()) << host.status();
    host_ = *std::move(host);
  }

  pid_t WaitForStray() {
    int stray = 0;
    EXPECT_TRUE(absl::SimpleAtoi(output_.WaitForLine("out:stray "), &stray));
    return stray;
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

// For nohup and the background jobs of shells: the process is as if it had been started without
// Muster.
TEST_F(ProcessTest, IgnoredHangUpInterruptAndQuit_StayIgnored) {
  for (const int signal : {SIGHUP, SIGINT, SIGQUIT}) {
    const Ignored ignored(signal);
    auto process = Spawn(Shell(absl::StrCat("kill -", signal, " $$; exit 4")));
    EXPECT_EQ(process->Wait().exit_code, 4) << signal;
  }
  // Otherwise the job could not be stopped, and pipelines of scripts would not end.
  for (const int signal : {SIGTERM, SIGPIPE}) {
    const Ignored ignored(signal);
    auto process = Spawn(Shell(absl::StrCat("kill -", signal, " $$; exit 4")));
    EXPECT_EQ(process->Wait().signal, signal);
  }
}

TEST_F(ProcessTest, IgnoredSigchldInherited_ExitIsKnown) {
  const Ignored ignored(SIGCHLD);
  StartHost({});
  EXPECT_EQ(Spawn(Shell("exit 7"))->Wait().exit_code, 7);
}

TEST_F(ProcessTest, KernelWithoutCloseRange_NothingLeaksAndTheHostEnds) {
  StartHost({.close_range = NoCloseRange});
  const int leaked = open("/etc/passwd", O_RDONLY);
  ASSERT_GT(leaked, 2);
  EXPECT_TRUE(Spawn(Shell(absl::StrCat("! test -e /proc/self/fd/", leaked)))->Wait().ok());
  close(leaked);
  // A guard that held the other end of its own pipe would wait forever, and so would this call.
  host_.reset();
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

TEST_F(ProcessTest, DeafToSigkill_IsToldAndGivenUp) {
  StartHost({.deaf_after = absl::ZeroDuration(),
             .give_up_after = absl::Milliseconds(1),
             .kill = DeafToKill});
  ProcessOptions options = Shell("trap '' TERM; echo up; while :; do sleep 1000; done");
  std::string seen_in;
  options.on_deaf = [&](absl::string_view state) { seen_in = std::string(state); };
  auto process = Spawn(std::move(options));
  output_.WaitForLine("out:up");
  process->Stop(absl::ZeroDuration());
  const ProcessExit exit = process->Wait();
  EXPECT_FALSE(exit.ok());
  EXPECT_NE(exit.stuck, "");
  EXPECT_NE(seen_in, "");
  EXPECT_EQ(exit.ToString(), absl::StrCat("does not end after SIGKILL: ", exit.stuck));
  const pid_t pid = process->pid();
  process->Signal(SIGKILL);  // no longer has an effect
  EXPECT_EQ(kill(pid, 0), 0);
  // The process does not delay the host's end, either; the guard still knows it.
  host_.reset();
  EXPECT_TRUE(WaitUntilEnded(pid));
  waitpid(pid, nullptr, 0);
}

// A debugger that requested the stop at exit and stands still: the process takes SIGKILL, does not
// end, and the kernel drops further signals. This is the real situation, and needs no privilege.
TEST_F(ProcessTest, HeldByADebuggerAfterSigkill_IsGivenUpWithItsState) {
  StartHost({.deaf_after = absl::ZeroDuration(), .give_up_after = absl::Milliseconds(1)});
  ProcessOptions options = Shell("echo up; exec sleep 1000");
  std::string seen_in;
  options.on_deaf = [&](absl::string_view state) { seen_in = std::string(state); };
  auto process = Spawn(std::move(options));
  output_.WaitForLine("out:up");
  const pid_t pid = process->pid();
  ASSERT_EQ(ptrace(PTRACE_SEIZE, pid, nullptr, PTRACE_O_TRACEEXIT), 0) << strerror(errno);
  process->Stop(absl::ZeroDuration());
  const ProcessExit exit = process->Wait();
  EXPECT_NE(seen_in, "");
  EXPECT_NE(exit.stuck, "");
  EXPECT_EQ(kill(pid, 0), 0);
  siginfo_t info = {};
  EXPECT_EQ(waitid(P_PID, pid, &info, WSTOPPED), 0) << strerror(errno);
  EXPECT_EQ(info.si_status, SIGTRAP | (PTRACE_EVENT_EXIT << 8));
  EXPECT_THAT(ReadStuckState(pid).ToString(),
              HasSubstr(absl::StrCat("traced by process ", getpid(), " (process_test)")));
  EXPECT_EQ(ptrace(PTRACE_DETACH, pid, nullptr, nullptr), 0);
  EXPECT_TRUE(WaitUntilEnded(pid));
}

// Behaves as if the kernel could not reach the program, on a dead file server.
int HangBeforeExec(unsigned first, unsigned last, unsigned flags) {
  if (first == 1) return SystemCloseRange(first, last, flags);  // the guard
  for (;;) pause();
}

// Reports that on its standard input, a socket, and continues when it gets an answer.
int WaitBeforeExec(unsigned first, unsigned last, unsigned flags) {
  const int result = SystemCloseRange(first, last, flags);
  if (first == 1) return result;
  char c = 'c';
  if (write(STDIN_FILENO, &c, 1) != 1 || read(STDIN_FILENO, &c, 1) != 1) _exit(1);
  return result;
}

TEST_F(ProcessTest, ProgramThatDoesNotBegin_IsGivenUp) {
  StartHost({.start_timeout = absl::Milliseconds(1), .close_range = HangBeforeExec});
  const auto process = host_->Spawn(Shell("exit 0"));
  EXPECT_EQ(process.status().code(), absl::StatusCode::kFailedPrecondition) << process.status();
  EXPECT_THAT(process.status().message(), HasSubstr("/bin/sh does not start"));
  host_.reset();
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "it is left behind";
}

// Otherwise ports and sockets of a launcher that is gone would stay taken, while its guard waits
// for its end.
TEST_F(ProcessTest, ProgramThatDoesNotBegin_HoldsNothingOfTheHost) {
  StartHost({.close_range = WaitBeforeExec});
  int input[2], held[2];
  ASSERT_EQ(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, input), 0);
  ASSERT_EQ(pipe2(held, O_CLOEXEC), 0);
  ProcessOptions options = Shell("exit 3");
  options.stdin_fd = input[0];
  std::thread starter([&] { EXPECT_EQ(Spawn(std::move(options))->Wait().exit_code, 3); });
  char c = 0;
  EXPECT_EQ(read(input[1], &c, 1), 1);
  close(held[1]);
  pollfd end = {held[0], POLLIN, 0};
  EXPECT_EQ(poll(&end, 1, 60'000), 1) << "the child holds the other end";
  EXPECT_EQ(write(input[1], &c, 1), 1);
  starter.join();
  for (const int fd : {input[0], input[1], held[0]}) close(fd);
}

TEST_F(ProcessTest, EpollRefuses_SpawnFailsAndTheHostGoesOn) {
  StartHost({.epoll_ctl = RefusingEpollCtl});
  g_refusals = 1;
  const auto refused = host_->Spawn(Shell("exit 0"));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kResourceExhausted) << refused.status();
  EXPECT_EQ(Spawn(Shell("exit 3"))->Wait().exit_code, 3);
}

TEST_F(ProcessTest, EpollRefusesTheOutput_ItArrivesLater) {
  StartHost({.epoll_ctl = RefusingEpollCtl});
  host_->PauseOutput(true);
  auto process = Spawn(Shell("echo late; exec sleep 1000"));
  g_refusals = 3;
  host_->PauseOutput(false);
  output_.WaitForLine("out:late");
  process->Stop(absl::ZeroDuration());
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

TEST_F(ProcessTest, LastLines_LongLine_IsCutBetweenCharacters) {
  ProcessOptions options = Shell("echo \"x$(printf '\\303\\251%.0s' $(seq 3000))\"");
  options.kept_lines = 1;
  auto process = Spawn(std::move(options));
  process->Wait();
  ASSERT_THAT(process->LastLines(), SizeIs(1));
  EXPECT_EQ(process->LastLines()[0].size(), 4095u);
  EXPECT_TRUE(IsValidUtf8(process->LastLines()[0]));
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

TEST_F(ProcessTest, CleanedStray_EndsWithTheHost) {
  auto process = Spawn(Shell(absl::StrCat(kCleanedStray, "wait")));
  const pid_t stray = WaitForStray();
  process->Stop(absl::ZeroDuration());
  process->Wait();
  EXPECT_EQ(kill(stray, 0), 0);
  host_.reset();
  EXPECT_TRUE(WaitUntilEnded(stray));
}

TEST_F(ProcessTest, StrayThatMayNotBeKilled_IsNotWaitedFor) {
  StartHost({.kill = KillOwn});
  auto process = Spawn(Shell(absl::StrCat(kCleanedStray, "wait")));
  const pid_t stray = WaitForStray();
  *g_foreign = stray;
  process->Stop(absl::ZeroDuration());
  process->Wait();
  ::testing::internal::CaptureStderr();
  const absl::Time begun = absl::Now();
  host_.reset();
  EXPECT_LT(absl::Now() - begun, absl::Seconds(4));
  const std::string said = ::testing::internal::GetCapturedStderr();
  const std::string line =
      absl::StrCat("process ", stray, " belongs to another user; it is left behind");
  EXPECT_THAT(said, HasSubstr(line));
  EXPECT_EQ(said.find(line), said.rfind(line)) << said;
  EXPECT_EQ(kill(stray, SIGKILL), 0);
  EXPECT_EQ(waitpid(stray, nullptr, 0), stray);
}

TEST_F(ProcessTest, CleanedStrayOfAnotherHost_LivesAsLongAsThat) {
  auto process = Spawn(Shell(absl::StrCat(kCleanedStray, "wait")));
  const pid_t stray = WaitForStray();
  process->Stop(absl::ZeroDuration());
  process->Wait();
  std::move(*ProcessHost::Start()).reset();
  EXPECT_EQ(kill(stray, 0), 0);
  host_.reset();
  EXPECT_TRUE(WaitUntilEnded(stray));
}

TEST_F(ProcessTest, StrayThatEnds_IsCollected) {
  auto process = Spawn(Shell("(setsid sh -c 'echo stray $$' &); exec sleep 1000"));
  const pid_t stray = WaitForStray();
  EXPECT_TRUE(WaitUntilEnded(stray));
  process->Stop(absl::ZeroDuration());
  process->Wait();
  Spawn(Shell("exit 0"))->Wait();
  Spawn(Shell("exit 0"))->Wait();  // begins after the previous process has been handled
  EXPECT_EQ(kill(stray, 0), -1);
}

// Children that this process had before, in their own session or not, belong to no host.
TEST(ProcessHost, ChildrenOfSomebodyElse_AreLeftAlone) {
  std::vector<pid_t> others;
  for (const bool own_session : {false, true}) {
    int ready[2];
    ASSERT_EQ(pipe2(ready, O_CLOEXEC), 0);
    const pid_t pid = fork();
    if (pid == 0) {
      if (own_session) setsid();
      if (write(ready[1], "x", 1) != 1) _exit(1);
      for (;;) pause();
    }
    char c;
    ASSERT_EQ(read(ready[0], &c, 1), 1);
    close(ready[0]);
    close(ready[1]);
    others.push_back(pid);
  }
  auto host = *ProcessHost::Start();
  Output output;
  ProcessOptions options;
  options.argv = {"/bin/sh", "-c", "setsid sh -c 'echo stray $$; exec sleep 1000' & wait"};
  options.env = {"PATH=/usr/bin:/bin"};
  options.on_line = [&](OutputStream stream, absl::string_view line) { output.Add(stream, line); };
  ASSERT_TRUE(host->Spawn(std::move(options)).ok());
  int stray = 0;
  ASSERT_TRUE(absl::SimpleAtoi(output.WaitForLine("out:stray "), &stray));
  host.reset();
  EXPECT_TRUE(WaitUntilEnded(stray));
  for (const pid_t pid : others) {
    EXPECT_EQ(waitpid(pid, nullptr, WNOHANG), 0);
    kill(pid, SIGKILL);
    waitpid(pid, nullptr, 0);
  }
}

// Returns the process id of the host's keeper; 0: none.
pid_t KeeperOf(pid_t owner) {
  for (const int64_t pid : ListProcesses()) {
    std::string name;
    std::getline(std::ifstream(absl::StrCat("/proc/", pid, "/comm")), name);
    if (name == "worker-keeper" && ReadProcessStat(pid).parent == owner) {
      return static_cast<pid_t>(pid);
    }
  }
  return 0;
}

enum class First { kNobody, kGuard, kKeeper, kKeeperStops };

// Kills the host's process with -9: the direct child, its child in the same group, one that left
// for its own session, and one that also cleared its environment must all end.
void KillOwner(ProcessHostOptions host_options, First first) {
  int fds[2];
  ASSERT_EQ(pipe2(fds, O_CLOEXEC), 0);
  const pid_t owner = fork();
  if (owner == 0) {
    Notification new_guard;
    host_options.on_new_guard = [&](pid_t) { new_guard.Notify(); };
    auto host = ProcessHost::Start(std::move(host_options));
    ProcessOptions options;
    options.argv = {"/bin/sh", "-c",
                    "sleep 1000 & g=$!; setsid sleep 1001 & s=$!; "
                    "env -i setsid sleep 1002 </dev/null >/dev/null 2>&1 & "
                    "echo pids $$ $g $s $!; wait"};
    options.env = {"PATH=/usr/bin:/bin"};
    Notification started;
    std::string text;
    options.on_line = [&](OutputStream, absl::string_view line) {
      text = absl::StrCat(line, "\n");
      started.Notify();
    };
    auto process = (*host)->Spawn(std::move(options));
    started.WaitForNotification();
    if (first == First::kGuard) {
      kill((*host)->guard_pid(), SIGKILL);
      new_guard.WaitForNotification();
    }
    if (write(fds[1], text.data(), text.size()) < 0) _exit(1);
    (*process)->Wait();
    for (;;) pause();
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
  ASSERT_EQ(pids.size(), 4u) << line;
  for (const int pid : pids) EXPECT_EQ(kill(pid, 0), 0);
  if (first == First::kKeeper) {
    kill(KeeperOf(owner), SIGKILL);
    // A process that cleared its environment is beyond the guard's reach.
    EXPECT_EQ(kill(pids.back(), SIGKILL), 0);
  }
  if (first == First::kKeeperStops) kill(KeeperOf(owner), SIGSTOP);
  kill(owner, SIGKILL);
  waitpid(owner, nullptr, 0);
  for (const int pid : pids) EXPECT_TRUE(WaitUntilEnded(pid)) << pid;
  close(fds[0]);
}

TEST(ProcessHost, OwnerKilled_NothingSurvives) { KillOwner({}, First::kNobody); }

TEST(ProcessHost, OwnerKilledOnAKernelWithoutCloseRange_NothingSurvives) {
  KillOwner({.close_range = NoCloseRange}, First::kNobody);
}

// A guard that replaces a killed one knows what was started before it.
TEST(ProcessHost, GuardAndThenOwnerKilled_NothingSurvives) { KillOwner({}, First::kGuard); }

TEST(ProcessHost, KeeperAndThenOwnerKilled_GuardEndsWhatShowsItsOrigin) {
  KillOwner({}, First::kKeeper);
}

TEST(ProcessHost, KeeperStoppedAndThenOwnerKilled_NothingSurvives) {
  KillOwner({}, First::kKeeperStops);
}

// A suspended debugger withholds the end of the process that it traces from the parent. The host's
// process is a child here, because an ancestor may trace without a privilege.
TEST(ProcessHost, EndThatATracerKeeps_IsKnownAndTheHostGoesOn) {
  for (const bool killed : {false, true}) {
    SCOPED_TRACE(killed);
    int to_owner[2], from_owner[2];
    ASSERT_EQ(pipe2(to_owner, O_CLOEXEC), 0);
    ASSERT_EQ(pipe2(from_owner, O_CLOEXEC), 0);
    const pid_t owner = fork();
    if (owner == 0) {
      const auto say = [&](const std::string& line) {
        if (write(from_owner[1], line.data(), line.size()) < 0) _exit(1);
      };
      auto host = *ProcessHost::Start();
      const auto spawn = [&](const std::string& script, int input) {
        ProcessOptions options;
        options.argv = {"/bin/sh", "-c", script};
        options.env = {"PATH=/usr/bin:/bin"};
        options.stdin_fd = input;
        return *host->Spawn(std::move(options));
      };
      const auto process = spawn("read x; exit 7", to_owner[0]);
      close(to_owner[0]);
      say(absl::StrCat(process->pid(), "\n"));
      const ProcessExit exit = process->Wait();
      say(absl::StrCat(exit.exit_code, " ", exit.signal, "\n"));
      say(absl::StrCat(spawn("exit 5", -1)->Wait().exit_code, "\n"));
      for (;;) pause();
    }
    close(to_owner[0]);
    close(from_owner[1]);
    const auto line = [&] {
      std::string text;
      char c;
      while (read(from_owner[0], &c, 1) == 1 && c != '\n') text += c;
      return text;
    };
    int pid = 0;
    ASSERT_TRUE(absl::SimpleAtoi(line(), &pid));
    ASSERT_EQ(ptrace(PTRACE_SEIZE, pid, nullptr, nullptr), 0) << strerror(errno);
    if (killed) {
      kill(pid, SIGKILL);
    } else {
      ASSERT_EQ(write(to_owner[1], "x\n", 2), 2);
    }
    EXPECT_EQ(line(), killed ? "0 9" : "7 0");
    EXPECT_EQ(ReadProcessStat(pid).name, "zombie");
    EXPECT_EQ(line(), "5");
    EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
    kill(owner, SIGKILL);
    waitpid(owner, nullptr, 0);
    close(to_owner[1]);
    close(from_owner[0]);
  }
}

TEST_F(ProcessTest, KeeperKilled_ProcessesEndAndTheHostGoesOn) {
  auto process = Spawn(Shell(absl::StrCat(kCleanedStray, "wait")));
  const pid_t stray = WaitForStray();
  const pid_t keeper = KeeperOf(getpid());
  ASSERT_GT(keeper, 0);
  kill(keeper, SIGKILL);
  EXPECT_EQ(process->Wait().signal, SIGKILL);
  EXPECT_EQ(Spawn(Shell("exit 5"))->Wait().exit_code, 5);
  EXPECT_NE(KeeperOf(getpid()), keeper);
  host_.reset();
  EXPECT_TRUE(WaitUntilEnded(stray));
  EXPECT_EQ(waitpid(-1, nullptr, WNOHANG), -1) << "a child was not collected";
}

TEST_F(ProcessTest, KeeperStopped_IsContinuedWhenItIsNeeded) {
  auto process = Spawn(Shell("exec sleep 1000"));
  kill(KeeperOf(getpid()), SIGSTOP);
  EXPECT_EQ(Spawn(Shell("exit 5"))->Wait().exit_code, 5);
  kill(KeeperOf(getpid()), SIGSTOP);
  process->Stop(absl::ZeroDuration());
  EXPECT_EQ(process->Wait().signal, SIGKILL);
  kill(KeeperOf(getpid()), SIGSTOP);
  host_.reset();
}

TEST_F(ProcessTest, DescriptorThatIsClosed_IsAnErrorAndOthersGoOn) {
  auto process = Spawn(Shell("exec sleep 1000"));
  ProcessOptions options = Shell("exit 0");
  options.stdin_fd = 9999;
  const auto refused = host_->Spawn(std::move(options));
  EXPECT_EQ(refused.status().code(), absl::StatusCode::kInternal) << refused.status();
  EXPECT_EQ(kill(process->pid(), 0), 0);
  EXPECT_EQ(Spawn(Shell("exit 5"))->Wait().exit_code, 5);
}

TEST_F(ProcessTest, ArgumentsAndEnvironmentOfMegabytes_PassThrough) {
  ProcessOptions options = Shell("echo ${#BIG} ${#1} $#");
  options.argv.insert(options.argv.end(), {"sh", std::string(100'000, 'a')});
  for (int i = 0; i < 5000; ++i) options.argv.push_back("word");
  options.env.push_back("BIG=" + std::string(120'000, 'b'));
  auto process = Spawn(std::move(options));
  EXPECT_TRUE(process->Wait().ok());
  EXPECT_THAT(output_.lines(), ElementsAre("out:120000 100000 5001"));
}

TEST_F(ProcessTest, ControlGroup_IsEnteredBeforeTheProgramRuns) {
  const TestFolder folder;
  // Not a group of the kernel: the child is forked as on an older kernel, and moves itself.
  const std::string procs = folder.Path("cgroup.procs");
  std::ofstream(procs).flush();
  const OwnedFd group(open(folder.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ProcessOptions options = Shell("cat " + procs + "; ls /proc/self/fd | wc -l");
  options.group_fd = group.get();
  EXPECT_TRUE(Spawn(std::move(options))->Wait().ok());
  // The process keeps no descriptor of the group: it has 0, 1, 2 and that of the folder.
  EXPECT_THAT(output_.lines(), ElementsAre("out:04"));

  const TestFolder none;
  const OwnedFd refuses(open(none.path().c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  ProcessOptions refused = Shell("echo it runs");
  refused.group_fd = refuses.get();
  const absl::Status status = host_->Spawn(std::move(refused)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_THAT(status.message(),
              HasSubstr("/bin/sh in its control group: No such file or directory"));
  // And the next process starts without one.
  EXPECT_TRUE(Spawn(Shell("true"))->Wait().ok());
}

TEST_F(ProcessTest, StartErrors_NameTheFileAndTheWayOut) {
  const TestFolder folder;
  const std::string& dir = folder.path();
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
  const std::string script = plain + ".py";
  std::filesystem::copy_file(plain, script);
  EXPECT_THAT(std::string(spawn(script).message()), EndsWith("write python3 " + script));

  status = spawn("/bin/true", dir + "/nowhere");
  EXPECT_EQ(status.code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(status.message(), HasSubstr("working directory"));

  EXPECT_EQ(spawn("").code(), absl::StatusCode::kInvalidArgument);
}

// The kernel would cut the text there, and use another program or another variable's name.
TEST_F(ProcessTest, NulByte_IsRefused) {
  const std::string nul("x\0y", 3);
  for (const int where : {0, 1, 2}) {
    ProcessOptions options = Shell("exit 0");
    if (where == 0) options.argv.push_back(nul);
    if (where == 1) options.env.push_back("A=" + nul);
    if (where == 2) options.working_directory = nul;
    const absl::Status status = host_->Spawn(std::move(options)).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << where;
    EXPECT_THAT(status.message(), HasSubstr("NUL byte")) << where;
  }
}

TEST(FindProgram, NameInPath_FirstExecutableWins) {
  EXPECT_EQ(*FindProgram("sh", "/nowhere:/bin:/usr/bin"), "/bin/sh");
  EXPECT_EQ(*FindProgram("/bin/sh", ""), "/bin/sh");
}

TEST(FindProgram, Script_IsSaidToNeedItsInterpreter) {
  const TestFolder folder;
  for (const auto& [name, interpreter] :
       std::map<std::string, std::string>{{"train.py", "python3"}, {"train.sh", "bash"}}) {
    const std::string path = folder.Path(name);
    std::ofstream(path) << "1\n";
    EXPECT_THAT(std::string(FindProgram(path, "").status().message()),
                EndsWith(absl::StrCat("or write ", interpreter, " ", path)));
  }
  const std::string plain = folder.Path("train");
  std::ofstream(plain) << "1\n";
  EXPECT_THAT(std::string(FindProgram(plain, "").status().message()),
              EndsWith("put its interpreter before it"));
}

TEST(FindProgram, NameThatIsOnlyInThisFolder_SaysWhatToWrite) {
  const TestFolder folder;
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(folder.Path("."));
  for (const char* const name : {"train.py", "train.sh", "train"}) {
    std::ofstream(name) << "1\n";
  }
  const auto error = [](const char* name) {
    return std::string(FindProgram(name, "/nowhere").status().message());
  };
  EXPECT_THAT(error("train.py"), EndsWith("for the script in this folder write python3 train.py"));
  EXPECT_THAT(error("train.sh"), EndsWith("for the script in this folder write bash train.sh"));
  EXPECT_THAT(error("train"), EndsWith("for the file in this folder write ./train"));
  EXPECT_THAT(error("absent.py"), EndsWith("give the path to it"));
  std::filesystem::current_path(before);
}

TEST(SignalName, KnownAndUnknown) {
  EXPECT_EQ(SignalName(SIGKILL), "SIGKILL");
  EXPECT_EQ(SignalName(77), "signal 77");
}

}  // namespace
}  // namespace muster::agent
