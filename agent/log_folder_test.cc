#include "agent/log_folder.h"

#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/identity.h"
#include "base/test_folder.h"

namespace muster::agent {
namespace {

class LogFolderTest : public testing::Test {
 protected:
  std::string Begin(const std::string& launch) {
    const absl::StatusOr<LogFolder> folder = BeginLogFolder(path_, launch);
    EXPECT_TRUE(folder.ok()) << folder.status();
    return folder.ok() ? folder->before : "?";
  }
  void Write(const std::string& name, const std::string& text) {
    const std::string path = JoinPath(path_, name);
    ASSERT_TRUE(MakeDirectories(ParentPath(path)).ok());
    ASSERT_TRUE(WriteFileAtomically(path, text).ok());
  }
  std::string Read(const std::string& name) {
    return ReadFile(JoinPath(path_, name)).value_or("none");
  }

  const TestFolder folder_;
  const std::string path_ = folder_.Path("new/logs");
};

TEST_F(LogFolderTest, SecondLaunch_FindsItsFolderFreeOfTheFirstOnes) {
  EXPECT_EQ(Begin("one"), "");
  Write("attempt_0/rank_0.log", "first");
  Write("attempt_0/rank_1.log", "first 1");
  Write("attempt_12/rank_0.log", "first, again");
  Write("notes.txt", "mine");
  Write("attempt_x/mine", "mine");
  EXPECT_EQ(Begin("two"), JoinPath(path_, "before_1"));
  EXPECT_EQ(Read("before_1/attempt_0/rank_0.log"), "first");
  EXPECT_EQ(Read("before_1/attempt_0/rank_1.log"), "first 1");
  EXPECT_EQ(Read("before_1/attempt_12/rank_0.log"), "first, again");
  EXPECT_FALSE(PathExists(JoinPath(path_, "attempt_0")));
  EXPECT_EQ(Read("notes.txt"), "mine");
  EXPECT_EQ(Read("attempt_x/mine"), "mine");
  // A launch that has written nothing leaves no folder.
  EXPECT_EQ(Begin("three"), "");
  Write("attempt_0/rank_0.log", "third");
  EXPECT_EQ(Begin("four"), JoinPath(path_, "before_2"));
  EXPECT_EQ(Read("before_1/attempt_0/rank_0.log"), "first");
  EXPECT_EQ(Read("before_2/attempt_0/rank_0.log"), "third");
}

TEST_F(LogFolderTest, LaunchThatRuns_IsNamedWithTheWayOut) {
  std::vector<LogFolder> running;
  for (int machine = 0; machine < 2; ++machine) {
    absl::StatusOr<LogFolder> folder = BeginLogFolder(path_, "one");
    ASSERT_TRUE(folder.ok()) << folder.status();
    running.push_back(*std::move(folder));
  }
  const absl::Status status = BeginLogFolder(path_, "two").status();
  EXPECT_EQ(status.code(), absl::StatusCode::kAlreadyExists);
  const std::string message(status.message());
  const std::string runs = JoinPath(path_, ".runs");
  for (const std::string& part :
       {absl::StrCat("still runs (process ", getpid(), " on ", HostName(), " since 2"),
        std::string("Z and 1 more): give"), absl::StrCat("or remove ", runs)}) {
    EXPECT_NE(message.find(part), std::string::npos) << message;
  }
  running.clear();
  EXPECT_EQ(Begin("two"), "");
  EXPECT_EQ(ReadFile(runs)->find('\n') + 1, ReadFile(runs)->size()) << "one line: of this launch";
}

TEST_F(LogFolderTest, LogsOfAVersionThatMovedNothing_AreMoved) {
  Write("attempt_0/rank_0.log", "old");
  EXPECT_EQ(Begin("one"), JoinPath(path_, "before_1"));
  EXPECT_EQ(Read("before_1/attempt_0/rank_0.log"), "old");
}

TEST_F(LogFolderTest, LaunchWithoutAName_MovesNothing) {
  Write("attempt_0/rank_0.log", "kept");
  EXPECT_EQ(Begin(""), "");
  EXPECT_EQ(Read("attempt_0/rank_0.log"), "kept");
}

// The machines of a launch share the folder, and some already write while others join.
TEST_F(LogFolderTest, MachinesOfOneLaunch_MoveOnceAndKeepWhatTheOthersWrite) {
  for (int launch = 0; launch < 20; ++launch) {
    std::vector<std::thread> machines;
    for (int machine = 0; machine < 8; ++machine) {
      machines.emplace_back([this, launch, machine] {
        Begin(absl::StrCat("launch ", launch));
        Write(absl::StrCat("attempt_0/rank_", machine, ".log"), absl::StrCat(launch));
      });
    }
    for (std::thread& machine : machines) machine.join();
    for (int machine = 0; machine < 8; ++machine) {
      const std::string name = absl::StrCat("attempt_0/rank_", machine, ".log");
      EXPECT_EQ(Read(name), absl::StrCat(launch));
      if (launch == 0) continue;
      EXPECT_EQ(Read(absl::StrCat("before_", launch, "/", name)), absl::StrCat(launch - 1));
    }
  }
}

TEST_F(LogFolderTest, SecondLaunchWhileAMachineOfTheFirstRuns_IsRefused) {
  absl::StatusOr<LogFolder> first = BeginLogFolder(path_, "one");
  absl::StatusOr<LogFolder> other_machine = BeginLogFolder(path_, "one");
  ASSERT_TRUE(first.ok() && other_machine.ok());
  Write("attempt_0/rank_0.log", "first");
  for (LogFolder* const machine : {&*first, &*other_machine}) {
    const absl::Status refused = BeginLogFolder(path_, "two").status();
    EXPECT_EQ(refused.code(), absl::StatusCode::kAlreadyExists) << refused;
    EXPECT_EQ(Read("attempt_0/rank_0.log"), "first");
    EXPECT_EQ(Begin("one"), "") << "a machine that starts again";
    machine->runs.Close();
  }
  EXPECT_EQ(Begin("two"), JoinPath(path_, "before_1"));
}

TEST_F(LogFolderTest, FolderThatCannotBeMade_IsNamed) {
  const absl::Status status = BeginLogFolder("/proc/nowhere", "one").status();
  EXPECT_NE(std::string(status.message()).find("/proc/nowhere"), std::string::npos) << status;
}

}  // namespace
}  // namespace muster::agent
