// Tests that need a network and a file system of their own: lost packets, a partition, a full disk.
// The program starts itself again inside of new user, network and mount namespaces. If the kernel
// does not allow that, the test fails with a message; MUSTER_CHAOS_WITHOUT_NAMESPACES=1 leaves the
// tests out, and prints so.
#include <fcntl.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_join.h"
#include "base/exit_code.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/chaos/child.h"
#include "tests/chaos/cluster.h"
#include "tests/support/command.h"

namespace muster::chaos {
namespace {

using ::testing::HasSubstr;
using testing_support::CommandResult;
using testing_support::RunCommand;

void Run(const std::string& command) {
  const CommandResult result = RunCommand(command + " 2>&1");
  ASSERT_EQ(result.exit_code, 0) << command << ": " << result.output;
}

// Drops this share of the packets that the loopback interface of the namespace receives. Classic
// BPF needs no compiler: load a random word, compare, drop (2) or let pass (0).
void LosePackets(double share) {
  static bool prepared = false;
  if (!prepared) {
    Run("ip link set lo up");
    Run("tc qdisc add dev lo clsact");
    prepared = true;
  }
  const uint32_t random_word = 0xfffff000u + 56;  // SKF_AD_OFF + SKF_AD_RANDOM
  const auto pass_from = static_cast<uint32_t>(share * 4294967295.0);
  Run(
      absl::StrCat("tc filter replace dev lo ingress protocol all prio 1 handle 1 bpf da bytecode "
                   "'4,32 0 0 ",
                   random_word, ",53 1 0 ", pass_from, ",6 0 0 2,6 0 0 0,'"));
}

void Wait(absl::Duration duration) { Notification().WaitForNotificationWithTimeout(duration); }

void ExpectRun(Cluster& cluster) {
  const std::vector<std::string> wrong = cluster.Run();
  EXPECT_TRUE(wrong.empty()) << absl::StrJoin(wrong, "\n") << "\n" << cluster.Logs();
}

class Network : public ::testing::Test {
 protected:
  void SetUp() override { LosePackets(0); }
  void TearDown() override { LosePackets(0); }
};

TEST_F(Network, OneInThirtyPacketsIsLost_JobGoesOn) {
  Cluster cluster({.name = "loss",
                   .rounds = 12,
                   .signals = {{.worker = 0, .round = 1, .action = [] { LosePackets(1.0 / 30); }},
                               {.worker = 0, .round = 9, .action = [] { LosePackets(0); }}},
                   .expected_generations = 1});
  ExpectRun(cluster);
}

TEST_F(Network, PartitionShorterThanTheLease_NothingHappens) {
  Cluster cluster({.name = "short_partition",
                   .rounds = 12,
                   .lease = absl::Seconds(10),
                   .signals = {{.worker = 0,
                                .round = 5,
                                .action =
                                    [] {
                                      LosePackets(1);
                                      Wait(absl::Milliseconds(800));
                                      LosePackets(0);
                                    }}},
                   .expected_generations = 1});
  ExpectRun(cluster);
}

// All workers are silent for longer than the lease: the coordinator is the one that is
// disconnected.
TEST_F(Network, PartitionLongerThanTheLeaseButNotTheTolerance_NothingHappens) {
  Cluster cluster({.name = "tolerated_partition",
                   .rounds = 12,
                   .lease = absl::Seconds(1),
                   .signals = {{.worker = 0,
                                .round = 5,
                                .action =
                                    [] {
                                      LosePackets(1);
                                      Wait(absl::Milliseconds(2500));
                                      LosePackets(0);
                                    }}},
                   .expected_generations = 1});
  ExpectRun(cluster);
}

class SmallDisk : public ::testing::Test {
 protected:
  void SetUp() override {
    LosePackets(0);
    disk_ = TestPath("disk");
    ASSERT_TRUE(MakeDirectories(disk_).ok());
    ASSERT_EQ(mount("none", disk_.c_str(), "tmpfs", 0, "size=2m"), 0) << std::strerror(errno);
  }
  void TearDown() override { umount2(disk_.c_str(), MNT_DETACH); }

  void Fill() const {
    const int fd = open((disk_ + "/filler").c_str(), O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    ASSERT_GE(fd, 0);
    const std::string page(4096, 'x');
    while (write(fd, page.data(), page.size()) > 0) {
    }
    close(fd);
  }
  void Free() const { ASSERT_TRUE(RemoveTree(disk_ + "/filler").ok()); }

  std::string disk_;
};

TEST_F(SmallDisk, FullWhileAJobRuns_NothingIsLostAndItGoesOnWhenThereIsRoom) {
  Cluster* running = nullptr;
  Plan plan = {.name = "disk_full", .data_dir = disk_ + "/data", .expected_generations = 1};
  plan.signals = {{.worker = 0, .round = 6, .action = [&] {
                     Fill();
                     EXPECT_TRUE(running->coordinator().WaitFor(
                         "nothing is acknowledged until this ends", absl::Seconds(20)));
                     Free();
                     EXPECT_TRUE(
                         running->coordinator().WaitFor("can be written again", absl::Seconds(20)));
                   }}};
  Cluster cluster(plan);
  running = &cluster;
  ExpectRun(cluster);
  EXPECT_EQ(cluster.coordinator_starts(), 2);  // the second is the one that checks
}

TEST_F(SmallDisk, FullAndKilled_WhatWasAcknowledgedIsThere) {
  Cluster* running = nullptr;
  Plan plan = {.name = "disk_full_killed", .data_dir = disk_ + "/data", .expected_generations = 1};
  plan.signals = {{.worker = 0, .round = 6, .action = [&] {
                     Fill();
                     EXPECT_TRUE(running->coordinator().WaitFor(
                         "nothing is acknowledged until this ends", absl::Seconds(20)));
                     running->coordinator().Signal(SIGKILL);
                     running->coordinator().Wait();
                     Free();
                   }}};
  Cluster cluster(plan);
  running = &cluster;
  ExpectRun(cluster);
}

TEST_F(SmallDisk, FullAtTheStart_IsRefusedInOneLine) {
  Fill();
  auto host = *agent::ProcessHost::Start();
  Child coordinator(*host,
                    {ProgramPath("coordinator/cmd/muster-coordinator"), "--insecure", "--listen",
                     "127.0.0.1:0", "--data_dir", disk_ + "/data"},
                    {}, [] {});
  EXPECT_EQ(coordinator.Wait(), kExitCannotServe) << coordinator.text();
  EXPECT_THAT(coordinator.text(), HasSubstr("full")) << coordinator.text();
}

int Inside(int argc, char** argv) {
  constexpr char kInside[] = "MUSTER_CHAOS_INSIDE";
  if (std::getenv(kInside) != nullptr) return -1;
  // The tools are usually where only root looks.
  setenv("PATH", "/usr/sbin:/usr/bin:/sbin:/bin", 1);
  const CommandResult allowed =
      RunCommand("unshare --user --map-root-user --net --mount -- ip link show lo 2>&1");
  if (allowed.exit_code != 0) {
    const bool leave_out = std::getenv("MUSTER_CHAOS_WITHOUT_NAMESPACES") != nullptr;
    std::printf(
        "%s: user, network and mount namespaces cannot be made here: %s"
        "Without them nothing of this file is tested. Allow unprivileged user namespaces "
        "(sysctl kernel.unprivileged_userns_clone=1), or run as root; "
        "MUSTER_CHAOS_WITHOUT_NAMESPACES=1 leaves these tests out.\n",
        leave_out ? "NOT TESTED" : "FAILED", allowed.output.c_str());
    return leave_out ? 0 : 1;
  }
  setenv(kInside, "1", 1);
  std::vector<char*> args;
  for (const char* word : {"unshare", "--user", "--map-root-user", "--net", "--mount", "--"}) {
    args.push_back(const_cast<char*>(word));
  }
  args.insert(args.end(), argv, argv + argc);
  args.push_back(nullptr);
  execvp("unshare", args.data());
  std::perror("unshare");
  return 1;
}

}  // namespace
}  // namespace muster::chaos

int main(int argc, char** argv) {
  if (const int code = muster::chaos::Inside(argc, argv); code >= 0) return code;
  ::testing::InitGoogleMock(&argc, argv);
  return RUN_ALL_TESTS();
}
