#include "worker/checkpoint/given_directory.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>

#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

absl::Status Compare(const std::string& rank_0, const std::string& rank_1, GivenAlike alike) {
  return CheckGivenAlike("save_state()",
                         {FollowGivenDirectory(rank_0), FollowGivenDirectory(rank_1)}, alike);
}

TEST(GivenDirectoryTest, OneOrNone_OfAllRanks) {
  for (const GivenAlike alike : {GivenAlike::kOrNone, GivenAlike::kByName, GivenAlike::kByFolder}) {
    EXPECT_TRUE(Compare("", "", alike).ok());
    EXPECT_TRUE(Compare("/a/b", "/a/b", alike).ok());
    const absl::Status one = Compare("/a/b", "", alike);
    EXPECT_TRUE(absl::IsInvalidArgument(one));
    EXPECT_THAT(std::string(one.message()),
                HasSubstr("save_state(): rank 1 gives no directory, and rank 0 /a/b: give all "
                          "processes the directory of one checkpoint, or none"));
  }
  EXPECT_TRUE(Compare("/a/b", "/c/d", GivenAlike::kOrNone).ok());
}

TEST(GivenDirectoryTest, ByFolder_OtherNamesOfOneFolderAreAlike) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("disk")).ok());
  ASSERT_EQ(symlink(folder.Path("disk").c_str(), folder.Path("link").c_str()), 0);
  // That folder does not exist yet.
  const std::string real = folder.Path("disk/best"), by_link = folder.Path("link/best");
  EXPECT_TRUE(Compare(real, by_link, GivenAlike::kByFolder).ok());
  EXPECT_TRUE(
      Compare(std::filesystem::current_path().string() + "/best", "best", GivenAlike::kByFolder)
          .ok());
  const absl::Status other = Compare(real, folder.Path("disk/best_2"), GivenAlike::kByFolder);
  EXPECT_TRUE(absl::IsInvalidArgument(other));
  EXPECT_THAT(std::string(other.message()),
              HasSubstr("rank 1 gives " + folder.Path("disk/best_2") + ", and rank 0 " + real +
                        ": give all processes the directory of one checkpoint"));
  EXPECT_FALSE(Compare("/a/best", "/b/best", GivenAlike::kByFolder).ok());
}

TEST(GivenDirectoryTest, ByName_NodesHaveItAnywhere) {
  const TestFolder folder;
  ASSERT_TRUE(MakeDirectories(folder.Path("a/checkpoint_3")).ok());
  ASSERT_EQ(symlink(folder.Path("a/checkpoint_3").c_str(), folder.Path("a/latest").c_str()), 0);
  EXPECT_TRUE(Compare("/scratch/a/best", "/scratch/b/best/", GivenAlike::kByName).ok());
  EXPECT_FALSE(Compare("/scratch/a/one", "/scratch/a/other", GivenAlike::kByName).ok());
  // The other node has lost its disk, and with it the link.
  const std::string link = folder.Path("a/latest");
  EXPECT_TRUE(Compare(link, folder.Path("b/latest"), GivenAlike::kByName).ok());
  EXPECT_TRUE(Compare(link, folder.Path("b/checkpoint_3"), GivenAlike::kByName).ok());
  EXPECT_FALSE(Compare(link, folder.Path("b/checkpoint_4"), GivenAlike::kByName).ok());
}

TEST(GivenDirectoryTest, WithoutFolder_IsNotCompared) {
  const GivenDirectory weights = {.path = "/a/llama", .folder = ""};
  EXPECT_TRUE(CheckGivenAlike("load_weights()", {weights, FollowGivenDirectory("/b/model")},
                              GivenAlike::kByName)
                  .ok());
}

}  // namespace
}  // namespace muster
