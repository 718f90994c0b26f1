#include "worker/job/thread_share.h"

#include <sched.h>

#include <utility>

#include "base/file.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(ThreadShare, CoresOfTheNode_AreDivided) {
  EXPECT_EQ(ThreadShare({.of_node = 32, .of_process = 32}, 8, 32), 4);
  EXPECT_EQ(ThreadShare({.of_node = 32, .of_process = 32}, 1, 32), 32);
  EXPECT_EQ(ThreadShare({.of_node = 2, .of_process = 2}, 8, 2), 1);
  // Two hardware threads to a core, of which LibTorch takes one.
  EXPECT_EQ(ThreadShare({.of_node = 64, .of_process = 64, .threads_per_core = 2}, 8, 32), 4);
}

TEST(ThreadShare, BoundProcess_HasNoMoreThanItsCores) {
  EXPECT_EQ(ThreadShare({.of_node = 32, .of_process = 1}, 8, 1), 1);    // --bind-to core
  EXPECT_EQ(ThreadShare({.of_node = 32, .of_process = 16}, 8, 16), 4);  // --bind-to socket
  EXPECT_EQ(ThreadShare({.of_node = 32, .of_process = 2}, 8, 2), 2);    // srun -c 2
}

TEST(ThreadShare, NumberThatTheProgramHasSet_Stays) {
  EXPECT_EQ(ThreadShare({.of_node = 32, .of_process = 32}, 4, 3), 3);
  EXPECT_EQ(ThreadShare({.of_node = 32, .of_process = 32}, 32, 15), 15);
  EXPECT_EQ(ThreadShare({.of_node = 32, .of_process = 32}, 2, 16), 16);
  EXPECT_EQ(ThreadShare({.of_node = 64, .of_process = 64, .threads_per_core = 2}, 2, 16), 16);
}

TEST(CountCpuList, RangesAndNumbers) {
  EXPECT_EQ(CountCpuList("0"), 1);
  EXPECT_EQ(CountCpuList("0-3,8"), 5);
  EXPECT_EQ(CountCpuList("2,4-5,10-19"), 13);
  for (const char* none : {"", "a", "3-1", "1-2-3", "0,", "-1"}) EXPECT_EQ(CountCpuList(none), 0);
}

TEST(ReadCores, LimitsOfControlGroupAndStep_Count) {
  cpu_set_t set;
  ASSERT_EQ(sched_getaffinity(0, sizeof(set), &set), 0);
  const TestFolder folder;
  const Cores all = ReadCores({}, folder.path());
  EXPECT_EQ(all.of_process, CPU_COUNT(&set));
  EXPECT_GE(all.of_node, all.of_process);
  EXPECT_EQ(ReadCores({{"SLURM_CPUS_ON_NODE", "1"}}, folder.path()).of_node, 1);
  EXPECT_EQ(ReadCores({{"SLURM_CPUS_ON_NODE", "4096"}}, folder.path()).of_node, all.of_node);
  ASSERT_TRUE(MakeDirectories(folder.Path("sys/fs/cgroup")).ok());
  ASSERT_TRUE(WriteFileAtomically(folder.Path("sys/fs/cgroup/cpuset.cpus.effective"), "1\n").ok());
  EXPECT_EQ(ReadCores({}, folder.path()).of_node, 1);
  ASSERT_TRUE(RemoveTree(folder.Path("sys/fs/cgroup/cpuset.cpus.effective")).ok());
  for (const auto& [quota, cores] : {std::pair{"max 100000\n", all.of_node}, {"50000 100000", 1}}) {
    ASSERT_TRUE(WriteFileAtomically(folder.Path("sys/fs/cgroup/cpu.max"), quota).ok());
    EXPECT_EQ(ReadCores({}, folder.path()).of_node, cores) << quota;
  }
}

}  // namespace
}  // namespace muster
