#include "base/descriptor_limit.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include "gtest/gtest.h"

namespace muster {
namespace {

rlimit Now() {
  rlimit limit{};
  EXPECT_EQ(getrlimit(RLIMIT_NOFILE, &limit), 0);
  return limit;
}

TEST(DescriptorLimit, Raised_IsTheHardOneHereAndTheOldOneInAChildThatRestoresIt) {
  RestoreDescriptorLimit();  // nothing was raised yet
  rlimit low = Now();
  low.rlim_cur = 100;
  ASSERT_EQ(setrlimit(RLIMIT_NOFILE, &low), 0);
  EXPECT_EQ(RaiseDescriptorLimit(), low.rlim_max);
  EXPECT_EQ(Now().rlim_cur, low.rlim_max);
  EXPECT_EQ(RaiseDescriptorLimit(), low.rlim_max) << "a second time changes nothing";
  const pid_t child = fork();
  ASSERT_GE(child, 0);
  if (child == 0) {
    RestoreDescriptorLimit();
    rlimit limit{};
    getrlimit(RLIMIT_NOFILE, &limit);
    _exit(limit.rlim_cur == 100 && limit.rlim_max == low.rlim_max ? 0 : 1);
  }
  int status = -1;
  ASSERT_EQ(waitpid(child, &status, 0), child);
  EXPECT_EQ(status, 0);
  EXPECT_EQ(Now().rlim_cur, low.rlim_max);
}

}  // namespace
}  // namespace muster
