#include "worker/job/device.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstdlib>
#include <vector>

#include "absl/status/status.h"
#include "c10/core/impl/FakeGuardImpl.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "worker/collective/nccl.h"
#include "worker/collective/thread_comm.h"

namespace {
int cuda_error = 0;
}

// Takes precedence over the runtime's function, which is looked up by name.
extern "C" int cudaGetDeviceCount(int* count) {
  *count = 0;
  if (cuda_error != 0) return cuda_error;
  const auto real = reinterpret_cast<int (*)(int*)>(dlsym(RTLD_NEXT, "cudaGetDeviceCount"));
  return real == nullptr ? 0 : real(count);
}

extern "C" int cudaDeviceGetPCIBusId(char* id, int length, int device) {
  std::snprintf(id, static_cast<size_t>(length), "0000:%02x:00.0", device);
  return 0;
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

// Returns the result of AgreeOnDevices() on each rank.
std::vector<absl::Status> Agreement(const std::vector<c10::Device>& devices,
                                    const std::vector<absl::Status>& usable) {
  std::vector<absl::Status> said(devices.size());
  RunRanks(static_cast<int>(devices.size()), [&](Comm& comm) {
    const auto rank = static_cast<size_t>(comm.rank());
    said[rank] = AgreeOnDevices(comm, devices[rank], usable[rank]);
  });
  return said;
}

const c10::Device kCpu(c10::kCPU);
c10::Device GpuNumber(c10::DeviceIndex index) { return {c10::kCUDA, index}; }

TEST(AgreeOnDevices, RanksOfOneKind_Agree) {
  const std::vector<absl::Status> usable(3);
  for (const auto& devices :
       {std::vector<c10::Device>{kCpu, kCpu, kCpu}, {GpuNumber(0), GpuNumber(1), GpuNumber(2)}}) {
    EXPECT_EQ(Agreement(devices, usable), usable);
  }
}

// NCCL would wait for it forever.
TEST(AgreeOnDevices, RankOnTheCpuBesideGpus_IsNamedOnEveryRank) {
  for (const absl::Status& said :
       Agreement({GpuNumber(0), GpuNumber(1), kCpu}, std::vector<absl::Status>(3))) {
    EXPECT_EQ(said.code(), absl::StatusCode::kFailedPrecondition);
    EXPECT_THAT(said.message(), HasSubstr("rank 2 ("));
    EXPECT_THAT(said.message(), HasSubstr(") is on the CPU and rank 0 ("));
    EXPECT_THAT(said.message(), HasSubstr("CUDA_VISIBLE_DEVICES"));
  }
}

TEST(AgreeOnDevices, RankWithoutThePlugin_IsNamedOnEveryOther) {
  const absl::Status missing = absl::NotFoundError("no plug-in\nin two lines");
  const std::vector<absl::Status> said =
      Agreement({GpuNumber(0), GpuNumber(1)}, {absl::OkStatus(), missing});
  EXPECT_EQ(said[1], missing);
  EXPECT_EQ(said[0].code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(said[0].message(), HasSubstr("rank 1 ("));
  EXPECT_THAT(said[0].message(),
              HasSubstr("cannot connect its GPU to the others: NOT_FOUND: no plug-in\nin two"));
}

TEST(AgreeOnDevices, TwoRanksOnOneGpu_AreNamed) {
  for (const absl::Status& said :
       Agreement({GpuNumber(0), GpuNumber(1), GpuNumber(0)}, std::vector<absl::Status>(3))) {
    EXPECT_EQ(said.code(), absl::StatusCode::kInvalidArgument);
    EXPECT_THAT(said.message(), HasSubstr("rank 0 ("));
    EXPECT_THAT(said.message(), HasSubstr(") and rank 2 ("));
    EXPECT_THAT(said.message(), HasSubstr(") are on one GPU: NCCL cannot share one"));
  }
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
