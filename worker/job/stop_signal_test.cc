#include "worker/job/stop_signal.h"

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>

namespace muster {
namespace {

// Runs each test in a process of its own, because signals affect the whole process.
template <typename F>
int InChild(F body) {
  const pid_t pid = fork();
  if (pid == 0) _exit(body());
  int status = 0;
  EXPECT_EQ(waitpid(pid, &status, 0), pid);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(StopSignal, FirstSignal_IsNoted) {
  EXPECT_EQ(InChild([] {
              if (!StopSignal::Install() || !StopSignal::Install()) return 1;
              if (StopSignal::Received()) return 2;
              raise(SIGTERM);
              return StopSignal::Received() ? 0 : 3;
            }),
            0);
}

int64_t g_now = 1;

TEST(StopSignal, SignalASecondLater_Kills) {
  EXPECT_EQ(InChild([] {
              StopSignal::Install([] { return g_now; });
              raise(SIGTERM);
              g_now += StopSignal::kSameRequest;
              raise(SIGTERM);
              return 1;
            }),
            -SIGTERM);
}

TEST(StopSignal, SameSignalTwice_IsOneWish) {
  EXPECT_EQ(InChild([] {
              StopSignal::Install([] { return g_now; });
              raise(SIGTERM);
              g_now += StopSignal::kSameRequest - 1;
              raise(SIGTERM);
              raise(SIGTERM);
              return StopSignal::Received() ? 0 : 1;
            }),
            0);
}

TEST(StopSignal, Released_Kills) {
  EXPECT_EQ(InChild([] {
              StopSignal::Install();
              if (!StopSignal::Release()) return 1;
              raise(SIGTERM);
              return 2;
            }),
            -SIGTERM);
}

TEST(StopSignal, ReleasedAndInstalledAgain_IsNoted) {
  EXPECT_EQ(InChild([] {
              if (!StopSignal::Install() || !StopSignal::Release() || !StopSignal::Install()) {
                return 1;
              }
              raise(SIGTERM);
              return StopSignal::Received() && !StopSignal::Release() ? 0 : 2;
            }),
            0);
}

TEST(StopSignal, ReleasedWhereTheProgramHandlesIt_HandlerStands) {
  EXPECT_EQ(InChild([] {
              signal(SIGTERM, SIG_IGN);
              if (!StopSignal::Release()) return 1;
              raise(SIGTERM);
              return 0;
            }),
            0);
}

TEST(StopSignal, HandlerOfTheProgram_Stands) {
  EXPECT_EQ(InChild([] {
              signal(SIGTERM, SIG_IGN);
              if (StopSignal::Install()) return 1;
              raise(SIGTERM);
              return StopSignal::Received() ? 2 : 0;
            }),
            0);
}

}  // namespace
}  // namespace muster
