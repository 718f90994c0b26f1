#include "worker/agent/process_state.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

namespace muster::agent {
namespace {

// A child that waits for ever; `ready` is closed by its end only.
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

}  // namespace
}  // namespace muster::agent
