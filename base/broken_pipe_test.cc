#include "base/broken_pipe.h"

#include <fcntl.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "gtest/gtest.h"

namespace muster {
namespace {

// Runs `body` in a separate process whose SIGPIPE is as at the start of a program. Returns its exit
// code, or minus the signal that ended it.
template <typename Body>
int InChild(Body body) {
  const pid_t child = fork();
  if (child == 0) {
    signal(SIGPIPE, SIG_DFL);
    _exit(body());
  }
  int status = 0;
  waitpid(child, &status, 0);
  return WIFSIGNALED(status) ? -WTERMSIG(status) : WEXITSTATUS(status);
}

// Returns the errno of a write to a pipe without a reader.
int WriteToNobody() {
  int fds[2];
  if (pipe2(fds, O_CLOEXEC) != 0) return -1;
  close(fds[0]);
  return write(fds[1], "x", 1) < 0 ? errno : 0;
}

TEST(BrokenPipe, WriteToNobody_IsAnErrorInsteadOfTheEnd) {
  EXPECT_EQ(InChild(WriteToNobody), -SIGPIPE);
  EXPECT_EQ(InChild([] {
              SurviveBrokenPipes();
              return WriteToNobody();
            }),
            EPIPE);
}

TEST(BrokenPipe, ProgramsThatAreStarted_HaveTheirDefault) {
  EXPECT_EQ(InChild([] {
              SurviveBrokenPipes();
              const int status = system("kill -PIPE $$");
              return WIFSIGNALED(status) ? WTERMSIG(status) : 0;
            }),
            SIGPIPE);
}

TEST(BrokenPipe, HandlerOfTheProgram_Stays) {
  EXPECT_EQ(InChild([] {
              signal(SIGPIPE, [](int) { _exit(7); });
              SurviveBrokenPipes();
              return WriteToNobody();
            }),
            7);
}

}  // namespace
}  // namespace muster
