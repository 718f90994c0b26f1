#include "worker/checkpoint/write_at.h"

#include <fcntl.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"

namespace muster {
namespace {

TEST(WriteAtTest, Bytes_AreAtTheirOffset) {
  const TestFolder folder;
  const OwnedFd fd(open(folder.Path("file").c_str(), O_WRONLY | O_CREAT, 0666));
  ASSERT_TRUE(fd.open());
  EXPECT_TRUE(WriteAt(fd.get(), 3, "def", "cannot write file").ok());
  EXPECT_TRUE(WriteAt(fd.get(), 0, "abc", "cannot write file").ok());
  EXPECT_TRUE(WriteAt(fd.get(), 9, "", "cannot write file").ok());
  EXPECT_EQ(*ReadFile(folder.Path("file")), "abcdef");
}

TEST(WriteAtTest, FullDisk_IsTheSystemsErrorAfterTheText) {
  const OwnedFd fd(open("/dev/full", O_WRONLY));
  ASSERT_TRUE(fd.open());
  const absl::Status status = WriteAt(fd.get(), 0, "abc", "cannot write file");
  EXPECT_TRUE(absl::IsResourceExhausted(status)) << status;
  EXPECT_EQ(status.message().find("cannot write file"), 0u) << status;
}

}  // namespace
}  // namespace muster
