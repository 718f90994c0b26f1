#include "agent/job_signals.h"

#include <poll.h>
#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>

#include "base/mutex.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using Request = StopRequests::Request;

TEST(StopRequests, TwoWithinASecond_AreOne) {
  StopRequests requests;
  const absl::Time t = absl::FromUnixSeconds(1'700'000'000);
  EXPECT_EQ(requests.Take(t), Request::kStop);
  EXPECT_EQ(requests.Take(t), Request::kRepeated);
  EXPECT_EQ(requests.Take(t + absl::Milliseconds(999)), Request::kRepeated);
  // A second after the first signal, not after the last.
  EXPECT_EQ(requests.Take(t + absl::Seconds(1)), Request::kKill);
  EXPECT_EQ(requests.Take(t + absl::Seconds(1)), Request::kKill);
}

// Runs `body` in a separate process, in which the signals are as at its start. Returns its exit
// code, or minus the signal that ended it.
template <typename Body>
int InChild(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    for (const int signal : {SIGINT, SIGTERM, SIGHUP}) ::signal(signal, SIG_DFL);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

TEST(JobSignals, InheritedAsIgnored_StayIgnored) {
  EXPECT_EQ(InChild([] {
              ::signal(SIGHUP, SIG_IGN);
              BlockJobSignals();
              std::atomic<bool> hang_up = false;
              Notification term;
              SignalWatcher watcher([&](int signal) {
                if (signal == SIGHUP) hang_up = true;
                if (signal == SIGTERM) term.Notify();
              });
              // Of two pending signals, the one with the smaller number is delivered first.
              kill(getpid(), SIGHUP);
              kill(getpid(), SIGTERM);
              term.WaitForNotification();
              return hang_up ? 1 : 0;
            }),
            0);
}

TEST(JobSignals, AfterTheJob_EndTheProcess) {
  EXPECT_EQ(InChild([] {
              BlockJobSignals();
              kill(getpid(), SIGINT);
              EndByJobSignals();
              return 0;
            }),
            128 + SIGINT);
}

}  // namespace
}  // namespace muster::agent
