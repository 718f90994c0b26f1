#include "worker/job/device.h"

#include <dlfcn.h>

#include <cstdlib>

#include "c10/core/impl/FakeGuardImpl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/nccl.h"

namespace {
int cuda_error = 0;
}

// In front of the runtime's, which is looked up by name.
extern "C" int cudaGetDeviceCount(int* count) {
  *count = 0;
  if (cuda_error != 0) return cuda_error;
  const auto real = reinterpret_cast<int (*)(int*)>(dlsym(RTLD_NEXT, "cudaGetDeviceCount"));
  return real == nullptr ? 0 : real(count);
}

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(ChooseDevice, DriverThatFails_IsWarnedOfOnceOnANode) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  Environment env;
  testing::internal::CaptureStderr();
  EXPECT_EQ(ChooseDevice(env).value(), c10::Device(c10::kCPU));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  EXPECT_EQ(WhyNoGpu(), "no GPU is visible");
  cuda_error = 802;
  EXPECT_THAT(WhyNoGpu(), HasSubstr("CUDA error 802: system not yet initialized"));
  testing::internal::CaptureStderr();
  EXPECT_EQ(ChooseDevice(env).value(), c10::Device(c10::kCPU));
  EXPECT_THAT(testing::internal::GetCapturedStderr(),
              HasSubstr("no GPU of this machine is usable, so its processes train on the CPU: CUDA "
                        "error 802"));
  env.local_rank = {1, "LOCAL_RANK"};
  env.local_world_size = {2, "LOCAL_WORLD_SIZE"};
  testing::internal::CaptureStderr();
  EXPECT_EQ(ChooseDevice(env).value(), c10::Device(c10::kCPU));
  EXPECT_EQ(testing::internal::GetCapturedStderr(), "");
  cuda_error = 0;
}

TEST(ChooseDevice, CpuWhenAsked) {
  Environment env;
  env.use_cpu = {true, "argument"};
  EXPECT_EQ(ChooseDevice(env).value(), c10::Device(c10::kCPU));
}

TEST(ChooseDevice, D28_SeveralProcessesWithoutGpu_AreOneJobOnTheCpu) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  ASSERT_EQ(VisibleGpus(), 0);
  Environment env;
  env.world_size = {4, "WORLD_SIZE"};
  env.local_world_size = {4, "LOCAL_WORLD_SIZE"};
  EXPECT_EQ(ChooseDevice(env).value(), c10::Device(c10::kCPU));
}

using FakeGpus = c10::impl::FakeGuardImpl<c10::DeviceType::CUDA>;
const FakeGpus fake_gpus;

TEST(MakeCurrent, NumberedGpu_BecomesTheCurrentOne) {
  const c10::impl::DeviceGuardImplRegistrar registrar(c10::DeviceType::CUDA, &fake_gpus);
  FakeGpus::setDeviceIndex(0);
  MakeCurrent(c10::Device(c10::kCPU));
  EXPECT_EQ(FakeGpus::getDeviceIndex(), 0);
  MakeCurrent(c10::Device(c10::kCUDA, 3));
  EXPECT_EQ(FakeGpus::getDeviceIndex(), 3);
}

}  // namespace
}  // namespace muster
