#include "worker/bigmodel/max_memory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <string>

#include "worker/bigmodel/fake_gpus.h"

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

// As that of a Jetson or a DGX Spark.
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
