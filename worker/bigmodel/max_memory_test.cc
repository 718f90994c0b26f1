#include "worker/bigmodel/max_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cstdint>
#include <string>

#include "base/file.h"
#include "base/test_system_calls.h"
#include "worker/bigmodel/fake_gpus.h"

namespace muster {
namespace {

// The page size that the system reports; 0: the true one.
int64_t page_bytes = 0;

}  // namespace
}  // namespace muster

// The program's own sysconf(), in place of the C library's.
extern "C" int64_t sysconf(int name) noexcept {
  static const auto real = muster::RealCall<int64_t (*)(int)>("sysconf");
  return name == _SC_PAGESIZE && muster::page_bytes > 0 ? muster::page_bytes : real(name);
}

namespace muster {
namespace {

using ::testing::HasSubstr;

double Host() { return GetMaxMemory().back().second; }

TEST(GetMaxMemory, Host_IsThere) {
  const DeviceLimits limits = GetMaxMemory();
  EXPECT_EQ(limits.back().first, "cpu");
  EXPECT_EQ(static_cast<int>(limits.size()), CountGpus() + 1);
  EXPECT_GT(Host(), 1e6);
}

TEST(GetMaxMemory, LimitOfTheProcess_Counts) {
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_DATA, &before), 0);
  const rlimit small = {.rlim_cur = rlim_t{1} << 30, .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &small), 0);
  const double host = Host();
  ASSERT_EQ(setrlimit(RLIMIT_DATA, &before), 0);
  EXPECT_LT(host, double{1 << 30});
}

// Like ARM kernels with large pages, which /proc/self/statm counts.
TEST(GetMaxMemory, PagesOfAnySize_Count) {
  const std::string pages = *ReadFile("/proc/self/statm", 256);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_AS, &before), 0);
  // For pages of 4 KiB there is more than enough.
  const rlimit small = {.rlim_cur = 2 * std::stoull(pages) * 4096 + (rlim_t{1} << 30),
                        .rlim_max = before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_AS, &small), 0);
  const double with_small_pages = Host();
  page_bytes = 1 << 20;
  const double with_large_pages = Host();
  page_bytes = 0;
  ASSERT_EQ(setrlimit(RLIMIT_AS, &before), 0);
  EXPECT_GT(with_small_pages, 1e6);
  EXPECT_EQ(with_large_pages, 0);
}

// Like the GPU of a Jetson or a DGX Spark.
TEST(GetMaxMemory, GpuThatSharesTheHostsMemory_CountsItOnce) {
  InstallFakeGpus();
  SetGpusAreIntegratedForTest(true);
  const DeviceLimits shared = GetMaxMemory();
  SetGpusAreIntegratedForTest(false);
  ASSERT_EQ(static_cast<int>(shared.size()), kFakeGpus);
  EXPECT_EQ(shared.back().first, std::to_string(kFakeGpus - 1));
  EXPECT_EQ(GetMaxMemory().back().first, "cpu");
}

TEST(CheckDevicesAreThere, DeviceThatIsNot_IsNamed) {
  EXPECT_TRUE(CheckDevicesAreThere(DeviceLimits{{"cpu", 1}, {"disk", 1}}).ok());
  const absl::Status status = CheckDevicesAreThere(DeviceEntries{{"", "117"}});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("device 117 does not exist"));
}

}  // namespace
}  // namespace muster
