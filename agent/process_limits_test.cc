#include "agent/process_limits.h"

#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdio>

#include "absl/strings/match.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

// Whether `check` holds in a forked process, which has its own limits.
template <typename Check>
bool HoldsInChild(Check check) {
  const pid_t child = fork();
  if (child == 0) _exit(check() ? 0 : 1);
  int status = 0;
  return waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0;
}

TEST(ProcessLimits, AsTheyUsuallyAre_AreEnough) {
  EXPECT_TRUE(EnsureDescriptors(8).ok());
  EXPECT_TRUE(EnsureThreads(8).ok()) << EnsureThreads(8);
}

TEST(ProcessLimits, FewDescriptors_AreRefusedWithBothNumbers) {
  EXPECT_TRUE(HoldsInChild([] {
    const rlimit few = {50, 50};
    if (setrlimit(RLIMIT_NOFILE, &few) != 0) return false;
    const absl::Status status = EnsureDescriptors(2);
    return absl::IsResourceExhausted(status) &&
           absl::StrContains(status.message(), "may have 50 open files") &&
           absl::StrContains(status.message(), "2 processes need 60");
  }));
}

TEST(ProcessLimits, SoftLimitBelowTheHardOne_IsRaised) {
  EXPECT_TRUE(HoldsInChild([] {
    rlimit limit = {};
    if (getrlimit(RLIMIT_NOFILE, &limit) != 0) return false;
    limit.rlim_cur = 20;
    return setrlimit(RLIMIT_NOFILE, &limit) == 0 && EnsureDescriptors(1).ok();
  }));
}

TEST(ProcessLimits, FewThreads_AreRefused) {
  EXPECT_TRUE(HoldsInChild([] {
    const rlimit few = {4, 4};
    if (setrlimit(RLIMIT_NPROC, &few) != 0) return false;
    // The limit does not apply to root.
    if (geteuid() == 0 && setresuid(54321, 54321, 54321) != 0) return false;
    const absl::Status status = EnsureThreads(2);
    return absl::IsResourceExhausted(status) &&
           absl::StrContains(status.message(), "2 processes need 27");
  }));
}

// gRPC aborts if its threads find no room.
TEST(ProcessLimits, NoRoomForTheirStacks_IsRefused) {
  EXPECT_TRUE(HoldsInChild([] {
    long pages = 0;  // NOLINT: as scanf has it
    FILE* const file = fopen("/proc/self/statm", "re");
    if (file == nullptr || fscanf(file, "%ld", &pages) != 1) return false;
    fclose(file);
    const rlim_t room = static_cast<rlim_t>(pages) * getpagesize() + (64 << 20);
    const rlimit few = {room, room};
    if (setrlimit(RLIMIT_AS, &few) != 0) return false;
    const absl::Status status = EnsureThreads(2);
    return absl::IsResourceExhausted(status) &&
           absl::StrContains(status.message(), "ulimit -u or -v");
  }));
}

}  // namespace
}  // namespace muster::agent
