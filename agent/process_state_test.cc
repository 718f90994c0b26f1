#include "agent/process_state.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <spawn.h>
#include <sys/ptrace.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <future>
#include <random>
#include <string>
#include <thread>
#include <vector>

#include "base/mutate.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"

namespace muster::agent {
namespace {

using ::testing::IsEmpty;
using ::testing::StartsWith;
using ::testing::UnorderedElementsAre;

// Forks a child that waits forever; `ready` is closed only by its end.
pid_t ForkPausing() {
  const pid_t pid = fork();
  if (pid == 0) {
    for (;;) pause();
  }
  return pid;
}

TEST(ProcessState, Self_IsRunningAndNamed) {
  const ProcessState state = ReadProcessState(getpid());
  EXPECT_EQ(state.name, "running");
  EXPECT_EQ(state.command, "process_state_t");  // the kernel keeps 15 characters
  EXPECT_GE(state.threads, 1);
}

TEST(ProcessState, NoSuchProcess_IsGone) {
  EXPECT_EQ(ReadProcessState(-1).name, "gone");
  EXPECT_FALSE(ReadProcessState(0).exists());
}

TEST(ProcessState, Self_HasItsParentAndSession) {
  const ProcessState state = ReadProcessState(getpid());
  EXPECT_EQ(state.parent, getppid());
  EXPECT_EQ(state.session, getsid(0));
  EXPECT_GT(state.started, 0u);
  EXPECT_EQ(ReadStuckState(getpid()).name, "running");
}

TEST(ProcessState, Stat_IsTheSameWithoutWhatItWaitsFor) {
  const pid_t pid = ForkPausing();
  const ProcessState state = ReadProcessStat(pid);
  EXPECT_TRUE(state.exists());
  EXPECT_EQ(state.parent, getpid());
  EXPECT_EQ(state.session, getsid(0));
  EXPECT_GE(state.threads, 1);  // TSan adds a thread to the child
  EXPECT_EQ(state.syscall + state.wchan, "");
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
  EXPECT_FALSE(ReadProcessStat(pid).exists());
}

TEST(ListProcesses, HoldsThisOneAndItsChild) {
  const pid_t pid = ForkPausing();
  const std::vector<int64_t> all = ListProcesses();
  EXPECT_TRUE(std::binary_search(all.begin(), all.end(), getpid()));
  EXPECT_TRUE(std::binary_search(all.begin(), all.end(), pid));
  kill(pid, SIGKILL);
  waitpid(pid, nullptr, 0);
}

TEST(ListChildren, HoldsThoseOfAllThreadsAndNoOthers) {
  const pid_t pid = ForkPausing();
  // A child belongs to the thread that forked it, as long as that thread lives.
  std::promise<pid_t> forked;
  std::promise<void> done;
  std::thread thread([&] {
    forked.set_value(ForkPausing());
    done.get_future().wait();
  });
  const pid_t threads_own = forked.get_future().get();
  // Otherwise this kernel does not provide them.
  if (const auto children = ListChildren(getpid()); children.has_value()) {
    EXPECT_THAT(*children, UnorderedElementsAre(pid, threads_own));
    EXPECT_THAT(*ListChildren(pid), IsEmpty());
  }
  done.set_value();
  thread.join();
  for (const pid_t child : {pid, threads_own}) {
    kill(child, SIGKILL);
    waitpid(child, nullptr, 0);
  }
}

TEST(ProcessState, StoppedThenKilled_SaysSo) {
  const pid_t pid = ForkPausing();
  kill(pid, SIGSTOP);
  siginfo_t info = {};
  ASSERT_EQ(waitid(P_PID, pid, &info, WSTOPPED), 0);
  EXPECT_EQ(ReadProcessState(pid).name, "stopped");
  kill(pid, SIGKILL);
  ASSERT_EQ(waitid(P_PID, pid, &info, WEXITED | WNOWAIT), 0);
  EXPECT_EQ(ReadProcessState(pid).name, "zombie");
  ASSERT_EQ(waitid(P_PID, pid, &info, WEXITED), 0);
  EXPECT_EQ(ReadProcessState(pid).name, "gone");
}

// Imitates a process that waits for a dead file server, without one: a parent that spawns waits in
// the kernel for its child to execute the program, and this child first opens a FIFO without a
// writer. (ThreadSanitizer turns a plain vfork into a fork, which does not wait.)
TEST(ProcessState, WaitsInTheKernel_IsUninterruptibleInThatCall) {
  const std::string fifo = TestPath("fifo");
  ASSERT_EQ(mkfifo(fifo.c_str(), 0600), 0);
  const pid_t pid = fork();
  if (pid == 0) {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    posix_spawn_file_actions_addopen(&actions, 0, fifo.c_str(), O_RDONLY, 0);
    char program[] = "/bin/true";
    char* arguments[] = {program, nullptr};
    pid_t child = 0;
    posix_spawn(&child, program, &actions, nullptr, arguments, environ);
    _exit(0);
  }
  ProcessState state;
  do {
    state = ReadStuckState(pid);
  } while (state.name != "uninterruptible" && state.exists());
  // The kernel reports its system call a moment later, or not at all.
  EXPECT_EQ(state.name, "uninterruptible");
  kill(pid, SIGKILL);
  EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
  // Lets the child continue to its program, which ends at once.
  const int writer = open(fifo.c_str(), O_RDWR);
  EXPECT_GE(writer, 0);
  close(writer);
  unlink(fifo.c_str());
}

TEST(ProcessState, HeldByADebugger_NamesIt) {
  const pid_t pid = ForkPausing();
  ASSERT_EQ(ptrace(PTRACE_SEIZE, pid, nullptr, nullptr), 0);
  ASSERT_EQ(ptrace(PTRACE_INTERRUPT, pid, nullptr, nullptr), 0);
  ASSERT_EQ(waitpid(pid, nullptr, __WALL), pid);
  EXPECT_THAT(ReadStuckState(pid).ToString(),
              StartsWith("traced by process " + std::to_string(getpid()) + " ("));
  kill(pid, SIGKILL);
  EXPECT_EQ(waitpid(pid, nullptr, 0), pid);
}

TEST(ProcessState, SyscallWithoutAName_IsANumber) {
  EXPECT_EQ(SyscallName(SYS_futex), "futex");
  EXPECT_EQ(SyscallName(99999), "system call 99999");
}

TEST(ProcessState, ToString_NamesWhatIsKnown) {
  ProcessState state;
  state.name = "sleeping";
  EXPECT_EQ(state.ToString(), "sleeping");
  state.syscall = "futex";
  state.wchan = "futex_wait_queue";
  EXPECT_EQ(state.ToString(), "sleeping in futex (futex_wait_queue)");
}

TEST(Descends, Child_DescendsFromItsParentAndNotTheReverse) {
  EXPECT_TRUE(Descends(getpid(), getpid()));
  EXPECT_FALSE(Descends(getpid(), 1 << 30));
  const pid_t child = fork();
  if (child == 0) {
    const bool right = Descends(getpid(), getppid()) && !Descends(getppid(), getpid());
    _exit(right ? 0 : 1);
  }
  int status = -1;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST(ParseProcessState, CommandThatLooksLikeTheRest_IsTheCommand) {
  const ProcessState state =
      ParseProcessState("7 (a) Z (b)) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 3 0", "0", "202 0x1 0x2");
  EXPECT_EQ(state.name, "sleeping");
  EXPECT_EQ(state.command, "a) Z (b)");
  EXPECT_EQ(state.threads, 3);
  EXPECT_EQ(state.ToString(), "sleeping in futex");
}

TEST(ParseProcessState, Start_IsField22) {
  const std::string until_21 = "7 (a) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 3 0";
  EXPECT_EQ(ParseProcessState(until_21 + " 4711 99 98", "", "").started, 4711u);
  EXPECT_EQ(ParseProcessState(until_21 + " 4711\n", "", "").started, 4711u);
  EXPECT_EQ(ParseProcessState(until_21, "", "").started, 0u);
}

TEST(ParseProcessState, CommandThatTheKernelHasCutInACharacter_IsUtf8) {
  EXPECT_EQ(ParseProcessState("7 (caf\xc3\xa9) S 1", "0", "").command, "caf\xc3\xa9");
  EXPECT_EQ(ParseProcessState("7 (caf\xc3) S 1", "0", "").command, "caf\\xc3");
}

TEST(ParseProcessState, MutatedTexts_GiveAStateAllTheSame) {
  std::mt19937_64 random(20261121);
  for (int round = 0; round < 20'000; ++round) {
    const ProcessState state = ParseProcessState(
        Mutate("7 (python3 (x)) S 1 7 7 0 -1 0 0 0 0 0 0 0 0 0 20 0 3 0 12345", random),
        Mutate("futex_wait_queue", random), Mutate("202 0x7f 0x80 0x0", random));
    ASSERT_FALSE(state.name.empty());
    ASSERT_FALSE(state.ToString().empty());
  }
}

}  // namespace
}  // namespace muster::agent
