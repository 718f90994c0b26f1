#include "agent/lock_holders.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <sys/file.h>
#include <sys/ptrace.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"

namespace muster::agent {
namespace {

using testing::ElementsAre;
using testing::Field;
using testing::HasSubstr;

const absl::Time kNow = absl::UnixEpoch() + absl::Hours(5);

class LockHoldersTest : public testing::Test {
 protected:
  LockHoldersTest() : path_(folder_.Path("lock")) {
    EXPECT_TRUE(WriteFileAtomically(path_, "").ok());
    fd_ = OwnedFd(open(path_.c_str(), O_RDWR | O_CLOEXEC));
  }
  ~LockHoldersTest() override {
    for (const pid_t child : children_) {
      kill(child, SIGKILL);
      waitpid(child, nullptr, 0);
    }
  }

  // A child that has the file open, with its lock or without, and that waits for a signal.
  pid_t Start(bool locks) {
    int ready[2];
    EXPECT_EQ(pipe2(ready, O_CLOEXEC), 0);
    const pid_t child = fork();
    if (child == 0) {
      const int fd = open(path_.c_str(), O_RDWR);
      if (fd < 0 || (locks && flock(fd, LOCK_EX | LOCK_NB) != 0)) _exit(1);
      (void)!write(ready[1], "x", 1);
      while (true) pause();
    }
    close(ready[1]);
    char byte = 0;
    EXPECT_EQ(read(ready[0], &byte, 1), 1);
    close(ready[0]);
    children_.push_back(child);
    return child;
  }

  const TestFolder folder_;
  const std::string path_;
  OwnedFd fd_;
  std::vector<pid_t> children_;
};

TEST_F(LockHoldersTest, Holder_IsWhoHasTheLock_NotWhoHasTheFileOpen) {
  Start(/*locks=*/false);
  EXPECT_TRUE(FindLockHolders(fd_.get()).empty());
  const pid_t holder = Start(/*locks=*/true);
  EXPECT_THAT(FindLockHolders(fd_.get()), ElementsAre(Field(&LockHolder::pid, holder)));
}

TEST_F(LockHoldersTest, ProcessThatIsKilled_EndsAndIsNotBeyondKilling) {
  const pid_t holder = Start(/*locks=*/true);
  LockBreaker breaker(absl::Seconds(10));
  EXPECT_FALSE(breaker.IsBeyondKilling(fd_.get(), kNow));
  EXPECT_FALSE(breaker.IsBeyondKilling(fd_.get(), kNow + absl::Seconds(9)));
  EXPECT_EQ(waitpid(holder, nullptr, WNOHANG), 0);  // it may end by itself until then
  EXPECT_FALSE(breaker.IsBeyondKilling(fd_.get(), kNow + absl::Seconds(10)));
  int status = 0;
  EXPECT_EQ(waitpid(holder, &status, 0), holder);
  EXPECT_TRUE(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
  children_.clear();
  EXPECT_FALSE(breaker.IsBeyondKilling(fd_.get(), kNow + absl::Hours(1)));
}

// A debugger that stands still at its end: it takes SIGKILL and does not end.
TEST_F(LockHoldersTest, ProcessThatSigkillDoesNotEnd_IsBeyondKilling) {
  const pid_t holder = Start(/*locks=*/true);
  ASSERT_EQ(ptrace(PTRACE_SEIZE, holder, nullptr, PTRACE_O_TRACEEXIT), 0) << strerror(errno);
  LockBreaker breaker(absl::Seconds(10));
  EXPECT_FALSE(breaker.IsBeyondKilling(fd_.get(), kNow));
  EXPECT_FALSE(breaker.IsBeyondKilling(fd_.get(), kNow + absl::Seconds(10)));
  siginfo_t info = {};
  EXPECT_EQ(waitid(P_PID, holder, &info, WSTOPPED), 0) << strerror(errno);
  EXPECT_FALSE(breaker.IsBeyondKilling(fd_.get(), kNow + absl::Seconds(19)));
  EXPECT_TRUE(breaker.IsBeyondKilling(fd_.get(), kNow + absl::Seconds(24)));
  EXPECT_THAT(breaker.ToString(), HasSubstr(absl::StrCat("process ", holder, ", traced")));
  EXPECT_EQ(ptrace(PTRACE_DETACH, holder, nullptr, nullptr), 0);
}

}  // namespace
}  // namespace muster::agent
