#include "worker/job/device.h"

#include <cstdlib>

#include "c10/core/impl/FakeGuardImpl.h"
#include "gtest/gtest.h"
#include "worker/collective/nccl.h"

namespace muster {
namespace {

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
