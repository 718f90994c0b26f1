#include "worker/checkpoint/removal.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/test_mounted.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class RemovalTest : public testing::Test {
 protected:
  RemovalTest() {
    EXPECT_TRUE(MakeDirectories(JoinPath(dir_, "notes/data")).ok());
    EXPECT_TRUE(WriteFileAtomically(JoinPath(dir_, "notes/data/file"), "text").ok());
    EXPECT_TRUE(WriteFileAtomically(JoinPath(dir_, "a"), "text").ok());
  }
  ~RemovalTest() override { mounted = {}; }

  const TestFolder folder_;
  const std::string dir_ = folder_.Path("checkpoint_0");
};

TEST_F(RemovalTest, NothingMounted_AllOfItGoes) {
  EXPECT_TRUE(CheckRemovable(dir_).ok());
  EXPECT_TRUE(RemoveCheckpointTree(dir_).ok());
  EXPECT_FALSE(PathExists(dir_));
  EXPECT_TRUE(RemoveCheckpointTree(dir_).ok());
}

TEST_F(RemovalTest, MountPointInIt_NothingGoes_AndTheErrorNamesIt) {
  for (const bool tells : {true, false}) {
    mounted = {.end = "/notes/data", .kernel_tells = tells, .refuses_statx = false};
    for (const absl::Status& status : {CheckRemovable(dir_), RemoveCheckpointTree(dir_)}) {
      EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr("/notes/data is a mount point"));
    }
    EXPECT_TRUE(PathExists(JoinPath(dir_, "a")));
    EXPECT_TRUE(PathExists(JoinPath(dir_, "notes/data/file")));
  }
}

TEST_F(RemovalTest, StatxIsRefused_AllOfItGoes) {
  mounted = {.end = "", .kernel_tells = false, .refuses_statx = true};
  EXPECT_TRUE(CheckRemovable(dir_).ok());
  EXPECT_TRUE(RemoveCheckpointTree(dir_).ok());
  EXPECT_FALSE(PathExists(dir_));
}

TEST_F(RemovalTest, LinkToAFolder_OnlyTheLinkGoes) {
  const std::string link = folder_.Path("link");
  ASSERT_EQ(symlink(dir_.c_str(), link.c_str()), 0);
  mounted = {.end = "/notes/data", .kernel_tells = true, .refuses_statx = false};
  EXPECT_TRUE(RemoveCheckpointTree(link).ok());
  EXPECT_FALSE(PathExists(link));
  EXPECT_TRUE(PathExists(JoinPath(dir_, "notes/data/file")));
}

}  // namespace
}  // namespace muster
