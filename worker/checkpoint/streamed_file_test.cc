#include "worker/checkpoint/streamed_file.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

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
  int64_t CachedPagesNow() const {
    const CachedPages pages(fd_.get(), bytes_.size());
    int64_t count = 0;
    for (size_t page = 0; page < bytes_.size(); page += 4096) count += pages.Has(page, 1) ? 1 : 0;
    return count;
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

TEST_F(StreamedFileTest, FileThatIsNotCached_StaysSo) {
  const StreamedFile file(fd_.get(), bytes_.size());
  // A file system that reads nothing past the cache has it there afterwards.
  if (!file.direct()) return;
  DropFromCache();
  // All of a file in memory.
  const int64_t before = CachedPagesNow();
  std::vector<char> to(bytes_.size());
  ASSERT_TRUE(file.Read(0, bytes_.size(), to.data(), scratch_).ok());
  EXPECT_EQ(CachedPagesNow(), before);
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
