#include "base/memory_file.h"

#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>

#include "base/owned_fd.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

TEST(MemoryFile, LimitOfFileSizes_IsAnErrorAndNotASignal) {
  const OwnedFd file(memfd_create("test", MFD_CLOEXEC));
  ASSERT_GE(file.get(), 0);
  rlimit before = {};
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  rlimit small = before;
  small.rlim_cur = 4096;
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &small), 0);
  const absl::Status refused = ResizeMemoryFile(file.get(), 4097);
  const absl::Status fits = ResizeMemoryFile(file.get(), 4096);
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);

  EXPECT_EQ(refused.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(refused.message(), HasSubstr("(ulimit -f) is 4096 bytes"));
  EXPECT_TRUE(fits.ok()) << fits;
  struct stat info = {};
  ASSERT_EQ(fstat(file.get(), &info), 0);
  EXPECT_EQ(info.st_size, 4096);
}

TEST(FileIdentity, DescriptorsOfOneFileHaveOne_AndOthersAnother) {
  const OwnedFd file(memfd_create("test", MFD_CLOEXEC)), other(memfd_create("test", MFD_CLOEXEC));
  const OwnedFd again(dup(file.get()));
  ASSERT_TRUE(FileIdentity(file.get()).ok());
  EXPECT_EQ(*FileIdentity(file.get()), *FileIdentity(again.get()));
  EXPECT_NE(*FileIdentity(file.get()), *FileIdentity(other.get()));
  EXPECT_FALSE(FileIdentity(-1).ok());
}

}  // namespace
}  // namespace muster
