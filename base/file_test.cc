#include "base/file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/test_folder.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

TEST(WriteFileAtomically, OverAnExistingFile_LeavesOneWholeFile) {
  const TestFolder scratch;
  const std::string& folder = scratch.path();
  const std::string path = JoinPath(folder, "a");
  ASSERT_TRUE(WriteFileAtomically(path, "one").ok());
  ASSERT_TRUE(WriteFileAtomically(path, "two").ok());
  EXPECT_EQ(*ReadFile(path), "two");
  EXPECT_THAT(*ListDirectory(folder), ElementsAre("a"));
}

TEST(AtomicFile, WithoutCommit_LeavesNothing) {
  const TestFolder scratch;
  const std::string& folder = scratch.path();
  {
    auto file = AtomicFile::Create(JoinPath(folder, "a"));
    ASSERT_TRUE(file.ok());
    ASSERT_TRUE(file->Append("half").ok());
    AtomicFile moved = *std::move(file);
    ASSERT_TRUE(moved.Append("half").ok());
  }
  EXPECT_TRUE(ListDirectory(folder)->empty());
}

TEST(AtomicFile, ModeAndSync_AreThoseAskedFor) {
  const TestFolder scratch;
  const std::string& folder = scratch.path();
  const std::string path = JoinPath(folder, "a");
  auto file = AtomicFile::Create(path, 0600);
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE(file->Append("half").ok());
  ASSERT_TRUE(file->Sync().ok());
  EXPECT_FALSE(PathExists(path));
  ASSERT_TRUE(file->Commit().ok());
  EXPECT_EQ(*ReadFile(path), "half");
  struct stat info;
  ASSERT_EQ(stat(path.c_str(), &info), 0);
  EXPECT_EQ(info.st_mode & 0777, 0600u);
}

TEST(AtomicFile, MissingFolder_NamesPath) {
  const auto file = AtomicFile::Create("/nowhere/at/all");
  ASSERT_FALSE(file.ok());
  EXPECT_EQ(file.status().code(), absl::StatusCode::kNotFound);
  EXPECT_THAT(std::string(file.status().message()), HasSubstr("/nowhere/at/all"));
}

TEST(ReadFile, TooLargeOrAFolder_IsRefused) {
  const TestFolder scratch;
  const std::string& folder = scratch.path();
  ASSERT_TRUE(WriteFileAtomically(JoinPath(folder, "a"), std::string(100, 'x')).ok());
  EXPECT_EQ(ReadFile(JoinPath(folder, "a"), 99).status().code(),
            absl::StatusCode::kResourceExhausted);
  EXPECT_EQ(ReadFile(folder).status().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_EQ(ReadFile(JoinPath(folder, "b")).status().code(), absl::StatusCode::kNotFound);
}

TEST(MakeDirectories, OverAFile_IsRefused) {
  const TestFolder scratch;
  const std::string path = scratch.Path("a");
  ASSERT_TRUE(WriteFileAtomically(path, "").ok());
  EXPECT_FALSE(MakeDirectories(path).ok());
}

TEST(RemoveTree, NothingThere_IsFine) {
  const TestFolder scratch;
  const std::string& folder = scratch.path();
  ASSERT_TRUE(MakeDirectories(folder + "/a/b/c").ok());
  EXPECT_TRUE(RemoveTree(folder + "/a").ok());
  EXPECT_TRUE(RemoveTree(folder + "/a").ok());
  EXPECT_FALSE(PathExists(folder + "/a"));
}

TEST(Paths, Slashes_AreJoinedAndSplitAsParts) {
  EXPECT_EQ(JoinPath("a", "b"), "a/b");
  EXPECT_EQ(JoinPath("a/", "b"), "a/b");
  EXPECT_EQ(JoinPath("a", "/b"), "/b");
  EXPECT_EQ(ParentPath("a"), ".");
  EXPECT_EQ(ParentPath("/a"), "/");
  EXPECT_EQ(ParentPath("a/b/"), "a");
  EXPECT_EQ(BaseName("a/b/"), "b");
  EXPECT_EQ(BaseName("/"), "/");
}

TEST(IsFolder, LinkToAFolder_IsOneAndFilesAreNot) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.path() + "/file", "").ok());
  ASSERT_EQ(symlink(folder.path().c_str(), (folder.path() + "/link").c_str()), 0);
  EXPECT_TRUE(IsFolder(folder.path()));
  EXPECT_TRUE(IsFolder(folder.path() + "/link"));
  EXPECT_FALSE(IsFolder(folder.path() + "/file"));
  EXPECT_FALSE(IsFolder(folder.path() + "/none"));
}

}  // namespace
}  // namespace muster
