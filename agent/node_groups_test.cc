#include "agent/node_groups.h"

#include <signal.h>

#include <cstdio>
#include <memory>
#include <string>
#include <utility>

#include "absl/strings/match.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/string_view.h"
#include "agent/fake_control_groups.h"
#include "agent/process.h"
#include "agent/worker_groups.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr char kUnified[] =
    "24 1 254:1 / / rw,relatime shared:1 - ext4 /dev/vda1 rw\n"
    "31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate\n";

TEST(FindOwnGroupTest, Folder_IsTheMountAndThePath) {
  const auto service = FindOwnGroup("0::/system.slice/a.service\n", kUnified);
  ASSERT_TRUE(service.ok());
  EXPECT_EQ(service->path, "/system.slice/a.service");
  EXPECT_EQ(service->folder(), "/sys/fs/cgroup/system.slice/a.service");
  EXPECT_EQ(FindOwnGroup("0::/\n", kUnified)->folder(), "/sys/fs/cgroup");
  // A tree beside cgroup v1.
  const std::string hybrid =
      "31 24 0:27 / /sys/fs/cgroup/memory rw - cgroup cgroup rw,memory\n"
      "32 24 0:28 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw\n";
  EXPECT_EQ(FindOwnGroup("4:memory:/x\n0::/y\n", hybrid)->folder(), "/sys/fs/cgroup/unified/y");
}

TEST(FindOwnGroupTest, PartThatIsMountedAlone_IsTheTree) {
  const std::string part = "31 24 0:27 /docker/7 /my\\040groups rw - cgroup2 cgroup rw\n";
  EXPECT_EQ(FindOwnGroup("0::/docker/7\n", part)->folder(), "/my groups");
  EXPECT_EQ(FindOwnGroup("0::/docker/7/a\n", part)->folder(), "/my groups/a");
  EXPECT_FALSE(FindOwnGroup("0::/docker/77\n", part).ok());
}

TEST(FindOwnGroupTest, WithoutOne_IsSaid) {
  for (const char* cgroup : {"", "4:memory:/x\n", "0::/../outside\n", "\xff\n0:\n"}) {
    EXPECT_THAT(FindOwnGroup(cgroup, kUnified).status().message(), HasSubstr("has no cgroup v2"));
  }
  EXPECT_FALSE(FindOwnGroup("0::/\n", "").ok());
  EXPECT_FALSE(FindOwnGroup("0::/\n", "1 2 - cgroup2 x\n - cgroup2 \n").ok());
}

// A tree in which the test chooses this process's group.
class NodeGroupsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    FakeControlGroups::MakeRoot(tree_, controllers_);
    ASSERT_TRUE(MakeDirectories(options_.proc).ok());
    FakeControlGroups::Put(options_.proc + "/mountinfo",
                           absl::StrCat("1 0 0:1 / ", tree_, " rw - cgroup2 cgroup2 rw\n"));
    Be("/box");
  }
  // Puts this process into a group that has these controllers.
  void Be(const std::string& path, const std::string& controllers = "cpu memory pids") {
    FakeControlGroups::Put(options_.proc + "/cgroup", absl::StrCat("0::", path, "\n"));
    own_ = tree_ + path;
    ASSERT_TRUE(MakeDirectories(ParentPath(own_)).ok());
    FakeControlGroups::MakeRoot(own_, controllers);
  }
  absl::StatusOr<NodeGroups> Open() { return NodeGroups::Open(options_); }
  std::string Own(const std::string& file) { return FakeControlGroups::Get(own_ + "/" + file); }

  const TestFolder folder_;
  const std::string tree_ = folder_.Path("tree");
  const std::string controllers_ = "cpu memory pids";
  std::string own_;
  NodeGroupsOptions options_ = {.node_uid = "7f",
                                .proc = folder_.Path("proc"),
                                .systemd = folder_.Path("no systemd"),
                                .root = false,
                                .calls = FakeControlGroups::Calls()};
};

TEST_F(NodeGroupsTest, Limits_MoveTheAgentOutOfTheWay) {
  const auto groups = Open();
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_TRUE(groups->used());
  EXPECT_TRUE(groups->limits_memory());
  EXPECT_FALSE(groups->limits_cpus());
  EXPECT_EQ(groups->why(), "");
  EXPECT_EQ(groups->ToString(), absl::StrCat("control groups with limits of memory in ", own_));
  EXPECT_EQ(Own("agent/cgroup.procs"), "0");
  EXPECT_EQ(Own("cgroup.subtree_control"), "+memory +cpu");
}

TEST_F(NodeGroupsTest, Attempt_HasAGroupWithAShareOfTheCpus) {
  auto groups = Open();
  ASSERT_TRUE(groups.ok());
  const auto folder = groups->MakeAttempt("job-1.1-ab", /*cpus=*/8);
  ASSERT_TRUE(folder.ok()) << folder.status();
  EXPECT_EQ(*folder, own_ + "/muster-7f/job-1.1-ab");
  EXPECT_EQ(FakeControlGroups::Get(*folder + "/cpu.weight"), "80");
  EXPECT_EQ(FakeControlGroups::Get(*folder + "/cgroup.subtree_control"), "+memory +cpu");
  EXPECT_TRUE(PathExists(*folder + "/runner/memory.max"));
  const auto large = groups->MakeAttempt("job-2.1-ab", /*cpus=*/100'000);
  EXPECT_EQ(FakeControlGroups::Get(*large + "/cpu.weight"), "10000");
}

// systemd could start no agent in a group that gives controllers to groups below it.
TEST_F(NodeGroupsTest, Service_HasGroupsWithoutLimits) {
  Be("/system.slice/muster-agent.service");
  auto groups = Open();
  ASSERT_TRUE(groups.ok());
  EXPECT_TRUE(groups->used());
  EXPECT_FALSE(groups->limits_memory());
  EXPECT_THAT(groups->why(), AllOf(HasSubstr("the group of a service"), HasSubstr("--control_gr")));
  const auto folder = groups->MakeAttempt("job-1.1-ab", 1);
  ASSERT_TRUE(folder.ok());
  EXPECT_TRUE(PathExists(*folder + "/runner"));
  EXPECT_EQ(Own("cgroup.subtree_control"), "");
  EXPECT_FALSE(PathExists(own_ + "/agent"));
  // A scope is made for one start.
  Be("/user.slice/user@7.service/app.slice/run-1.scope");
  EXPECT_TRUE(Open()->limits_memory());
}

TEST_F(NodeGroupsTest, NamedGroup_IsForJobsAlone) {
  Be("/muster.slice/muster-agent.service");
  options_.where = tree_ + "/muster.slice/muster-jobs.service";
  FakeControlGroups::MakeRoot(options_.where, "memory cpu");
  FakeControlGroups::MakeRoot(tree_ + "/muster.slice/x", "");
  FakeControlGroups::Put(tree_ + "/muster.slice/cgroup.procs", "");
  options_.limit_cpus = true;
  auto groups = Open();
  ASSERT_TRUE(groups.ok()) << groups.status();
  EXPECT_TRUE(groups->limits_memory());
  EXPECT_TRUE(groups->limits_cpus());
  EXPECT_FALSE(PathExists(options_.where + "/agent"));
  EXPECT_EQ(*groups->MakeAttempt("a", 1), options_.where + "/muster-7f/a");
}

TEST_F(NodeGroupsTest, NamedGroupThatCannotBeUsed_IsRefused) {
  options_.where = tree_ + "/nothing";
  EXPECT_EQ(Open().status().code(), absl::StatusCode::kNotFound);
  FakeControlGroups::MakeRoot(options_.where, "cpu");
  EXPECT_THAT(Open().status().message(), HasSubstr("has no memory controller"));
  FakeControlGroups::MakeRoot(options_.where, "memory");
  options_.limit_cpus = true;
  EXPECT_THAT(Open().status().message(), HasSubstr("has no cpu controller"));
  // The folder above both, through which a process would move, belongs to another user.
  options_.limit_cpus = false;
  ASSERT_TRUE(RemoveTree(tree_ + "/cgroup.procs").ok());
  EXPECT_THAT(Open().status().message(), AllOf(HasSubstr("may not move a process from " + own_),
                                               HasSubstr(tree_ + "/cgroup.procs")));
}

TEST_F(NodeGroupsTest, WithoutTheController_GroupsAreForTheEndOnly) {
  Be("/box2", "cpu pids");
  const auto groups = Open();
  ASSERT_TRUE(groups.ok());
  EXPECT_TRUE(groups->used());
  EXPECT_FALSE(groups->limits_memory());
  EXPECT_THAT(groups->why(), HasSubstr("has no memory controller"));
}

TEST_F(NodeGroupsTest, GroupsOfOthers_AreLeftAlone) {
  options_.root = true;
  options_.systemd = folder_.path();
  EXPECT_THAT(Open()->ToString(),
              AllOf(HasSubstr("no control groups: "), HasSubstr("belongs to systemd")));
  EXPECT_FALSE(PathExists(own_ + "/muster-7f"));
}

TEST_F(NodeGroupsTest, Off_And_NoTree_MakeNothing) {
  options_.where = "off";
  auto off = Open();
  ASSERT_TRUE(off.ok());
  EXPECT_FALSE(off->used());
  EXPECT_THAT(off->why(), HasSubstr("--control_groups off"));
  EXPECT_EQ(*off->MakeAttempt("a", 1), "");
  options_.where = "auto";
  FakeControlGroups::Put(options_.proc + "/mountinfo", "");
  EXPECT_THAT(Open()->why(), HasSubstr("has no cgroup v2"));
}

TEST_F(NodeGroupsTest, ProcessesInTheWay_AreWaitedFor) {
  ASSERT_TRUE(RemoveTree(own_ + "/cgroup.subtree_control").ok());
  FakeControlGroups::Put(own_ + "/cgroup.procs", "12\n");
  auto groups = Open();
  ASSERT_TRUE(groups.ok());
  EXPECT_FALSE(groups->limits_memory());
  EXPECT_THAT(groups->why(), HasSubstr("processes 12"));
  FakeControlGroups::Put(own_ + "/cgroup.subtree_control", "");
  ASSERT_TRUE(groups->MakeAttempt("a", 1).ok());
  EXPECT_TRUE(groups->limits_memory());
  EXPECT_EQ(groups->why(), "");
}

TEST_F(NodeGroupsTest, Sweep_RemovesWhatAKilledAgentHasLeft) {
  {
    auto killed = Open();
    ASSERT_TRUE(killed->MakeAttempt("runs", 1).ok());
    ASSERT_TRUE(killed->MakeAttempt("ended", 1).ok());
  }
  const auto groups = Open();
  groups->Sweep({own_ + "/muster-7f/runs"});
  EXPECT_TRUE(PathExists(own_ + "/muster-7f/runs/runner"));
  EXPECT_FALSE(PathExists(own_ + "/muster-7f/ended"));
}

// Uses the groups of this machine, as far as it allows that.
TEST(RealNodeGroupsTest, Worker_RunsInItsGroup_AndNothingOfItOutlivesTheKill) {
  const absl::StatusOr<NodeGroups> opened =
      NodeGroups::Open({.node_uid = absl::StrCat("test-", RandomHex())});
  ASSERT_TRUE(opened.ok()) << opened.status();
  NodeGroups groups = *opened;
  if (!groups.used()) {
    std::printf("%s: only that attempts go without is tested\n", groups.ToString().c_str());
    EXPECT_THAT(groups.why(), Not(IsEmpty()));
    EXPECT_EQ(*groups.MakeAttempt("a", 1), "");
    return;
  }
  std::printf("tested on %s\n", groups.ToString().c_str());
  const absl::StatusOr<std::string> folder = groups.MakeAttempt("job-1.1", 1);
  ASSERT_TRUE(folder.ok()) << folder.status();
  const WorkerGroups workers(
      {.folder = *folder, .memory_bytes = groups.limits_memory() ? int64_t{64} << 20 : int64_t{0}});
  const absl::StatusOr<OwnedFd> group = workers.Make(3);
  ASSERT_TRUE(group.ok()) << group.status();

  const std::unique_ptr<ProcessHost> host = *ProcessHost::Start();
  // The process leaves its session and its process group, and closes its descriptors.
  ProcessOptions sleeps;
  sleeps.argv = {"/bin/sh", "-c",
                 "cat /proc/self/cgroup; setsid sleep 1000 <&- >&- 2>&- & exec sleep 1000"};
  sleeps.env = {"PATH=/usr/bin:/bin"};
  sleeps.group_fd = group->get();
  std::string own;
  Notification told;
  sleeps.on_line = [&](OutputStream, absl::string_view line) {
    if (!absl::StartsWith(line, "0::")) return;
    own = std::string(line);
    told.Notify();
  };
  const absl::StatusOr<std::shared_ptr<Process>> process = host->Spawn(std::move(sleeps));
  ASSERT_TRUE(process.ok()) << process.status();
  const ControlGroup rank = groups.At(*folder).Below("rank_3");
  ASSERT_TRUE(told.WaitForNotificationWithTimeout(absl::Minutes(1)));
  EXPECT_THAT(own, HasSubstr("/job-1.1/rank_3"));
  EXPECT_TRUE(rank.IsPopulated());
  EXPECT_THAT(rank.Processes(), ::testing::Contains((*process)->pid()));
  EXPECT_FALSE(groups.At(*folder).Remove().ok());

  if (groups.limits_memory()) {
    const absl::StatusOr<OwnedFd> small = workers.Make(4);
    ASSERT_TRUE(small.ok()) << small.status();
    // The process at the limit is a child: the others of the worker end with it.
    ProcessOptions eats;
    eats.argv = {"/bin/sh", "-c", "head -c 400000000 /dev/zero | tail; sleep 1000"};
    eats.env = {"PATH=/usr/bin:/bin"};
    eats.group_fd = small->get();
    const absl::StatusOr<std::shared_ptr<Process>> killed = host->Spawn(std::move(eats));
    ASSERT_TRUE(killed.ok()) << killed.status();
    EXPECT_EQ((*killed)->Wait().signal, SIGKILL);
    EXPECT_THAT(workers.MemoryKill(4), ::testing::Optional(HasSubstr("its limit of 64.0 MiB")));
    EXPECT_THAT(workers.MemoryKill(3), ::testing::Optional(std::string()));
  }

  groups.At(*folder).Kill();
  EXPECT_EQ((*process)->Wait().signal, SIGKILL);
  EXPECT_TRUE(rank.AwaitEmpty(absl::Minutes(1)).ok());
  workers.End();
  EXPECT_FALSE(rank.Exists());
  EXPECT_TRUE(groups.At(*folder).Remove().ok());
  EXPECT_TRUE(groups.At(ParentPath(*folder)).Remove().ok());
}

}  // namespace
}  // namespace muster::agent
