#include "base/regular_file.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>

#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(RegularFileTest, Pipe_IsRefusedAndNotWaitedFor) {
  const TestFolder folder;
  ASSERT_EQ(mkfifo(folder.Path("pipe").c_str(), 0600), 0);
  const auto read = ReadRegularFile(folder.Path("pipe"));
  EXPECT_TRUE(absl::IsInvalidArgument(read.status()));
  EXPECT_THAT(read.status().message(), HasSubstr("pipe: is a pipe or a device"));
}

TEST(RegularFileTest, File_IsReadThroughLinksAndUpToItsLimit) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("file"), "abc").ok());
  ASSERT_EQ(symlink(folder.Path("file").c_str(), folder.Path("link").c_str()), 0);
  EXPECT_EQ(*ReadRegularFile(folder.Path("link")), "abc");
  EXPECT_TRUE(absl::IsResourceExhausted(ReadRegularFile(folder.Path("file"), 2).status()));
  EXPECT_TRUE(absl::IsNotFound(ReadRegularFile(folder.Path("none")).status()));
}

}  // namespace
}  // namespace muster
