#include "agent/worker_processes.h"

#include <signal.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdint>
#include <vector>

#include "base/test_wait.h"
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
  processes.Started("w0", 5, 0, family.child());
  EXPECT_EQ(processes.Find("job", "w0", 5, family.child()), family.child());
  EXPECT_EQ(processes.Find("job", "w0", 5, 0), family.child());
  // A wrapper script starts the program.
  EXPECT_EQ(processes.Find("job", "w0", 5, family.grandchild()), family.grandchild());
  EXPECT_EQ(processes.Find("job", "w0", 5, family.grandchild()), family.grandchild());
}

TEST(WorkerProcesses, All_AreTheProgramsThatScriptsWaitFor) {
  const Family family;
  // Like a shell that runs one command.
  int fds[2];
  ASSERT_EQ(pipe(fds), 0);
  const pid_t script = fork();
  if (script == 0) {
    const pid_t program = fork();
    if (program == 0) {
      for (;;) pause();
    }
    if (write(fds[1], &program, sizeof(program)) != sizeof(program)) _exit(1);
    waitpid(program, nullptr, 0);
    _exit(0);
  }
  pid_t program = 0;
  ASSERT_EQ(read(fds[0], &program, sizeof(program)), static_cast<ssize_t>(sizeof(program)));
  WorkerProcesses processes("job");
  processes.Started("w0", 5, 0, family.child());
  processes.Started("w1", 6, 1, script);
  std::vector<WorkerProcesses::Running> all;
  // It may not be waiting yet.
  WaitUntil([&] {
    all = processes.All();
    return all[1].program == program;
  });
  ASSERT_EQ(all.size(), 2u);
  EXPECT_EQ(all[0].worker_id, "w0");
  EXPECT_EQ(all[0].rank, 0);
  EXPECT_EQ(all[0].program, family.child());  // it does not only wait
  EXPECT_EQ(all[1].rank, 1);
  EXPECT_EQ(all[1].incarnation, 6u);
  processes.Ended("w1", 6);
  EXPECT_EQ(processes.All().size(), 1u);
  kill(program, SIGKILL);
  waitpid(script, nullptr, 0);
  close(fds[0]);
  close(fds[1]);
}

// The number comes from a worker in a pid namespace, or from one that lies.
TEST(WorkerProcesses, NumberOfSomebodyElse_IsNeverBelieved) {
  const Family family, other;
  WorkerProcesses processes("job");
  processes.Started("w0", 5, 0, family.child());
  for (const int64_t claimed : {int64_t{1}, int64_t{2}, int64_t{getpid()}, int64_t{getppid()},
                                int64_t{other.child()}, int64_t{other.grandchild()}}) {
    EXPECT_EQ(processes.Find("job", "w0", 5, claimed), family.child()) << claimed;
  }
}

TEST(WorkerProcesses, WorkerOfAProcess_IsWhoseFamilyItBelongsTo) {
  const Family family, other;
  WorkerProcesses processes("job");
  processes.Started("w0", 5, 0, family.child());
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
  processes.Started("w0", 5, 0, getpid());
  EXPECT_EQ(processes.Find("job", "w0", 6, getpid()), 0);
  EXPECT_EQ(processes.Find("job", "w1", 5, getpid()), 0);
  EXPECT_EQ(processes.Find("another", "w0", 5, getpid()), 0);
  processes.Ended("w0", 5);
  EXPECT_EQ(processes.Find("job", "w0", 5, getpid()), 0);
}

}  // namespace
}  // namespace muster::agent
