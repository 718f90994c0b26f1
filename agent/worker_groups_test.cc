#include "agent/worker_groups.h"

#include <unistd.h>

#include <optional>
#include <string>

#include "absl/strings/str_cat.h"
#include "agent/fake_control_groups.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::HasSubstr;
using ::testing::Optional;

class WorkerGroupsTest : public ::testing::Test {
 protected:
  // Returns groups with these controllers enabled for the groups of workers.
  WorkerGroups Groups(const std::string& controllers, int64_t memory_bytes, int cpus) {
    FakeControlGroups::MakeRoot(root_, controllers);
    const ControlGroup attempt(root_, FakeControlGroups::Calls());
    EXPECT_TRUE(attempt.Enable(attempt.Controllers()).ok());
    EXPECT_TRUE(attempt.Below("runner").Make().ok());
    return WorkerGroups({.folder = root_,
                         .memory_bytes = memory_bytes,
                         .cpus = cpus,
                         .calls = FakeControlGroups::Calls()});
  }
  std::string Get(const std::string& file) { return FakeControlGroups::Get(root_ + "/" + file); }
  void Put(const std::string& file, const std::string& text) {
    FakeControlGroups::Put(root_ + "/" + file, text);
  }

  const TestFolder folder_;
  const std::string root_ = folder_.Path("attempt");
};

TEST_F(WorkerGroupsTest, EachWorker_HasItsLimits) {
  const WorkerGroups groups = Groups("cpu memory", int64_t{3} << 30, /*cpus=*/2);
  ASSERT_TRUE(groups.Enter().ok());
  EXPECT_EQ(Get("runner/cgroup.procs"), "0");
  ASSERT_TRUE(groups.Make(4).ok());
  EXPECT_EQ(Get("rank_4/memory.max"), "3221225472");
  EXPECT_EQ(Get("rank_4/memory.swap.max"), "0");
  EXPECT_EQ(Get("rank_4/memory.oom.group"), "1");
  EXPECT_EQ(Get("rank_4/cpu.max"), "200000 100000");
}

TEST_F(WorkerGroupsTest, RunnerThatItsAgentHasMoved_StaysWhereItIs) {
  const WorkerGroups groups = Groups("", 0, 0);
  WorkerGroups::TakeRunner(ControlGroup(root_, FakeControlGroups::Calls()), getpid());
  EXPECT_EQ(Get("runner/cgroup.procs"), absl::StrCat(getpid()));
  ASSERT_TRUE(groups.Enter().ok());
  EXPECT_EQ(Get("runner/cgroup.procs"), absl::StrCat(getpid())) << "not written again";
  // A runner that is gone is not an error of the agent.
  WorkerGroups::TakeRunner(ControlGroup(folder_.Path("missing")), getpid());
}

TEST_F(WorkerGroupsTest, WithoutLimits_TheKernelsStay) {
  const WorkerGroups groups = Groups("cpu memory", 0, 0);
  ASSERT_TRUE(groups.Make(0).ok());
  EXPECT_EQ(Get("rank_0/memory.max"), "max\n");
  EXPECT_EQ(Get("rank_0/memory.swap.max"), "max\n");
  EXPECT_EQ(Get("rank_0/memory.oom.group"), "1");
  EXPECT_EQ(Get("rank_0/cpu.max"), "max 100000\n");
}

TEST_F(WorkerGroupsTest, LimitThatCannotBeSet_IsAnError) {
  const WorkerGroups groups = Groups("cpu", 1 << 20, 0);
  EXPECT_THAT(groups.Make(0).status().message(), HasSubstr("rank_0/memory.max"));
}

TEST_F(WorkerGroupsTest, MemoryKill_IsThatOfThisStart) {
  const WorkerGroups groups = Groups("memory", 1 << 20, 0);
  ASSERT_TRUE(groups.Make(0).ok());
  EXPECT_THAT(groups.MemoryKill(0), Optional(std::string()));
  Put("rank_0/memory.events", "oom 1\noom_kill 1\n");
  Put("rank_0/memory.peak", "1048576\n");
  EXPECT_THAT(groups.MemoryKill(0),
              Optional(HasSubstr("reached its limit of 1.00 MiB; it had 1.00 MiB at most")));
  ASSERT_TRUE(groups.Make(0).ok());
  EXPECT_THAT(groups.MemoryKill(0), Optional(std::string()));
}

TEST_F(WorkerGroupsTest, GroupThatCountsNoMemory_SaysNothing) {
  const WorkerGroups groups = Groups("", 0, 0);
  ASSERT_TRUE(groups.Make(0).ok());
  EXPECT_EQ(groups.MemoryKill(0), std::nullopt);
}

TEST_F(WorkerGroupsTest, End_RemovesTheGroupsOfWorkersOnly) {
  const WorkerGroups groups = Groups("memory", 0, 0);
  ASSERT_TRUE(groups.Make(0).ok());
  ASSERT_TRUE(groups.Make(1).ok());
  groups.End();
  EXPECT_FALSE(PathExists(root_ + "/rank_0"));
  EXPECT_FALSE(PathExists(root_ + "/rank_1"));
  EXPECT_TRUE(PathExists(root_ + "/runner"));
}

}  // namespace
}  // namespace muster::agent
