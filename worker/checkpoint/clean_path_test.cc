#include "worker/checkpoint/clean_path.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>

#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

TEST(CleanPathTest, TextAlone) {
  EXPECT_EQ(CleanPath(""), "");
  EXPECT_EQ(CleanPath("a//b/./c/"), "a/b/c");
  EXPECT_EQ(CleanPath("./a"), "a");
  EXPECT_EQ(CleanPath("../../a/"), "../../a");
  EXPECT_EQ(CleanPath("/"), "/");
  EXPECT_EQ(CleanPath("missing/../a"), "a");
}

TEST(CleanPathTest, ParentOfALink_IsThatOfItsFolder) {
  const TestFolder folder;
  const std::string root = std::filesystem::canonical(folder.path()).string();
  ASSERT_TRUE(MakeDirectories(JoinPath(root, "disk/deep")).ok());
  const std::string link = JoinPath(root, "link");
  ASSERT_EQ(symlink(JoinPath(root, "disk/deep").c_str(), link.c_str()), 0);
  EXPECT_EQ(CleanPath(link + "/../run/./x/"), JoinPath(root, "disk/run/x"));
  EXPECT_EQ(CleanPath(root + "/disk/../run"), JoinPath(root, "run"));
  // A link that is not followed by ".." keeps its name.
  EXPECT_EQ(CleanPath(link + "/run"), link + "/run");
  EXPECT_EQ(CleanPath(root + "/disk/../link/run"), link + "/run");
}

TEST(CleanPathTest, Tilde_IsHome) {
  ASSERT_EQ(setenv("HOME", "/home/me", 1), 0);
  EXPECT_EQ(CleanPath("~"), "/home/me");
  EXPECT_EQ(CleanPath("~/run/./x/"), "/home/me/run/x");
  EXPECT_EQ(AbsolutePath("~/run"), "/home/me/run");
  // A folder that is called so, however often it is cleaned.
  EXPECT_EQ(CleanPath("./~/run"), "./~/run");
  EXPECT_EQ(CleanPath(CleanPath("./~/run")), "./~/run");
  EXPECT_EQ(CleanPath("run/~"), "run/~");
}

TEST(AbsolutePathTest, IsThatOfThisProcess) {
  EXPECT_EQ(AbsolutePath("/a/./b/"), "/a/b");
  EXPECT_EQ(AbsolutePath("a"), JoinPath(std::filesystem::current_path().string(), "a"));
  EXPECT_EQ(AbsolutePath("../a"),
            JoinPath(std::filesystem::current_path().parent_path().string(), "a"));
}

}  // namespace
}  // namespace muster
