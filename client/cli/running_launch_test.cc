#include "client/cli/running_launch.h"

#include <fcntl.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <cstdlib>
#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
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
using ::testing::UnorderedElementsAreArray;

class RunningLaunchTest : public ::testing::Test {
 protected:
  void SetUp() override { variables_ = {{"MUSTER_RUNTIME_DIR", folder_}}; }

  std::unique_ptr<LaunchRecord> Create() {
    auto record = LaunchRecord::Create(variables_, system_);
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
    for (const RunningLaunch& launch : ListRunningLaunches(variables_, nullptr, system_)) {
      jobs.push_back(launch.job);
    }
    return jobs;
  }
  std::vector<std::string> Files() { return *ListDirectory(folder_); }
  std::string Refusal() {
    const absl::Status status = LaunchRecord::Create(variables_, system_).status();
    EXPECT_FALSE(status.ok());
    return std::string(status.message());
  }

  const TestFolder test_folder_ = TestFolder::ForSockets();
  const std::string temp_ = test_folder_.path();
  const std::string folder_ = test_folder_.Path("own");
  std::map<std::string, std::string> variables_;
  LaunchSystem system_;
};

TEST_F(RunningLaunchTest, Published_IsFoundAsItWasAndGoneWithTheRecord) {
  RunningLaunch launch = Of("digits");
  launch.token_file = "/t";
  launch.tls.ca = "/a";
  launch.tls.cert = "/c";
  launch.tls.key = "/k";
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
  EXPECT_EQ(found[0].tls.ca, "/a");
  EXPECT_EQ(found[0].tls.cert, "/c");
  EXPECT_EQ(found[0].tls.key, "/k");
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
  // The longest folder that is accepted, and one that is longer by a byte.
  for (const bool fits : {true, false}) {
    const std::string folder =
        temp_ + "/" + std::string(107 - 21 - temp_.size() - (fits ? 1 : 0), 'x');
    variables_["MUSTER_RUNTIME_DIR"] = folder;
    const auto made = LaunchRecord::Create(variables_, system_);
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
      auto record = *LaunchRecord::Create(variables_, system_);
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
  // Root creates a foreign folder; other users find one.
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

TEST_F(RunningLaunchTest, WithoutAFolderOfItsOwn_TheFirstThatThisUserHasAloneIsUsed) {
  const std::string name = absl::StrCat("/muster-", geteuid());
  for (const char* folder : {"/tmp", "/run", "/other"}) {
    ASSERT_EQ(mkdir((temp_ + folder).c_str(), 0700), 0);
  }
  system_.tmp = temp_ + "/tmp";
  const std::string tmp = system_.tmp + name, run = temp_ + "/run/muster",
                    other = temp_ + "/other" + name;
  variables_ = {{"XDG_RUNTIME_DIR", temp_ + "/run/"}, {"TMPDIR", temp_ + "/other"}};
  std::vector<std::string> looked_in;
  ListRunningLaunches(variables_, &looked_in, system_);
  EXPECT_THAT(looked_in, ElementsAre(tmp, run, other));
  const auto first = Create();
  EXPECT_THAT(first->socket_path(), StartsWith(tmp + "/"));
  ASSERT_TRUE(first->Publish(Of("first", 1)).ok());
  // Other users may enter it.
  ASSERT_EQ(chmod(tmp.c_str(), 0755), 0);
  const auto second = Create();
  EXPECT_THAT(second->socket_path(), StartsWith(run + "/"));
  ASSERT_TRUE(second->Publish(Of("second", 2)).ok());
  // Other users may change its content.
  ASSERT_EQ(chmod((temp_ + "/run").c_str(), 0777), 0);
  const auto third = Create();
  EXPECT_THAT(third->socket_path(), StartsWith(other + "/"));
  ASSERT_TRUE(third->Publish(Of("third", 3)).ok());
  ASSERT_EQ(chmod(other.c_str(), 0755), 0);
  EXPECT_THAT(Refusal(), AllOf(HasSubstr(tmp), HasSubstr(temp_ + "/run"), HasSubstr(other),
                               HasSubstr("MUSTER_RUNTIME_DIR")));
  for (const std::string& folder : {tmp, other}) ASSERT_EQ(chmod(folder.c_str(), 0700), 0);
  EXPECT_THAT(Jobs(), ElementsAre("first", "second", "third"));
  // Named twice, relative or empty.
  for (const std::string& temp : {system_.tmp + "/", std::string("other"), std::string()}) {
    variables_ = {{"TMPDIR", temp}, {"XDG_RUNTIME_DIR", "run"}};
    looked_in.clear();
    ListRunningLaunches(variables_, &looked_in, system_);
    EXPECT_THAT(looked_in, ElementsAre(tmp));
  }
}

TEST_F(RunningLaunchTest, FilesOfTheUser_AreLeftAlone) {
  ASSERT_EQ(mkdir(folder_.c_str(), 0700), 0);
  std::vector<std::string> names;
  for (const char* stem : {"settings", "01234567", "muster-settings", "muster-01234567x",
                           "muster-0123456", "Muster-01234567", "muster-0123456g"}) {
    for (const char* ending : {".json", ".sock", ".token"}) {
      names.push_back(absl::StrCat(stem, ending));
      ASSERT_TRUE(WriteFileAtomically(folder_ + "/" + names.back(), "{}").ok());
    }
  }
  // A file with the name of a launch's, but not a note of one.
  names.push_back("muster-01234567.json");
  ASSERT_TRUE(WriteFileAtomically(folder_ + "/" + names.back(), R"({"a": 1})").ok());
  Create();
  EXPECT_THAT(Jobs(), IsEmpty());
  EXPECT_THAT(Files(), UnorderedElementsAreArray(names));
}

int WithoutLocks(int, int) {
  errno = ENOLCK;
  return -1;
}
int AlwaysHeld(int, int) {
  errno = EWOULDBLOCK;
  return -1;
}

TEST_F(RunningLaunchTest, FolderWithoutLocks_IsRefusedAndKeepsWhatIsThere) {
  auto record = Create();
  ASSERT_TRUE(record->Publish(Of("digits")).ok());
  system_.lock = WithoutLocks;
  EXPECT_THAT(Refusal(), AllOf(HasSubstr("files cannot be locked in " + folder_),
                               HasSubstr("set MUSTER_RUNTIME_DIR to a local folder")));
  EXPECT_THAT(Jobs(), IsEmpty()) << "whether it lives is not known";
  EXPECT_THAT(Files(), SizeIs(1));
  system_.lock = AlwaysHeld;
  EXPECT_THAT(Refusal(), HasSubstr(folder_));
  EXPECT_THAT(Files(), SizeIs(1));
  system_.lock = nullptr;
  EXPECT_THAT(Jobs(), ElementsAre("digits"));
}

// The lock keeps systemd-tmpfiles from removing it.
TEST_F(RunningLaunchTest, Folder_IsLockedAsLongAsALaunchLives) {
  auto first = Create(), second = Create();
  const int fd = open(folder_.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_GE(fd, 0);
  first.reset();
  EXPECT_EQ(flock(fd, LOCK_EX | LOCK_NB), -1);
  second.reset();
  EXPECT_EQ(flock(fd, LOCK_EX | LOCK_NB), 0);
  EXPECT_NE(Create(), nullptr) << "it waits for no one else's lock";
  close(fd);
}

TEST_F(RunningLaunchTest, LaunchesOfAnotherMachine_AreNeitherListedNorRemoved) {
  auto record = Create();
  ASSERT_TRUE(record->Publish(Of("here")).ok());
  system_.host = "elsewhere";
  EXPECT_THAT(Jobs(), IsEmpty());
  auto other = Create();
  ASSERT_TRUE(other->Publish(Of("there")).ok());
  EXPECT_THAT(Jobs(), ElementsAre("there"));
  system_.host = "";
  EXPECT_THAT(Jobs(), ElementsAre("here"));
  // A launch that has died.
  ASSERT_TRUE(WriteFileAtomically(folder_ + "/muster-01234567.json", R"({"host": "x"})").ok());
  Create();
  EXPECT_THAT(Jobs(), ElementsAre("here"));
  EXPECT_THAT(Files(), SizeIs(3));
  system_.host = "x";
  EXPECT_THAT(Jobs(), IsEmpty());
  EXPECT_THAT(Files(), SizeIs(2));
}

TEST_F(RunningLaunchTest, NotesThatCannotBeRead_AreLeftOut) {
  auto record = Create();
  ASSERT_TRUE(record->Publish(Of("digits")).ok());
  std::vector<int> held;
  int number = 0;
  for (const char* text : {"", "{", "[]", "{}", R"({"address": 7})", R"({"job": "x"})"}) {
    const std::string path = absl::StrCat(folder_, "/muster-0000000", number++, ".json");
    ASSERT_TRUE(WriteFileAtomically(path, text).ok());
    const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC);
    ASSERT_EQ(flock(fd, LOCK_EX), 0);  // held as by a living launch
    held.push_back(fd);
  }
  EXPECT_THAT(Jobs(), ElementsAre("digits"));
  for (const int fd : held) close(fd);
}

}  // namespace
}  // namespace muster::client
