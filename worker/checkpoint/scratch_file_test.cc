#include "worker/checkpoint/scratch_file.h"

#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>

#include <algorithm>
#include <cstring>
#include <memory>
#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/aligned_memory.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

constexpr uint64_t kBytes = 3 * kDirectAlignment;

class ScratchFileTest : public testing::Test {
 protected:
  ScratchFileTest() {
    EXPECT_TRUE(memory_.Grow(2 * kBytes).ok());
    for (size_t i = 0; i < 2 * kBytes; ++i) memory_.data()[i] = static_cast<char>(i * 7 + i / 251);
  }

  absl::StatusOr<std::shared_ptr<ScratchFile>> Create() {
    return ScratchFile::Create(folder_.Path("state"), &system_);
  }

  // Expects that bytes written at `offset` are read back.
  void ExpectKeeps(ScratchFile& file) {
    const absl::StatusOr<uint64_t> first = file.Reserve(kBytes), second = file.Reserve(1);
    ASSERT_TRUE(first.ok() && second.ok()) << first.status() << second.status();
    EXPECT_EQ(*second, *first + kBytes);
    EXPECT_EQ(file.size(), *second + kDirectAlignment);
    const absl::string_view contents(memory_.data(), kBytes);
    ASSERT_TRUE(file.Write(*first, contents).ok());
    AlignedMemory read;
    ASSERT_TRUE(read.Grow(kBytes).ok());
    const absl::Status status = file.Read(*first, read.data(), kBytes);
    ASSERT_TRUE(status.ok()) << status;
    EXPECT_EQ(absl::string_view(read.data(), kBytes), contents);
    // Reserved bytes that were not written are zeros.
    ASSERT_TRUE(file.Read(*second, read.data(), kDirectAlignment).ok());
    EXPECT_EQ(absl::string_view(read.data(), kDirectAlignment),
              std::string(kDirectAlignment, '\0'));
  }

  TestFolder folder_;
  DirectFileSystem system_;
  AlignedMemory memory_;
};

TEST_F(ScratchFileTest, Bytes_ComeBack) {
  const auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectKeeps(**file);
}

TEST_F(ScratchFileTest, File_HasNoName) {
  const auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  EXPECT_THAT(*ListDirectory(folder_.Path("state")), IsEmpty());
}

TEST_F(ScratchFileTest, FileSystemThatRefusesDirectTransfers_IsUsedThroughTheCache) {
  system_.pwrite = [](int fd, const void* from, size_t size, off_t at) -> ssize_t {
    if ((fcntl(fd, F_GETFL) & O_DIRECT) != 0) {
      errno = EINVAL;
      return -1;
    }
    return ::pwrite(fd, from, size, at);
  };
  const auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectKeeps(**file);
  EXPECT_FALSE((*file)->direct());
}

TEST_F(ScratchFileTest, TransfersCutShort_AreContinued) {
  system_.pwrite = [](int fd, const void* from, size_t size, off_t at) {
    return ::pwrite(fd, from, std::min<size_t>(size, kDirectAlignment), at);
  };
  system_.pread = [](int fd, void* to, size_t size, off_t at) {
    return ::pread(fd, to, std::min<size_t>(size, kDirectAlignment), at);
  };
  const auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectKeeps(**file);
}

TEST_F(ScratchFileTest, FileSystemThatCannotReserve_IsUsedAllTheSame) {
  system_.allocate = [](int, off_t) {
    errno = EOPNOTSUPP;
    return -1;
  };
  const auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  ExpectKeeps(**file);
}

TEST_F(ScratchFileTest, FullDisk_IsSaidWhenRoomIsReserved) {
  const auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  system_.allocate = [](int, off_t) {
    errno = ENOSPC;
    return -1;
  };
  const absl::Status status = (*file)->Reserve(kBytes).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              AllOf(HasSubstr("cannot reserve 12288 bytes"), HasSubstr(folder_.Path("state"))));
  EXPECT_EQ((*file)->size(), 0u);
}

TEST_F(ScratchFileTest, LimitOfFileSizes_IsSaidBeforeTheKernelEndsTheProcess) {
  const auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  rlimit before;
  ASSERT_EQ(getrlimit(RLIMIT_FSIZE, &before), 0);
  const rlimit low = {kBytes, before.rlim_max};
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &low), 0);
  const absl::Status status = (*file)->Reserve(2 * kBytes).status();
  ASSERT_EQ(setrlimit(RLIMIT_FSIZE, &before), 0);
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted) << status;
  EXPECT_EQ((*file)->size(), 0u);
}

TEST_F(ScratchFileTest, DiskThatFails_IsNamed) {
  const auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->Reserve(kBytes).ok());
  system_.pread = [](int, void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  system_.pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
    errno = EIO;
    return -1;
  };
  EXPECT_THAT(
      std::string((*file)->Read(0, memory_.data(), kBytes).message()),
      AllOf(HasSubstr("cannot read the file for offloaded state in " + folder_.Path("state")),
            HasSubstr("at byte 0")));
  EXPECT_THAT(std::string((*file)->Write(0, absl::string_view(memory_.data(), kBytes)).message()),
              HasSubstr("cannot write the file for offloaded state in " + folder_.Path("state")));
}

TEST_F(ScratchFileTest, Map_OutlivesTheFile) {
  auto file = Create();
  ASSERT_TRUE(file.ok()) << file.status();
  ASSERT_TRUE((*file)->Reserve(2 * kBytes).ok());
  const absl::string_view contents(memory_.data() + kBytes, kBytes);
  ASSERT_TRUE((*file)->Write(kBytes, contents).ok());
  const absl::StatusOr<std::shared_ptr<char>> mapped = (*file)->Map(kBytes, kBytes);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  file->reset();
  EXPECT_EQ(absl::string_view(mapped->get(), kBytes), contents);
}

TEST_F(ScratchFileTest, FolderThatCannotBeMade_IsNamed) {
  ASSERT_TRUE(WriteFileAtomically(folder_.Path("file"), "").ok());
  const absl::Status status = ScratchFile::Create(folder_.Path("file/state")).status();
  EXPECT_FALSE(status.ok());
  EXPECT_THAT(std::string(status.message()), HasSubstr(folder_.Path("file")));
}

}  // namespace
}  // namespace muster
