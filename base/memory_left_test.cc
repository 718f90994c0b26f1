#include "base/memory_left.h"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>

#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

constexpr char kV1[] = "/sys/fs/cgroup/memory/";
constexpr char kV2[] = "/sys/fs/cgroup/";

class MemoryLeftTest : public testing::Test {
 protected:
  void Put(const std::string& path, const std::string& text) {
    const std::string file = folder_.path() + path;
    ASSERT_TRUE(MakeDirectories(file.substr(0, file.rfind('/'))).ok());
    ASSERT_TRUE(WriteFileAtomically(file, text).ok());
  }
  void PutV2(const std::string& group, const std::string& limit, const std::string& used) {
    Put(kV2 + group + "memory.max", limit + "\n");
    Put(kV2 + group + "memory.current", used + "\n");
  }
  size_t Left() const { return MemoryLeft(folder_.path()); }

  const TestFolder folder_;
};

TEST_F(MemoryLeftTest, NothingKnown_IsUnknown) { EXPECT_EQ(Left(), SIZE_MAX); }

TEST_F(MemoryLeftTest, Machine_IsWhatIsAvailable) {
  Put("/proc/meminfo", "MemTotal:  200 kB\nMemAvailable:     100 kB\n");
  EXPECT_EQ(Left(), 100u * 1024);
  PutV2("", "max", "10");
  EXPECT_EQ(Left(), 100u * 1024);
}

TEST_F(MemoryLeftTest, GroupOfAContainer_CountsWithoutItsPageCache) {
  Put("/proc/meminfo", "MemAvailable:  1000 kB\n");
  PutV2("", "5000", "4000");
  EXPECT_EQ(Left(), 1000u);
  Put("/sys/fs/cgroup/memory.stat", "anon 900\nfile 3000\nfile_mapped 9\nshmem 500\n");
  EXPECT_EQ(Left(), 3500u);
}

TEST_F(MemoryLeftTest, GroupsAboveTheProcess_AllCount) {
  Put("/proc/meminfo", "MemAvailable:  1000 kB\n");
  Put("/proc/self/cgroup", "0::/slurm/job_1/step_0\n");
  PutV2("slurm/job_1/step_0/", "max", "10");
  EXPECT_EQ(Left(), 1000u * 1024);
  PutV2("slurm/job_1/", "900", "100");
  EXPECT_EQ(Left(), 800u);
  PutV2("slurm/job_1/step_0/", "70", "10");
  EXPECT_EQ(Left(), 60u);
  PutV2("slurm/", "100", "95");
  EXPECT_EQ(Left(), 5u);
  PutV2("slurm/", "100", "101");
  EXPECT_EQ(Left(), 0u);
}

TEST_F(MemoryLeftTest, MoreCacheThanIsUsed_IsNoMoreThanTheLimit) {
  Put("/proc/meminfo", "MemAvailable:  1000 kB\n");
  // The first version's value for no limit.
  Put(kV1 + std::string("memory.limit_in_bytes"), "9223372036854771712\n");
  Put(kV1 + std::string("memory.usage_in_bytes"), "4096\n");
  Put(kV1 + std::string("memory.stat"), "total_cache 1048576\ntotal_shmem 0\n");
  EXPECT_EQ(Left(), 1000u * 1024);
  PutV2("", "5000", "4000");
  Put("/sys/fs/cgroup/memory.stat", "file 9000\nshmem 0\n");
  EXPECT_EQ(Left(), 5000u);
}

TEST_F(MemoryLeftTest, FirstVersion_IsReadWhereItControlsMemory) {
  Put("/proc/self/cgroup", "5:cpu,memory:/a:b/c\n4:pids:/other\n0::/\n");
  Put("/proc/meminfo", "MemAvailable:  1000 kB\n");
  Put(kV1 + std::string("memory.limit_in_bytes"), "9223372036854771712\n");
  Put(kV1 + std::string("memory.usage_in_bytes"), "77\n");
  EXPECT_EQ(Left(), 1000u * 1024);
  Put(kV1 + std::string("a:b/memory.limit_in_bytes"), "500\n");
  Put(kV1 + std::string("a:b/memory.usage_in_bytes"), "400\n");
  Put(kV1 + std::string("a:b/memory.stat"), "cache 1\ntotal_cache 50\ntotal_shmem 20\n");
  EXPECT_EQ(Left(), 130u);
}

}  // namespace
}  // namespace muster
