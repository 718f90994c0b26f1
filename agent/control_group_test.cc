#include "agent/control_group.h"

#include <string>
#include <vector>

#include "agent/fake_control_groups.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

class ControlGroupTest : public ::testing::Test {
 protected:
  void SetUp() override { FakeControlGroups::MakeRoot(root_.folder(), "cpu memory pids"); }

  const TestFolder folder_;
  const ControlGroup root_{folder_.Path("root"), FakeControlGroups::Calls()};
};

TEST(DescribeMemoryKillTest, Limit_IsToldFromTheMachine) {
  EXPECT_EQ(DescribeMemoryKill({.limit = 1 << 20, .peak = 1 << 20}), "");
  EXPECT_EQ(
      DescribeMemoryKill(
          {.limit = int64_t{16} << 30, .peak = int64_t{16} << 30, .limit_hits = 1, .kills = 2}),
      "for memory, because it reached its limit of 16.0 GiB; it had 16.0 GiB at most: give it a "
      "larger memory_per_process");
  // Linux before 5.19 has no memory.peak.
  EXPECT_EQ(DescribeMemoryKill({.limit = 1 << 20, .limit_hits = 1, .kills = 1}),
            "for memory, because it reached its limit of 1.00 MiB: give it a larger "
            "memory_per_process");
  EXPECT_EQ(DescribeMemoryKill({.limit = int64_t{16} << 30, .peak = int64_t{3} << 30, .kills = 1}),
            "for memory, which had run out on this machine; it had 3.00 GiB at most of its limit "
            "of 16.0 GiB");
  EXPECT_EQ(DescribeMemoryKill({.kills = 1}), "for memory, which had run out on this machine");
}

TEST_F(ControlGroupTest, Controllers_GoToTheGroupsBelow) {
  EXPECT_THAT(root_.Controllers(), ElementsAre("cpu", "memory", "pids"));
  ASSERT_TRUE(root_.Enable({"memory", "io"}).ok());
  const ControlGroup below = root_.Below("a");
  EXPECT_FALSE(below.Exists());
  ASSERT_TRUE(below.Make().ok());
  ASSERT_TRUE(below.Make().ok());
  EXPECT_THAT(below.Controllers(), ElementsAre("memory"));
  EXPECT_TRUE(below.Has("memory.max"));
  EXPECT_FALSE(below.Has("cpu.max"));
}

TEST_F(ControlGroupTest, GroupWithProcesses_GivesNoControllers_AndTheyAreNamed) {
  FakeControlGroups::Put(root_.folder() + "/cgroup.procs", "12\n13\n");
  ASSERT_TRUE(RemoveTree(root_.folder() + "/cgroup.subtree_control").ok());
  EXPECT_THAT(
      root_.Enable({"memory"}).message(),
      AllOf(HasSubstr("cannot write +memory to " + root_.folder() + "/cgroup.subtree_control"),
            HasSubstr("processes 12, 13 are in it")));
}

TEST_F(ControlGroupTest, Processes_AreThoseBelow_Too) {
  ASSERT_TRUE(root_.Below("a").Make().ok());
  ASSERT_TRUE(root_.Below("a").Below("b").Make().ok());
  FakeControlGroups::Put(root_.folder() + "/a/b/cgroup.procs", "7\n");
  FakeControlGroups::Put(root_.folder() + "/cgroup.procs", "5\n");
  EXPECT_THAT(root_.Processes(), ElementsAre(5, 7));
  EXPECT_THAT(root_.Below("c").Processes(), IsEmpty());
}

TEST_F(ControlGroupTest, End_KillsAndWaitsAndRemovesTheTree) {
  const ControlGroup group = root_.Below("a");
  ASSERT_TRUE(group.Make().ok());
  ASSERT_TRUE(group.Below("b").Make().ok());
  FakeControlGroups::Put(group.folder() + "/cgroup.events", "populated 1\n");
  FakeControlGroups::Put(group.folder() + "/cgroup.procs", "9\n");
  EXPECT_TRUE(group.IsPopulated());
  group.Kill();
  EXPECT_EQ(FakeControlGroups::Get(group.folder() + "/cgroup.kill"), "1");
  const absl::Status late = group.AwaitEmpty(absl::Milliseconds(1));
  EXPECT_EQ(late.code(), absl::StatusCode::kDeadlineExceeded);
  EXPECT_THAT(late.message(), HasSubstr("processes 9 of the control group"));
  const absl::Status busy = group.Remove();
  EXPECT_EQ(busy.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(busy.message(), HasSubstr("processes 9 are in it"));
  FakeControlGroups::Put(group.folder() + "/cgroup.events", "populated 0\n");
  EXPECT_TRUE(group.AwaitEmpty(absl::ZeroDuration()).ok());
  EXPECT_TRUE(group.Remove().ok());
  EXPECT_FALSE(group.Exists());
  // A group that does not exist is empty, and can be removed.
  EXPECT_FALSE(group.IsPopulated());
  EXPECT_TRUE(group.AwaitEmpty(absl::ZeroDuration()).ok());
  EXPECT_TRUE(group.Remove().ok());
}

TEST_F(ControlGroupTest, KernelWithoutKill_LeavesItToOthers) {
  ASSERT_TRUE(RemoveTree(root_.folder() + "/cgroup.kill").ok());
  root_.Kill();
  EXPECT_FALSE(root_.Has("cgroup.kill"));
}

TEST_F(ControlGroupTest, Memory_IsReadAsTheKernelWritesIt) {
  ASSERT_TRUE(root_.Enable({"memory"}).ok());
  const ControlGroup group = root_.Below("a");
  ASSERT_TRUE(group.Make().ok());
  EXPECT_EQ(group.Memory().limit, -1);
  FakeControlGroups::Put(group.folder() + "/memory.max", "1048576\n");
  FakeControlGroups::Put(group.folder() + "/memory.peak", "1044480\n");
  FakeControlGroups::Put(group.folder() + "/memory.events",
                         "low 0\nhigh 0\nmax 31\noom 2\noom_kill 3\noom_group_kill 1\n");
  const MemoryUse use = group.Memory();
  EXPECT_EQ(use.limit, 1 << 20);
  EXPECT_EQ(use.peak, 1044480);
  EXPECT_EQ(use.limit_hits, 2);
  EXPECT_EQ(use.kills, 3);
  ASSERT_TRUE(RemoveTree(group.folder() + "/memory.peak").ok());
  EXPECT_EQ(group.Memory().peak, -1);
}

TEST_F(ControlGroupTest, Errors_NameTheFile) {
  const ControlGroup none = root_.Below("a").Below("b");
  EXPECT_THAT(none.Make().message(), HasSubstr("a/b"));
  EXPECT_THAT(none.Enter().message(), HasSubstr("a/b/cgroup.procs"));
  EXPECT_THAT(none.Open().status().message(), HasSubstr("the control group "));
  EXPECT_THAT(none.Write("memory.max", "1").message(), Not(IsEmpty()));
}

}  // namespace
}  // namespace muster::agent
