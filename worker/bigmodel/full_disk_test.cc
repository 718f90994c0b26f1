// A disk that fails at any moment while weights in memory are offloaded to it: before each call
// that makes a folder or a file, writes, syncs or renames. The error is one line that names the
// folder, nothing is left behind, and the model computes as before.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cerrno>
#include <cstdio>
#include <cstring>
#include <string>

#include "ATen/Functions.h"
#include "ATen/core/grad_mode.h"
#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_failing_disk.h"
#include "base/test_folder.h"
#include "worker/bigmodel/dispatch.h"
#include "worker/bigmodel/test_nets.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

at::Tensor Compute(const TextNet& net) {
  const at::NoGradGuard no_grad;
  return TextNet(net)->forward(at::arange(24).view({2, 12}));
}

struct Kind {
  const char* name;
  int error;
  bool lasts;
  const char* folder;  // below the disk
};

class FullDiskTest : public testing::TestWithParam<Kind> {
 protected:
  FullDiskTest() { EXPECT_TRUE(MakeDirectories(disk_).ok()); }
  ~FullDiskTest() override { disk_fault.Disarm(); }

  const TestFolder test_folder_;
  const std::string disk_ = test_folder_.Path("failing_disk");
};

TEST_P(FullDiskTest, AnyMoment_IsOneLineAboutTheFolder_AndNothingStaysBehind) {
  const Kind& kind = GetParam();
  const std::string folder = absl::StrCat(disk_, kind.folder);
  disk_fault.error = kind.error;
  disk_fault.lasts = kind.lasts;
  int moments = 0;
  for (long at = 1;; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, 100);
    const TextNet net(50, 64, 2);
    const at::Tensor expected = Compute(net);
    disk_fault.Arm(at);
    const auto offloaded = DiskOffload(*TextNet(net), folder, at::kCPU);
    disk_fault.Disarm();
    EXPECT_TRUE(at::equal(Compute(net), expected));
    if (!disk_fault.fired) {
      ASSERT_TRUE(offloaded.ok()) << offloaded.status();
      EXPECT_THAT(*ListDirectory(folder), ElementsAre("offload.safetensors"));
      break;
    }
    ++moments;
    ASSERT_FALSE(offloaded.ok());
    EXPECT_THAT(std::string(offloaded.status().message()),
                AllOf(HasSubstr(absl::StrCat("to ", folder)), HasSubstr(std::strerror(kind.error)),
                      HasSubstr("name another folder"), Not(HasSubstr("\n"))));
    EXPECT_THAT(*ListDirectory(disk_), IsEmpty());
  }
  std::printf("%s: %d moments\n", kind.name, moments);
  // A file is created, written, synced and renamed.
  EXPECT_GE(moments, 4);
}

INSTANTIATE_TEST_SUITE_P(Disks, FullDiskTest,
                         testing::Values(Kind{"FullFromThenOn", ENOSPC, true, ""},
                                         Kind{"FullForAMoment", ENOSPC, false, ""},
                                         Kind{"FullBeforeItsFolders", ENOSPC, true, "/new/deep"},
                                         Kind{"FullQuota", EDQUOT, true, "/new"},
                                         Kind{"ReadOnlyFromThenOn", EROFS, true, "/new"},
                                         Kind{"FailsOnce", EIO, false, "/new/deep"}),
                         [](const auto& info) { return std::string(info.param.name); });

TEST_F(FullDiskTest, FileOfAnEarlierModel_StaysInUse) {
  const TextNet before(50, 64, 2), next(50, 64, 2);
  const at::Tensor expected = Compute(before);
  const auto first = DiskOffload(*TextNet(before), disk_, at::kCPU);
  ASSERT_TRUE(first.ok()) << first.status();
  const std::string path = JoinPath(disk_, "offload.safetensors");
  const std::string bytes = *ReadFile(path);
  disk_fault.error = ENOSPC;
  disk_fault.lasts = true;
  for (long at = 1;; ++at) {
    SCOPED_TRACE(at);
    ASSERT_LT(at, 100);
    disk_fault.Arm(at);
    const auto second = DiskOffload(*TextNet(next), disk_, at::kCPU);
    disk_fault.Disarm();
    EXPECT_THAT(*ListDirectory(disk_), ElementsAre("offload.safetensors"));
    EXPECT_TRUE(at::equal(Compute(before), expected));
    if (!disk_fault.fired) {
      ASSERT_TRUE(second.ok()) << second.status();
      EXPECT_NE(*ReadFile(path), bytes);
      break;
    }
    EXPECT_FALSE(second.ok());
    EXPECT_EQ(*ReadFile(path), bytes);
  }
}

// A failure after the file exists.
TEST_F(FullDiskTest, RingThatIsTooSmall_LeavesNothingBehind) {
  const TextNet net(50, 64, 2);
  const auto offloaded =
      DiskOffload(*TextNet(net), absl::StrCat(disk_, "/new/deep"), at::kCPU, {.ring_bytes = 1});
  EXPECT_EQ(offloaded.status().code(), absl::StatusCode::kInvalidArgument) << offloaded.status();
  EXPECT_THAT(*ListDirectory(disk_), IsEmpty());
}

}  // namespace
}  // namespace muster
