#include "worker/checkpoint/streamed_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>
#include <vector>

#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class StreamedFileTest : public testing::Test {
 protected:
  StreamedFileTest() {
    for (size_t i = 0; i < bytes_.size(); ++i) bytes_[i] = static_cast<char>(i * 7 + i / 4096);
    EXPECT_TRUE(WriteFileAtomically(path_, bytes_).ok());
    fd_ = OwnedFd(open(path_.c_str(), O_RDONLY | O_CLOEXEC));
    EXPECT_TRUE(fd_.open());
  }

  void DropFromCache() const {
    EXPECT_EQ(fsync(fd_.get()), 0);
    EXPECT_EQ(posix_fadvise(fd_.get(), 0, 0, POSIX_FADV_DONTNEED), 0);
  }

  const TestFolder folder_;
  const std::string path_ = folder_.Path("file");
  std::string bytes_ = std::string((3 << 20) + 1234, '\0');
  OwnedFd fd_;
  AlignedMemory scratch_, memory_;
};

TEST_F(StreamedFileTest, AnyRange_HasTheBytesOfTheFile) {
  const StreamedFile file(fd_.get(), bytes_.size());
  ASSERT_TRUE(memory_.Grow(bytes_.size() + (16 << 10)).ok());
  for (const bool cached : {true, false}) {
    for (const auto& [begin, bytes] :
         std::vector<std::pair<uint64_t, size_t>>{{0, bytes_.size()},
                                                  {0, 4096},
                                                  {8, 1 << 20},
                                                  {4090, 12},
                                                  {5000, 3000},
                                                  {bytes_.size() - 1000, 1000},
                                                  {bytes_.size() - 5000, 5000},
                                                  {77, 0}}) {
      // In place, and not.
      for (const size_t offset : {begin % 4096, begin % 4096 + 8}) {
        if (!cached) DropFromCache();
        char* const to = memory_.data() + offset;
        std::memset(memory_.data(), 0x5a, memory_.size());
        const absl::Status read = file.Read(begin, bytes, to, scratch_);
        ASSERT_TRUE(read.ok()) << read;
        EXPECT_EQ(std::memcmp(to, bytes_.data() + begin, bytes), 0) << begin << " " << bytes;
        EXPECT_EQ(to[bytes], 0x5a);
        EXPECT_TRUE(offset == 0 || to[-1] == 0x5a);
        if (!cached) DropFromCache();
        ASSERT_LE(StreamedFile::RoomFor(begin, bytes), memory_.size());
        const absl::StatusOr<size_t> fetched = file.Fetch(begin, bytes, memory_.data());
        ASSERT_TRUE(fetched.ok()) << fetched.status();
        EXPECT_EQ(std::memcmp(memory_.data() + *fetched, bytes_.data() + begin, bytes), 0);
      }
    }
  }
}

// Fakes a file system that agrees to direct I/O.
struct DirectReads {
  DirectReads() {
    system.open = [this](const char* path, int flags, mode_t mode) {
      EXPECT_TRUE((flags & O_DIRECT) != 0) << path;
      return fd = open(path, flags & ~O_DIRECT, mode);
    };
    system.pread = [this](int from, void* to, size_t size, off_t at) -> ssize_t {
      if (from != fd) {
        cached_bytes += size;
      } else if (!IsDirectAligned(to) || !IsDirectAligned(size) || !IsDirectAligned(at) ||
                 refuses) {
        errno = EINVAL;
        return -1;
      }
      return pread(from, to, from == fd ? std::min(size, most) : size, at);
    };
  }

  DirectFileSystem system;
  int fd = -1;
  bool refuses = false;
  size_t most = SIZE_MAX;  // the most bytes of a read
  size_t cached_bytes = 0;
};

TEST_F(StreamedFileTest, FileThatIsNotCached_IsReadPastTheCache) {
  DirectReads reads;
  // More than can be mapped, so it is unknown whether the file is cached.
  const StreamedFile file(fd_.get(), uint64_t{1} << 62, reads.system);
  std::string to(bytes_.size() - 100, '\0');
  ASSERT_TRUE(file.Read(100, to.size(), to.data(), scratch_).ok());
  EXPECT_TRUE(to == bytes_.substr(100));
  EXPECT_EQ(reads.cached_bytes, 0u);
  EXPECT_TRUE(file.direct());
}

// As FUSE and NFS may do.
TEST_F(StreamedFileTest, DirectReadThatStopsAnywhere_GoesOnThroughTheCache) {
  for (const size_t most : {size_t{4096}, size_t{10'000}, size_t{100}}) {
    DirectReads reads;
    reads.most = most;
    const StreamedFile file(fd_.get(), uint64_t{1} << 62, reads.system);
    std::string to(bytes_.size() - 100, '\0');
    const absl::Status read = file.Read(100, to.size(), to.data(), scratch_);
    ASSERT_TRUE(read.ok()) << most << ": " << read;
    EXPECT_TRUE(to == bytes_.substr(100)) << most;
    ASSERT_TRUE(memory_.Grow(100'000).ok());
    const absl::StatusOr<size_t> fetched = file.Fetch(5000, 50'000, memory_.data());
    ASSERT_TRUE(fetched.ok()) << most << ": " << fetched.status();
    EXPECT_EQ(std::memcmp(memory_.data() + *fetched, bytes_.data() + 5000, 50'000), 0) << most;
    EXPECT_EQ(reads.cached_bytes > 0, most % 4096 != 0);
    EXPECT_TRUE(file.direct());
  }
}

TEST_F(StreamedFileTest, DirectReadThatIsRefused_GoesThroughTheCacheFromThenOn) {
  DirectReads reads;
  reads.refuses = true;
  const StreamedFile file(fd_.get(), uint64_t{1} << 62, reads.system);
  std::string to(bytes_.size(), '\0');
  ASSERT_TRUE(file.Read(0, to.size(), to.data(), scratch_).ok());
  EXPECT_TRUE(to == bytes_);
  EXPECT_FALSE(file.direct());
}

TEST_F(StreamedFileTest, FileThatTakesTheName_IsAnotherOne) {
  ASSERT_TRUE(WriteFileAtomically(path_, std::string(bytes_.size(), 'x')).ok());
  const StreamedFile file(fd_.get(), bytes_.size());
  DropFromCache();
  std::string to(bytes_.size(), '\0');
  ASSERT_TRUE(file.Read(0, bytes_.size(), to.data(), scratch_).ok());
  EXPECT_TRUE(to == bytes_);
}

TEST_F(StreamedFileTest, FileThatBecameShorter_IsDataLoss) {
  const StreamedFile file(fd_.get(), bytes_.size());
  ASSERT_EQ(truncate(path_.c_str(), 10'000), 0);
  ASSERT_TRUE(memory_.Grow(100'000).ok());
  for (const absl::Status& status : {file.Read(4096, 50'000, memory_.data(), scratch_),
                                     file.Read(5000, 50'000, memory_.data(), scratch_),
                                     file.Fetch(4096, 50'000, memory_.data()).status()}) {
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr("ends at byte 10000"));
  }
}

}  // namespace
}  // namespace muster
