#include "worker/checkpoint/direct_file.h"

#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <random>
#include <set>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "absl/cleanup/cleanup.h"
#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/fake_clock.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/test_folder.h"
#include "worker/checkpoint/aligned_memory.h"
#include "worker/checkpoint/direct_pieces.h"

namespace muster {
namespace {

using ::testing::AllOf;
using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

constexpr size_t kBlock = 3 * kDirectAlignment;

class DirectFileTest : public testing::Test {
 protected:
  void TearDown() override { EXPECT_TRUE(ArmFailpoints("", "", "").ok()); }

  // Returns `bytes` bytes in which no two blocks are the same.
  absl::string_view Contents(size_t bytes) {
    EXPECT_TRUE(memory_.Grow(bytes + 1).ok());
    for (size_t i = 0; i < bytes; ++i) memory_.data()[i] = static_cast<char>(i * 7 + i / 251);
    return absl::string_view(memory_.data(), bytes);
  }

  enum class Way { kWhole, kPieces, kStreamed };

  absl::StatusOr<DirectFileWritten> Write(absl::string_view contents) {
    if (way_ == Way::kWhole) return WriteDirectFile(path_, contents, options_);
    if (way_ == Way::kPieces) {
      // Pieces that end in the middle of blocks, several in a block, several blocks, and an empty
      // one.
      std::vector<absl::string_view> pieces;
      for (size_t size = 1; !contents.empty(); size = size * 5 % (3 * kBlock)) {
        pieces.push_back(contents.substr(0, size));
        pieces.push_back(contents.substr(0, 0));
        contents.remove_prefix(pieces.rbegin()[1].size());
      }
      return WriteDirectPieces(path_, pieces, options_);
    }
    absl::StatusOr<std::unique_ptr<DirectFileStream>> stream =
        DirectFileStream::Create(path_, contents.size(), options_);
    if (!stream.ok()) return stream.status();
    // Parts that end in the middle of blocks, and one that is several blocks.
    for (size_t size = 1; !contents.empty(); size = size * 5 % (3 * kBlock)) {
      const absl::string_view part = contents.substr(0, size);
      if (absl::Status status = (*stream)->Append(part); !status.ok()) return status;
      contents.remove_prefix(part.size());
    }
    return (*stream)->Finish();
  }

  // Writes the contents, and expects the file to have them.
  DirectFileWritten ExpectWritten(size_t bytes) {
    const absl::string_view contents = Contents(bytes);
    const absl::StatusOr<DirectFileWritten> written = Write(contents);
    EXPECT_TRUE(written.ok()) << written.status();
    if (!written.ok()) return {};
    const absl::StatusOr<std::string> found = ReadFile(path_);
    EXPECT_TRUE(found.ok() && *found == contents) << bytes << " bytes";
    EXPECT_EQ(written->digest, DigestBytes(contents));
    EXPECT_EQ(written->blocks.xxh3.size(), (bytes + kBlock - 1) / kBlock);
    for (size_t i = 0; i < written->blocks.xxh3.size(); ++i) {
      EXPECT_EQ(written->blocks.xxh3[i], DigestBlock(contents.substr(i * kBlock, kBlock)));
    }
    return *written;
  }

  // Returns the bytes that ReadDirectFile passes on, put together; others are '?'.
  absl::StatusOr<std::string> Read(const DirectFileWritten& written,
                                   std::optional<FileRange> range = std::nullopt) {
    std::string found(written.digest.bytes, '?');
    const absl::Status status = ReadDirectFile(
        path_, written.digest.bytes, written.blocks, range,
        [&](uint64_t offset, absl::string_view block) {
          std::memcpy(found.data() + offset, block.data(), block.size());
          return absl::OkStatus();
        },
        options_);
    if (!status.ok()) return status;
    return found;
  }

  Way way_ = Way::kWhole;
  const TestFolder test_folder_;
  const std::string dir_ = test_folder_.path();
  std::string path_ = test_folder_.Path("file");
  AlignedMemory memory_;
  DirectFileSystem system_;
  DirectFileOptions options_{.block_bytes = kBlock, .in_flight = 3, .system = &system_};
};

// Tests for a whole file in memory and for bytes that come in parts.
class DirectWriteTest : public DirectFileTest, public testing::WithParamInterface<int> {
 protected:
  void SetUp() override { way_ = static_cast<Way>(GetParam()); }
};

std::string NameOfWay(const testing::TestParamInfo<int>& info) {
  return std::vector<std::string>{"Whole", "Pieces", "Streamed"}[info.param];
}

INSTANTIATE_TEST_SUITE_P(All, DirectWriteTest, testing::Range(0, 3), NameOfWay);

TEST_P(DirectWriteTest, FilesOnTheSystemsOwnFileSystemsAndInMemory_AreWrittenAndReadBack) {
  options_.system = nullptr;
  // Containers may share the folder.
  const std::string in_memory =
      absl::StrCat("/dev/shm/muster-direct-file-test-", getpid(), "-", std::random_device()());
  const absl::Cleanup removes = [&] { unlink(in_memory.c_str()); };
  for (const std::string& path : {path_, in_memory}) {
    path_ = path;
    for (const size_t bytes :
         {size_t{0}, size_t{1}, kBlock - 1, kBlock, kBlock + 1, 40 * kBlock + 5000}) {
      const DirectFileWritten written = ExpectWritten(bytes);
      EXPECT_EQ(*Read(written), Contents(bytes));
    }
  }
  EXPECT_FALSE(ExpectWritten(kBlock).direct);
}

TEST_P(DirectWriteTest, FilesThroughTheCache_AreWrittenFromOneThreadAtATime) {
  system_.open = [](const char* path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) == 0) return ::open(path, flags, mode);
    errno = EINVAL;
    return -1;
  };
  std::atomic<int> now{0};
  system_.pwrite = [&](int fd, const void* from, size_t size, off_t at) {
    EXPECT_EQ(++now, 1);
    const ssize_t n = ::pwrite(fd, from, size, at);
    --now;
    return n;
  };
  ExpectWritten(40 * kBlock + 5000);
}

// The pace of a save beside training depends on this.
TEST_F(DirectFileTest, ThreadThatWrote_IsTheCallersAloneThroughTheCache_AndAStartedOnePastIt) {
  Mutex mu;
  std::set<std::thread::id> wrote;
  options_.wrote = [&](uint64_t) {
    MutexLock lock(&mu);
    wrote.insert(std::this_thread::get_id());
  };
  const auto write = [&](size_t bytes, bool direct) {
    // The fake file system decides whether direct I/O works.
    system_.open = [direct](const char* path, int flags, mode_t mode) {
      if (direct || (flags & O_DIRECT) == 0) return ::open(path, flags & ~O_DIRECT, mode);
      errno = EINVAL;
      return -1;
    };
    wrote.clear();
    EXPECT_EQ(ExpectWritten(bytes).direct, direct);
    return wrote;
  };
  const std::thread::id caller = std::this_thread::get_id();
  EXPECT_THAT(write(40 * kBlock, false), ElementsAre(caller));
  EXPECT_THAT(write(kBlock, false), ElementsAre(caller));
  EXPECT_THAT(write(kBlock, true), ElementsAre(caller));
  EXPECT_THAT(write(40 * kBlock, true), AllOf(Not(IsEmpty()), Not(Contains(caller))));
}

TEST_P(DirectWriteTest, FileSystemThatIsFullLater_IsAnErrorWithTheOffset) {
  system_.pwrite = [](int fd, const void* from, size_t size, off_t at) -> ssize_t {
    if (at < static_cast<off_t>(2 * kBlock)) return ::pwrite(fd, from, size, at);
    errno = ENOSPC;
    return -1;
  };
  const absl::Status status = Write(Contents(9 * kBlock)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr(" at byte "));
}

TEST_P(DirectWriteTest, FilesOfAllSizes_AreWrittenAndReadBack) {
  for (const size_t bytes :
       {size_t{0}, size_t{1}, kDirectAlignment - 1, kDirectAlignment, kDirectAlignment + 1,
        kBlock - 1, kBlock, kBlock + 1, 7 * kBlock, 7 * kBlock + 5000}) {
    for (const int in_flight : {1, 4}) {
      options_.in_flight = in_flight;
      const DirectFileWritten written = ExpectWritten(bytes);
      const absl::StatusOr<std::string> found = Read(written);
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(*found, Contents(bytes));
    }
  }
}

TEST_P(DirectWriteTest, LargerFileOfTheSameName_IsReplaced) {
  ExpectWritten(9 * kBlock);
  ExpectWritten(10);
}

TEST_F(DirectFileTest, CheckBlocks_FindsTheDamagedBlockOfARange) {
  std::string contents(Contents(5 * kBlock + 3));
  BlockDigests blocks{.block_bytes = kBlock, .xxh3 = {}};
  for (size_t at = 0; at < contents.size(); at += kBlock) {
    blocks.xxh3.push_back(DigestBlock(absl::string_view(contents).substr(at, kBlock)));
  }
  EXPECT_TRUE(CheckBlocks("f", contents, blocks, std::nullopt, 3).ok());
  contents[3 * kBlock + 1] ^= 1;
  EXPECT_TRUE(CheckBlocks("f", contents, blocks, FileRange{0, 3 * kBlock}, 3).ok());
  const absl::Status status = CheckBlocks("f", contents, blocks, std::nullopt, 3);
  EXPECT_TRUE(absl::IsDataLoss(status));
  EXPECT_THAT(std::string(status.message()), HasSubstr("f: is damaged: block 3 of 6"));
  EXPECT_TRUE(absl::IsInvalidArgument(
      CheckBlocks("f", absl::string_view(contents).substr(kBlock), blocks, std::nullopt, 3)));
}

TEST_F(DirectFileTest, MemoryThatIsNotAligned_GoesThroughTheCache) {
  const absl::string_view contents = Contents(4 * kBlock).substr(1);
  const absl::StatusOr<DirectFileWritten> written = Write(contents);
  ASSERT_TRUE(written.ok()) << written.status();
  EXPECT_FALSE(written->direct);
  EXPECT_EQ(*ReadFile(path_), contents);
}

TEST_P(DirectWriteTest, UnalignedBytes_AreWrittenPastTheCache) {
  system_.pwrite = [](int fd, const void* from, size_t size, off_t at) -> ssize_t {
    EXPECT_EQ(reinterpret_cast<uintptr_t>(from) % kDirectAlignment, 0u);
    EXPECT_EQ(at % kDirectAlignment, 0u);
    EXPECT_EQ(size % kDirectAlignment, 0u);
    return ::pwrite(fd, from, size, at);
  };
  ExpectWritten(4 * kBlock + 77);
}

TEST_F(DirectFileTest, StreamOfAnotherSize_IsRefused) {
  const absl::string_view contents = Contents(kBlock);
  auto stream = DirectFileStream::Create(path_, kBlock, options_);
  ASSERT_TRUE(stream.ok()) << stream.status();
  ASSERT_TRUE((*stream)->Append(contents.substr(1)).ok());
  EXPECT_THAT(std::string((*stream)->Append(contents).message()),
              HasSubstr(absl::StrCat("more than the ", kBlock, " bytes")));
  EXPECT_THAT(std::string((*stream)->Finish().status().message()),
              HasSubstr(absl::StrCat("got ", kBlock - 1, " of the ", kBlock, " bytes")));
}

TEST_F(DirectFileTest, StreamWithoutThreads_IsWrittenByTheCaller) {
  way_ = Way::kStreamed;
  system_.gives_thread = [] { return false; };
  ExpectWritten(20 * kBlock + 5000);  // many more blocks than are under way at a time
}

TEST_F(DirectFileTest, StreamOfBytesThatAreElsewhere_PutsThemIntoPinnedBlocks) {
  const absl::string_view contents = Contents(5 * kBlock + 100);
  std::set<const char*> pinned;
  const HostPinning pinning{
      .pin = [&](void* data,
                 size_t) { return pinned.insert(static_cast<const char*>(data)).second; },
      .unpin = [&](void* data) { pinned.erase(static_cast<const char*>(data)); }};
  options_.pinning = &pinning;
  {
    auto stream = DirectFileStream::Create(path_, contents.size(), options_);
    ASSERT_TRUE(stream.ok()) << stream.status();
    ASSERT_TRUE((*stream)->Append(contents.substr(0, 10)).ok());
    uint64_t next = 0;
    const absl::Status appended =
        (*stream)->AppendBy(contents.size() - 10, [&](char* to, uint64_t offset, size_t size) {
          EXPECT_EQ(offset, next);
          next += size;
          EXPECT_LE(size, kBlock);
          const auto block = pinned.upper_bound(to);
          EXPECT_NE(block, pinned.begin()) << "memory that is not pinned";
          std::memcpy(to, contents.data() + 10 + offset, size);
        });
    ASSERT_TRUE(appended.ok()) << appended;
    EXPECT_EQ((*stream)->AppendBy(1, [](char*, uint64_t, size_t) {}).code(),
              absl::StatusCode::kInvalidArgument);
    const auto written = (*stream)->Finish();
    ASSERT_TRUE(written.ok()) << written.status();
    EXPECT_EQ(written->digest, DigestBytes(contents));
    EXPECT_EQ(*ReadFile(path_), contents);
  }
  EXPECT_THAT(pinned, IsEmpty());
}

TEST_F(DirectFileTest, StreamWhoseSourceFails_EndsItsWrites) {
  const absl::string_view contents = Contents(5 * kBlock);
  auto stream = DirectFileStream::Create(path_, contents.size(), options_);
  ASSERT_TRUE(stream.ok()) << stream.status();
  const auto fill = [&](char* to, uint64_t offset, size_t size) {
    if (offset >= 3 * kBlock) throw std::runtime_error("the device is lost");
    std::memcpy(to, contents.data() + offset, size);
  };
  EXPECT_THROW((*stream)->AppendBy(contents.size(), fill).IgnoreError(), std::runtime_error);
  stream->reset();
}

TEST_F(DirectFileTest, StreamThatIsGivenUp_EndsItsWrites) {
  std::atomic<int> writing{0};
  system_.pwrite = [&](int fd, const void* from, size_t size, off_t at) {
    ++writing;
    const ssize_t n = ::pwrite(fd, from, size, at);
    --writing;
    return n;
  };
  {
    auto stream = DirectFileStream::Create(path_, 9 * kBlock, options_);
    ASSERT_TRUE(stream.ok()) << stream.status();
    ASSERT_TRUE((*stream)->Append(Contents(5 * kBlock + 1)).ok());
  }
  EXPECT_EQ(writing, 0);
}

// At the end of a disk, a file system may write less than a page and report that: direct I/O is
// given up for the rest, which ends with the system's error or the whole file.
TEST_P(DirectWriteTest, ShortDirectWritesOfLessThanAPage_AreContinuedThroughTheCache) {
  std::atomic<int> shorts{0};
  system_.pwrite = [&](int fd, const void* from, size_t size, off_t at) -> ssize_t {
    const bool direct = (fcntl(fd, F_GETFL) & O_DIRECT) != 0;
    if (!direct) return ::pwrite(fd, from, size, at);
    ++shorts;
    // Fewer bytes than direct I/O can continue from, written through the cache, as the kernel does.
    std::string start(static_cast<const char*>(from), 100);
    const int cached = ::open(path_.c_str(), O_WRONLY | O_CLOEXEC);
    const ssize_t n = ::pwrite(cached, start.data(), start.size(), at);
    close(cached);
    return n;
  };
  const DirectFileWritten written = ExpectWritten(3 * kBlock + 5);
  EXPECT_FALSE(written.direct);
  EXPECT_GE(shorts, 1);
}

TEST_P(DirectWriteTest, FileSystemThatRefusesDirectOpen_IsWrittenAndReadThroughTheCache) {
  system_.open = [](const char* path, int flags, mode_t mode) {
    if ((flags & O_DIRECT) == 0) return ::open(path, flags, mode);
    errno = EINVAL;
    return -1;
  };
  const DirectFileWritten written = ExpectWritten(5 * kBlock + 17);
  EXPECT_FALSE(written.direct);
  EXPECT_EQ(*Read(written), Contents(5 * kBlock + 17));
}

TEST_P(DirectWriteTest, FileSystemThatRefusesDirectTransfers_IsWrittenAndReadThroughTheCache) {
  const auto is_direct = [](int fd) { return (fcntl(fd, F_GETFL) & O_DIRECT) != 0; };
  system_.pwrite = [&](int fd, const void* from, size_t size, off_t at) -> ssize_t {
    if (!is_direct(fd)) return ::pwrite(fd, from, size, at);
    errno = EINVAL;
    return -1;
  };
  std::atomic<bool> refused{false};
  system_.pread = [&](int fd, void* to, size_t size, off_t at) -> ssize_t {
    if (!is_direct(fd)) return ::pread(fd, to, size, at);
    refused = true;
    errno = EINVAL;
    return -1;
  };
  const DirectFileWritten written = ExpectWritten(5 * kBlock + 17);
  EXPECT_FALSE(written.direct);
  EXPECT_EQ(*Read(written), Contents(5 * kBlock + 17));
}

TEST_P(DirectWriteTest, ShortAndInterruptedTransfers_AreContinued) {
  std::atomic<int> calls{0};
  system_.pwrite = [&](int fd, const void* from, size_t size, off_t at) -> ssize_t {
    if (++calls % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    const ssize_t n = ::pwrite(fd, from, size, at);
    // Ends at an offset where direct I/O cannot continue.
    return n > static_cast<ssize_t>(kDirectAlignment) ? n / 2 + 1 : n;
  };
  system_.pread = [&](int fd, void* to, size_t size, off_t at) -> ssize_t {
    if (++calls % 3 == 0) {
      errno = EINTR;
      return -1;
    }
    const ssize_t n = ::pread(fd, to, size, at);
    return n > 1000 ? n / 2 + 1 : n;
  };
  const auto interrupted_once = [](auto call) {
    return [call, calls = 0](auto... arguments) mutable {
      if (++calls > 1) return call(arguments...);
      errno = EINTR;
      return -1;
    };
  };
  system_.allocate = interrupted_once(system_.allocate);
  system_.fsync = interrupted_once(system_.fsync);
  const DirectFileWritten written = ExpectWritten(6 * kBlock + 6000);
  EXPECT_EQ(*Read(written), Contents(6 * kBlock + 6000));
}

TEST_P(DirectWriteTest, FullDisk_IsFoundBeforeAnythingIsWritten) {
  system_.allocate = [](int, off_t) {
    errno = ENOSPC;
    return -1;
  };
  system_.pwrite = [](int, const void*, size_t, off_t) -> ssize_t {
    ADD_FAILURE() << "written";
    return -1;
  };
  const absl::Status status = Write(Contents(2 * kBlock)).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()),
              HasSubstr(absl::StrCat("cannot reserve ", 2 * kBlock, " bytes for ", path_,
                                     ": No space left on device")));
}

TEST_P(DirectWriteTest, FileSystemWithoutReservations_IsWritten) {
  system_.allocate = [](int, off_t) {
    errno = EOPNOTSUPP;
    return -1;
  };
  ExpectWritten(3 * kBlock + 1);
}

TEST_P(DirectWriteTest, FailedWrite_NamesFileAndOffset) {
  for (const auto& [error, words] :
       {std::pair(ENOSPC, "No space left on device"), std::pair(EIO, "Input/output error")}) {
    system_.pwrite = [error = error](int fd, const void* from, size_t size, off_t at) -> ssize_t {
      if (at != 2 * kBlock) return ::pwrite(fd, from, size, at);
      errno = error;
      return -1;
    };
    const absl::Status status = Write(Contents(5 * kBlock)).status();
    EXPECT_THAT(std::string(status.message()),
                AllOf(HasSubstr(absl::StrCat("cannot write ", path_, " at byte ", 2 * kBlock)),
                      HasSubstr(words)));
    EXPECT_EQ(absl::IsResourceExhausted(status), error == ENOSPC);
  }
}

TEST_P(DirectWriteTest, FailedSync_IsAnError) {
  system_.fsync = [](int) {
    errno = EIO;
    return -1;
  };
  EXPECT_THAT(std::string(Write(Contents(kBlock)).status().message()),
              HasSubstr(absl::StrCat("cannot sync ", path_)));
}

TEST_P(DirectWriteTest, Failpoints_FailTheWrite) {
  for (const char* spec : {"worker.checkpoint_block=error:RESOURCE_EXHAUSTED@2",
                           "worker.checkpoint_sync=error:RESOURCE_EXHAUSTED"}) {
    ASSERT_TRUE(ArmFailpoints(spec, "", "").ok());
    EXPECT_EQ(Write(Contents(4 * kBlock)).status().code(), absl::StatusCode::kResourceExhausted);
  }
}

TEST_P(DirectWriteTest, MissingFolder_IsAnErrorWithThePath) {
  path_ = JoinPath(dir_, "missing/file");
  EXPECT_THAT(std::string(Write(Contents(1)).status().message()), HasSubstr(path_));
}

TEST_P(DirectWriteTest, RateLimit_SpreadsTheBlocks) {
  FakeClock clock;
  RateLimiter limiter(static_cast<int64_t>(kBlock), clock);  // a block a second
  options_.limiter = &limiter;
  Mutex mu;
  std::vector<absl::Duration> waits;
  system_.wait = [&](absl::Duration duration) {
    MutexLock lock(&mu);
    waits.push_back(duration);
  };
  ExpectWritten(4 * kBlock);
  std::sort(waits.begin(), waits.end());
  EXPECT_THAT(waits, testing::ElementsAre(absl::Seconds(1), absl::Seconds(2), absl::Seconds(3)));
}

TEST_P(DirectWriteTest, BlocksUnderWay_AreNeverMoreThanAsked) {
  std::atomic<int> now{0}, most{0};
  system_.pwrite = [&](int fd, const void* from, size_t size, off_t at) {
    const int running = ++now;
    for (int seen = most; running > seen && !most.compare_exchange_weak(seen, running);) {
    }
    const ssize_t n = ::pwrite(fd, from, size, at);
    --now;
    return n;
  };
  ExpectWritten(40 * kBlock);
  // One more thread copies.
  EXPECT_LE(most, way_ == Way::kPieces ? 4 : 3);
}

TEST_F(DirectFileTest, Range_ReadsOnlyItsBlocks) {
  const DirectFileWritten written = ExpectWritten(6 * kBlock + 100);
  const auto expect = [&](FileRange range, size_t first, size_t end) {
    const absl::StatusOr<std::string> found = Read(written, range);
    ASSERT_TRUE(found.ok()) << found.status();
    std::string expected(found->size(), '?');
    const absl::string_view contents = Contents(expected.size());
    for (size_t i = first * kBlock; i < std::min(end * kBlock, expected.size()); ++i) {
      expected[i] = contents[i];
    }
    EXPECT_EQ(*found, expected);
  };
  expect({0, 0}, 0, 0);
  expect({kBlock - 1, kBlock + 1}, 0, 2);
  expect({2 * kBlock, 3 * kBlock}, 2, 3);
  expect({6 * kBlock + 99, 6 * kBlock + 100}, 6, 7);
  EXPECT_EQ(Read(written, FileRange{0, 6 * kBlock + 101}).status().code(),
            absl::StatusCode::kInvalidArgument);
}

TEST_F(DirectFileTest, FlippedBit_IsFoundInItsBlockAndOnlyThere) {
  const DirectFileWritten written = ExpectWritten(4 * kBlock + 100);
  const std::string good = *ReadFile(path_);
  for (const size_t byte : {size_t{0}, 2 * kBlock + 77, 4 * kBlock + 99}) {
    std::string bad = good;
    bad[byte] ^= 4;
    ASSERT_TRUE(WriteFileAtomically(path_, bad).ok());
    const size_t block = byte / kBlock;
    const absl::Status status = Read(written).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()),
                HasSubstr(absl::StrCat(path_, ": is damaged: block ", block, " of 5 (bytes ",
                                       block * kBlock, " to ")));
    const size_t other = block == 1 ? 3 : 1;
    EXPECT_TRUE(Read(written, FileRange{other * kBlock, other * kBlock + 1}).ok());
  }
}

TEST_F(DirectFileTest, FileOfAnotherSize_IsDataLoss) {
  const DirectFileWritten written = ExpectWritten(3 * kBlock);
  const std::string good = *ReadFile(path_);
  for (const std::string& bad : {good.substr(1), good + "x", std::string()}) {
    ASSERT_TRUE(WriteFileAtomically(path_, bad).ok());
    const absl::Status status = Read(written).status();
    EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
    EXPECT_THAT(std::string(status.message()), HasSubstr("but the manifest says"));
  }
}

TEST_F(DirectFileTest, FileThatShrinksWhileItIsRead_IsDataLoss) {
  const DirectFileWritten written = ExpectWritten(3 * kBlock);
  system_.pread = [](int, void*, size_t, off_t) -> ssize_t { return 0; };
  const absl::Status status = Read(written).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kDataLoss);
  EXPECT_THAT(std::string(status.message()), HasSubstr("ends at byte"));
}

TEST_F(DirectFileTest, FailedRead_NamesFileAndOffset) {
  const DirectFileWritten written = ExpectWritten(3 * kBlock);
  system_.pread = [](int fd, void* to, size_t size, off_t at) -> ssize_t {
    if (at != kBlock) return ::pread(fd, to, size, at);
    errno = EIO;
    return -1;
  };
  EXPECT_THAT(std::string(Read(written).status().message()),
              HasSubstr(absl::StrCat("cannot read ", path_, " at byte ", kBlock)));
}

TEST_F(DirectFileTest, DigestsThatDoNotFit_AreRefused) {
  DirectFileWritten written = ExpectWritten(3 * kBlock);
  written.blocks.xxh3.pop_back();
  EXPECT_EQ(Read(written).status().code(), absl::StatusCode::kInvalidArgument);
  written.blocks = {.block_bytes = 1000, .xxh3 = std::vector<uint64_t>(37)};
  EXPECT_EQ(Read(written).status().code(), absl::StatusCode::kInvalidArgument);
  written.blocks = {};
  EXPECT_EQ(Read(written).status().code(), absl::StatusCode::kInvalidArgument);
}

TEST_F(DirectFileTest, TakerThatFails_EndsTheRead) {
  const DirectFileWritten written = ExpectWritten(30 * kBlock);
  options_.in_flight = 1;
  int taken = 0;
  const absl::Status status = ReadDirectFile(
      path_, written.digest.bytes, written.blocks, std::nullopt,
      [&](uint64_t, absl::string_view) {
        return ++taken == 2 ? absl::AbortedError("enough") : absl::OkStatus();
      },
      options_);
  EXPECT_EQ(status.message(), "enough");
  EXPECT_EQ(taken, 2);
}

}  // namespace
}  // namespace muster
