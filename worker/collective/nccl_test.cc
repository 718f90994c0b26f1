#include "worker/collective/nccl.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "torch/csrc/distributed/c10d/HashStore.hpp"
#include "torch/csrc/distributed/c10d/ProcessGroup.hpp"
#include "worker/collective/process_group.h"

// The errors on a machine without a GPU; the functions that need one are tested with the plug-in on
// such a machine.
namespace muster {
namespace {

using ::testing::HasSubstr;

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

}  // namespace
}  // namespace muster
