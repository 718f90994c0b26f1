#include "worker/process/nccl.h"

#include "c10/core/impl/FakeGuardImpl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/process/process_group.h"

// What a machine without a GPU must say; the bodies that need one are in the test of the plug-in on
// such a machine.
namespace muster {
namespace {

using ::testing::HasSubstr;

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

TEST(AddNcclBackend, WithoutGpu_SaysSo) {
  setenv("CUDA_VISIBLE_DEVICES", "", 1);
  auto store = c10::make_intrusive<c10d::HashStore>();
  auto group = MakeGlooGroup(store, {});
  const absl::Status status =
      AddNcclBackend(group, store, c10::Device(c10::kCUDA, 0), std::chrono::minutes(1));
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("no GPU is visible"));
  EXPECT_EQ(group->getBackendName(), "gloo") << "the group stays as it was";
  EXPECT_EQ(AddNcclBackend(group, store, c10::Device(c10::kCPU), std::chrono::minutes(1)).code(),
            absl::StatusCode::kInvalidArgument);
  EXPECT_FALSE(NcclVersion().ok());
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
