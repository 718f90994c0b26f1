#include "agent/descriptors.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>

#include "gtest/gtest.h"

namespace muster::agent {
namespace {

// Like kernels before 5.9.
int NoSuchCall(unsigned, unsigned, unsigned) {
  errno = ENOSYS;
  return -1;
}

bool IsOpen(int fd) { return fcntl(fd, F_GETFD) >= 0; }

// Whether `check` holds in a forked process, which has its own descriptors.
template <typename Check>
bool HoldsInChild(Check check) {
  const pid_t child = fork();
  if (child == 0) _exit(check() ? 0 : 1);
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

class DescriptorsTest : public ::testing::TestWithParam<CloseRangeCall> {};

TEST_P(DescriptorsTest, CloseFrom_LeavesWhatIsToBeKept) {
  const pid_t child = fork();
  if (child == 0) {
    bool right = true;
    for (const int kept : {50, 52, 53}) {
      for (int fd = 50; fd < 54; ++fd) dup2(1, fd);
      KeepOpen(kept);
      CloseFrom(50, GetParam());
      for (int fd = 50; fd < 54; ++fd) right = right && (fcntl(fd, F_GETFD) == 0) == (fd == kept);
      close(kept);
    }
    _exit(right ? 0 : 1);
  }
  int status = 0;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
}

TEST_P(DescriptorsTest, CloseFrom_ClosesThatAndAllAboveAndNothingBelow) {
  EXPECT_TRUE(HoldsInChild([] {
    const int low = fcntl(0, F_DUPFD, 40);
    const int first = fcntl(0, F_DUPFD, 41);
    // More than one page of a folder's entries.
    for (int i = 0; i < 300; ++i) {
      if (fcntl(0, F_DUPFD, 42) < 0) return false;
    }
    const int high = fcntl(0, F_DUPFD, 900);
    if (low < 0 || first < 0 || high < 0) return false;
    CloseFrom(first, GetParam());
    if (!IsOpen(low) || !IsOpen(0) || !IsOpen(2)) return false;
    for (int fd = first; fd <= high; ++fd) {
      if (IsOpen(fd)) return false;
    }
    return true;
  }));
}

TEST(Descriptors, StandardOnesMissing_AreNullAndNothingElse) {
  EXPECT_TRUE(HoldsInChild([] {
    for (const int fd : {0, 2}) close(fd);
    OpenStandardDescriptors();
    struct stat null, in, err;
    if (stat("/dev/null", &null) != 0 || fstat(0, &in) != 0 || fstat(2, &err) != 0) return false;
    const int next = dup(1);
    const bool right = in.st_rdev == null.st_rdev && err.st_rdev == null.st_rdev && next > 2;
    close(next);
    OpenStandardDescriptors();  // no effect
    if (!right || dup(1) != next || !IsStandardDescriptor(0)) return false;
    // A library opened a descriptor earlier.
    close(0);
    return open("/dev/null", O_RDONLY | O_CLOEXEC) == 0 && !IsStandardDescriptor(0);
  }));
}

INSTANTIATE_TEST_SUITE_P(Kernels, DescriptorsTest,
                         ::testing::Values(&SystemCloseRange, &NoSuchCall), [](const auto& info) {
                           return info.param == &NoSuchCall ? "NoSuchCall" : "System";
                         });

}  // namespace
}  // namespace muster::agent
