#include "agent/attempt_files.h"

#include <sys/stat.h>

#include <map>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(PutFile, File_IsWholeAndReplacesWhatWasThere) {
  const TestFolder folder;
  const std::string path = folder.Path("token");
  ASSERT_TRUE(PutFile(path, std::string(100'000, 'a'), 0600).ok());
  ASSERT_TRUE(PutFile(path, "secret", 0600).ok());
  EXPECT_EQ(*ReadFile(path), "secret");
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  EXPECT_THAT(*ListDirectory(folder.path()), ElementsAre("token")) << "nothing else is left";
}

TEST(PutFile, FileThatCannotBe_LeavesNothing) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("taken")).ok());
  EXPECT_THAT(PutFile(folder.Path("taken"), "1").message(), HasSubstr("cannot publish "));
  EXPECT_THAT(*ListDirectory(folder.path()), ElementsAre("taken"));
  EXPECT_THAT(PutFile(folder.Path("missing/1"), "1").message(), HasSubstr("missing/1"));
}

TEST(Variables, File_IsReadOnceAndByItsOwnerOnly) {
  const TestFolder folder;
  const std::string path = folder.Path("env");
  const std::map<std::string, std::string> variables = {
      {"A", "b=c\nD=e"}, {"EMPTY", ""}, {"TOKEN", "secret \"x\""}};
  ASSERT_TRUE(PutVariables(path, variables).ok());
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
  const auto taken = TakeVariables(path);
  ASSERT_TRUE(taken.ok()) << taken.status();
  EXPECT_EQ(*taken, variables);
  EXPECT_FALSE(PathExists(path));
  EXPECT_TRUE(absl::IsNotFound(TakeVariables(path).status()));
}

TEST(SyncAttempt, WithoutARecord_IsAnError) {
  const TestFolder folder;
  const absl::Status status = SyncAttempt(folder.path());
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal) << "no error of the user's";
  EXPECT_THAT(status.message(), HasSubstr("record.json"));
  ASSERT_TRUE(PutFile(folder.Path("record.json"), "{}").ok());
  EXPECT_TRUE(SyncAttempt(folder.path()).ok());
}

TEST(AttemptSync, Wait_SaysTheSameEachTime) {
  const TestFolder folder;
  AttemptSync without(folder.path());
  EXPECT_FALSE(without.Wait().ok());
  ASSERT_TRUE(PutFile(folder.Path("record.json"), "{}").ok());
  AttemptSync with(folder.path());
  EXPECT_TRUE(with.Wait().ok());
  EXPECT_TRUE(with.Wait().ok());
  EXPECT_FALSE(without.Wait().ok());
  const AttemptSync nobody_waits(folder.path());
}

}  // namespace
}  // namespace muster::agent
