#include "worker/checkpoint/lasting_folder.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/test_synced_folders.h"

namespace muster {
namespace {

using ::testing::Contains;
using ::testing::IsEmpty;

std::vector<std::string> SyncedFor(const std::string& folder) {
  std::vector<std::string> paths;
  synced = &paths;
  const absl::Status made = MakeLastingFolder(folder);
  synced = nullptr;
  EXPECT_TRUE(made.ok()) << made;
  return paths;
}

TEST(MakeLastingFolderTest, FoldersAroundIt_AreSyncedOnce) {
  const TestFolder folder;
  // Another process has created this one.
  ASSERT_TRUE(MakeDirectories(folder.Path("run")).ok());
  const std::vector<std::string> paths = SyncedFor(folder.Path("run/deep/er"));
  for (const std::string& path : {folder.Path("run/deep"), folder.Path("run"), folder.path()}) {
    EXPECT_THAT(paths, Contains(path).Times(1));
  }
  EXPECT_THAT(SyncedFor(folder.Path("run/deep/er")), IsEmpty());
  EXPECT_THAT(SyncedFor(folder.Path("run/new")), Contains(folder.Path("run")));
}

// ext4 gives it the inode of the previous folder.
TEST(MakeLastingFolderTest, FolderThatIsRemovedAndMadeAgain_IsSyncedAgain) {
  const TestFolder folder;
  const std::string best = folder.Path("out/best");
  for (int i = 0; i < 3; ++i) {
    EXPECT_THAT(SyncedFor(best), Contains(folder.Path("out")));
    ASSERT_TRUE(RemoveTree(best).ok());
  }
}

TEST(MakeLastingFolderTest, File_IsRefused) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("file"), "").ok());
  EXPECT_FALSE(MakeLastingFolder(folder.Path("file")).ok());
}

}  // namespace
}  // namespace muster
