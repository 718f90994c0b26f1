#include "agent/worker_processes.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>

#include "gtest/gtest.h"

namespace muster::agent {
namespace {

// A child that has a child.
class Family {
 public:
  Family() {
    int fds[2];
    EXPECT_EQ(pipe(fds), 0);
    child_ = fork();
    if (child_ == 0) {
      setsid();
      const pid_t grandchild = fork();
      if (grandchild == 0) {
        for (;;) pause();
      }
      if (write(fds[1], &grandchild, sizeof(grandchild)) != sizeof(grandchild)) _exit(1);
      for (;;) pause();
    }
    EXPECT_EQ(read(fds[0], &grandchild_, sizeof(grandchild_)), sizeof(grandchild_));
    close(fds[0]);
    close(fds[1]);
  }
  ~Family() {
    kill(-child_, SIGKILL);
    waitpid(child_, nullptr, 0);
  }
  pid_t child() const { return child_; }
  pid_t grandchild() const { return grandchild_; }

 private:
  pid_t child_ = -1;
  pid_t grandchild_ = -1;
};

TEST(WorkerProcesses, OwnNumber_IsTheChildOrItsDescendant) {
  const Family family;
  WorkerProcesses processes("job");
  processes.Started("w0", 5, family.child());
  EXPECT_EQ(processes.Find("job", "w0", 5, family.child()), family.child());
  EXPECT_EQ(processes.Find("job", "w0", 5, 0), family.child());
  // A wrapper script that starts the program.
  EXPECT_EQ(processes.Find("job", "w0", 5, family.grandchild()), family.grandchild());
  EXPECT_EQ(processes.Find("job", "w0", 5, family.grandchild()), family.grandchild());
}

// What a worker in a pid namespace says of itself, or one that lies.
TEST(WorkerProcesses, NumberOfSomebodyElse_IsNeverBelieved) {
  const Family family, other;
  WorkerProcesses processes("job");
  processes.Started("w0", 5, family.child());
  for (const int64_t claimed : {int64_t{1}, int64_t{2}, int64_t{getpid()}, int64_t{getppid()},
                                int64_t{other.child()}, int64_t{other.grandchild()}}) {
    EXPECT_EQ(processes.Find("job", "w0", 5, claimed), family.child()) << claimed;
  }
}

TEST(WorkerProcesses, WorkerOfAProcess_IsWhoseFamilyItBelongsTo) {
  const Family family, other;
  WorkerProcesses processes("job");
  processes.Started("w0", 5, family.child());
  EXPECT_EQ(processes.WorkerOf(family.child()), "w0");
  EXPECT_EQ(processes.WorkerOf(family.grandchild()), "w0");
  for (const pid_t pid : {getpid(), getppid(), other.child(), other.grandchild(), 1, 0}) {
    EXPECT_EQ(processes.WorkerOf(pid), "") << pid;
  }
  processes.Ended("w0", 5);
  EXPECT_EQ(processes.WorkerOf(family.child()), "");
}

TEST(WorkerProcesses, AgentsOwnSeat_IsThisProcess) {
  WorkerProcesses processes("job");
  EXPECT_EQ(processes.Find("job.agents", "node1", 9, 12345), getpid());
  EXPECT_EQ(processes.Find("other.agents", "node1", 9, getpid()), 0);
}

TEST(WorkerProcesses, NotStartedHere_HasNone) {
  WorkerProcesses processes("job");
  processes.Started("w0", 5, getpid());
  EXPECT_EQ(processes.Find("job", "w0", 6, getpid()), 0);
  EXPECT_EQ(processes.Find("job", "w1", 5, getpid()), 0);
  EXPECT_EQ(processes.Find("another", "w0", 5, getpid()), 0);
  processes.Ended("w0", 5);
  EXPECT_EQ(processes.Find("job", "w0", 5, getpid()), 0);
}

}  // namespace
}  // namespace muster::agent
