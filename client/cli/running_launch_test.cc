#include "client/cli/running_launch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::SizeIs;
using ::testing::StartsWith;

class RunningLaunchTest : public ::testing::Test {
 protected:
  // TempDir() may be too long for a socket's path.
  void SetUp() override {
    char folder[] = "/tmp/launches-XXXXXX";
    ASSERT_NE(mkdtemp(folder), nullptr);
    temp_ = folder;
    folder_ = temp_ + "/own";
    variables_ = {{"MUSTER_RUNTIME_DIR", folder_}};
  }
  void TearDown() override { EXPECT_TRUE(RemoveTree(temp_).ok()); }

  std::unique_ptr<LaunchRecord> Create() {
    auto record = LaunchRecord::Create(variables_);
    EXPECT_TRUE(record.ok()) << record.status();
    return record.ok() ? *std::move(record) : nullptr;
  }
  RunningLaunch Of(const std::string& job, int second = 0) {
    return {.job = job,
            .pid = 7,
            .started = absl::FromUnixSeconds(1000 + second),
            .address = "127.0.0.1:1"};
  }
  std::vector<std::string> Jobs() {
    std::vector<std::string> jobs;
    for (const RunningLaunch& launch : ListRunningLaunches(variables_)) jobs.push_back(launch.job);
    return jobs;
  }
  std::vector<std::string> Files() { return *ListDirectory(folder_); }
  std::string Refusal() {
    const absl::Status status = LaunchRecord::Create(variables_).status();
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  }

  std::string temp_;
  std::string folder_;
  std::map<std::string, std::string> variables_;
};

TEST_F(RunningLaunchTest, Published_IsFoundAsItWasAndGoneWithTheRecord) {
  RunningLaunch launch = Of("digits");
  launch.token_file = "/t";
  launch.tls_ca = "/a";
  launch.tls_cert = "/c";
  launch.tls_key = "/k";
  auto record = Create();
  EXPECT_THAT(Jobs(), IsEmpty()) << "it does not serve yet";
  ASSERT_TRUE(record->Publish(launch).ok());
  std::vector<std::string> looked_in;
  const std::vector<RunningLaunch> found = ListRunningLaunches(variables_, &looked_in);
  EXPECT_THAT(looked_in, ElementsAre(folder_));
  ASSERT_THAT(found, SizeIs(1));
  EXPECT_EQ(found[0].job, "digits");
  EXPECT_EQ(found[0].pid, 7);
  EXPECT_EQ(found[0].started, launch.started);
  EXPECT_EQ(found[0].address, "127.0.0.1:1");
  EXPECT_EQ(found[0].token_file, "/t");
  EXPECT_EQ(found[0].tls_ca, "/a");
  EXPECT_EQ(found[0].tls_cert, "/c");
  EXPECT_EQ(found[0].tls_key, "/k");
  record.reset();
  EXPECT_THAT(Jobs(), IsEmpty());
  EXPECT_THAT(Files(), IsEmpty());
}

TEST_F(RunningLaunchTest, Several_AreListedOldestFirst) {
  const auto later = Create(), earlier = Create();
  ASSERT_TRUE(later->Publish(Of("later", 2)).ok());
  ASSERT_TRUE(earlier->Publish(Of("earlier", 1)).ok());
  EXPECT_NE(later->socket_path(), earlier->socket_path());
  EXPECT_THAT(Jobs(), ElementsAre("earlier", "later"));
}

TEST_F(RunningLaunchTest, SocketPath_FitsASocket) {
  auto record = Create();
  EXPECT_THAT(record->socket_path(), StartsWith(folder_ + "/"));
  EXPECT_LT(record->socket_path().size(), 108u);
  // The longest folder that is taken, and one more.
  for (const bool fits : {true, false}) {
    const std::string folder =
        temp_ + "/" + std::string(107 - 14 - temp_.size() - (fits ? 1 : 0), 'x');
    variables_["MUSTER_RUNTIME_DIR"] = folder;
    const auto made = LaunchRecord::Create(variables_);
    ASSERT_EQ(made.ok(), fits) << made.status();
    if (fits) {
      EXPECT_EQ((*made)->socket_path().size(), 107u);
    } else {
      EXPECT_THAT(std::string(made.status().message()), HasSubstr("too long"));
    }
  }
}

TEST_F(RunningLaunchTest, Token_IsAFileForThisUserAlone) {
  auto record = Create();
  const auto path = record->MakeToken();
  ASSERT_TRUE(path.ok()) << path.status();
  struct stat info {};
  ASSERT_EQ(stat(path->c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_EQ(ReadFile(*path)->size(), 65u);
  record.reset();
  EXPECT_FALSE(PathExists(*path));
}

// A launch that is killed removes nothing itself.
TEST_F(RunningLaunchTest, FilesOfADeadLaunch_AreRemovedByTheNextOneAndNeverListed) {
  for (const bool by_launch : {true, false}) {
    const pid_t child = fork();
    ASSERT_GE(child, 0);
    if (child == 0) {
      auto record = *LaunchRecord::Create(variables_);
      const bool made = record->MakeToken().ok() &&
                        WriteFileAtomically(record->socket_path(), "").ok() &&
                        record->Publish(Of("dead")).ok();
      _exit(made ? 0 : 1);
    }
    int status = -1;
    ASSERT_EQ(waitpid(child, &status, 0), child);
    ASSERT_EQ(status, 0);
    EXPECT_THAT(Files(), SizeIs(3));
    if (by_launch) {
      Create();
    } else {
      EXPECT_THAT(Jobs(), IsEmpty());
    }
    EXPECT_THAT(Files(), IsEmpty());
  }
}

TEST_F(RunningLaunchTest, FolderThatOthersMayEnter_IsRefusedAndTellsNothing) {
  auto record = Create();
  ASSERT_TRUE(record->Publish(Of("digits")).ok());
  for (const mode_t mode : {0755, 0710, 0701, 0770}) {
    ASSERT_EQ(chmod(folder_.c_str(), mode), 0);
    EXPECT_THAT(Refusal(), AllOf(HasSubstr(folder_), HasSubstr("MUSTER_RUNTIME_DIR")));
    EXPECT_THAT(Jobs(), IsEmpty());
  }
  ASSERT_EQ(chmod(folder_.c_str(), 0700), 0);
  EXPECT_THAT(Jobs(), ElementsAre("digits"));
}

TEST_F(RunningLaunchTest, FolderOfAnotherUserOrALinkToOne_IsRefused) {
  // Root makes one; anybody else finds one.
  std::string foreign = "/root";
  if (geteuid() == 0) {
    foreign = temp_ + "/foreign";
    ASSERT_EQ(mkdir(foreign.c_str(), 0700), 0);
    ASSERT_EQ(chown(foreign.c_str(), 65534, 65534), 0);
  }
  variables_["MUSTER_RUNTIME_DIR"] = foreign;
  EXPECT_THAT(Refusal(), AllOf(HasSubstr(foreign), HasSubstr("belongs to user")));
  EXPECT_THAT(Jobs(), IsEmpty());
  const std::string link = temp_ + "/link";
  ASSERT_EQ(symlink(temp_.c_str(), link.c_str()), 0);
  for (const std::string& name : {link, link + "/"}) {
    variables_["MUSTER_RUNTIME_DIR"] = name;
    EXPECT_THAT(Refusal(), AllOf(HasSubstr(link), HasSubstr("no folder")));
  }
}

TEST_F(RunningLaunchTest, RelativeFolder_IsNamedAsOthersFindIt) {
  std::error_code error;
  std::filesystem::current_path(temp_, error);
  variables_["MUSTER_RUNTIME_DIR"] = "./here/";
  EXPECT_THAT(Create()->socket_path(), StartsWith(temp_ + "/here/"));
  std::filesystem::current_path("/", error);
}

TEST_F(RunningLaunchTest, XdgRuntimeDir_IsUsedIfItIsThisUsersAlone) {
  const std::string fallback = absl::StrCat("/tmp/muster-", geteuid());
  variables_ = {{"XDG_RUNTIME_DIR", temp_}};
  std::vector<std::string> looked_in;
  ListRunningLaunches(variables_, &looked_in);
  EXPECT_THAT(looked_in, ElementsAre(temp_ + "/muster", fallback));
  EXPECT_THAT(Create()->socket_path(), StartsWith(temp_ + "/muster/"));
  // Others may change what is in it.
  ASSERT_EQ(chmod(temp_.c_str(), 0777), 0);
  EXPECT_THAT(Create()->socket_path(), StartsWith(fallback + "/"));
  ASSERT_EQ(chmod(temp_.c_str(), 0700), 0);
  // Others may enter it.
  ASSERT_EQ(chmod((temp_ + "/muster").c_str(), 0755), 0);
  EXPECT_THAT(Create()->socket_path(), StartsWith(fallback + "/"));
  variables_ = {{"XDG_RUNTIME_DIR", "/nowhere"}};
  EXPECT_THAT(Create()->socket_path(), StartsWith(fallback + "/"));
  variables_.clear();
  EXPECT_THAT(Create()->socket_path(), StartsWith(fallback + "/"));
}

TEST_F(RunningLaunchTest, NotesThatCannotBeRead_AreLeftOut) {
  auto record = Create();
  ASSERT_TRUE(record->Publish(Of("digits")).ok());
  std::vector<int> held;
  int number = 0;
  for (const char* text : {"", "{", "[]", "{}", R"({"address": 7})", R"({"job": "x"})"}) {
    const std::string path = absl::StrCat(folder_, "/0000000", number++, ".json");
    ASSERT_TRUE(WriteFileAtomically(path, text).ok());
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_EQ(flock(fd, LOCK_EX), 0);  // as one that lives
    held.push_back(fd);
  }
  EXPECT_THAT(Jobs(), ElementsAre("digits"));
  for (const int fd : held) close(fd);
}

}  // namespace
}  // namespace muster::client
