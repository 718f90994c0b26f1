#include "worker/checkpoint/mapped_file.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <string>
#include <utility>

#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

constexpr uint64_t kBytes = 3'000'000;

std::string Contents() {
  std::string contents(kBytes, '\0');
  for (size_t i = 0; i < contents.size(); ++i) contents[i] = static_cast<char>(i % 251);
  return contents;
}

// Sets a limit of this process.
void SetLimit(int resource, rlim_t soft) {
  rlimit limit = {};
  EXPECT_EQ(getrlimit(resource, &limit), 0);
  limit.rlim_cur = std::min(soft, limit.rlim_max);
  EXPECT_EQ(setrlimit(resource, &limit), 0);
}

class MappedFiles : public testing::Test {
 protected:
  MappedFiles() { std::ofstream(path_) << Contents(); }

  MappedFile Map() const {
    const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
    absl::StatusOr<MappedFile> mapped = MappedFile::Of(fd, kBytes);
    close(fd);
    EXPECT_TRUE(mapped.ok()) << mapped.status();
    return *std::move(mapped);
  }
  void DropFromCache() const {
    const int fd = open(path_.c_str(), O_RDONLY);
    EXPECT_EQ(fsync(fd), 0);
    EXPECT_EQ(posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED), 0);
    close(fd);
  }

  const TestFolder folder_;
  const std::string path_ = folder_.Path("file");
};

TEST_F(MappedFiles, FileThatIsClosed_IsThereWithAllItsBytes) {
  MappedFile mapped = Map();
  const MappedFile moved = std::move(mapped);
  EXPECT_EQ(moved.size(), kBytes);
  EXPECT_EQ(std::string(moved.data(), kBytes), Contents());
  EXPECT_TRUE(moved.IsInMemory(0, kBytes));
}

TEST_F(MappedFiles, PagesThatAreLoaded_AreInMemory) {
  DropFromCache();
  const MappedFile mapped = Map();
  // A file system in memory keeps its pages.
  const bool is_dropped = !mapped.IsInMemory(1'000'001, 999);
  for (const auto& [begin, bytes] :
       {std::pair<uint64_t, uint64_t>{1'000'001, 999}, {kBytes - 1, 1}, {0, kBytes}}) {
    EXPECT_TRUE(mapped.LoadPages(begin, bytes).ok());
    EXPECT_TRUE(mapped.IsInMemory(begin, bytes)) << begin << " " << is_dropped;
  }
}

TEST_F(MappedFiles, RangeBeyondTheEnd_IsNotThere) {
  const MappedFile mapped = Map();
  EXPECT_FALSE(mapped.IsInMemory(kBytes - 1, 2));
  EXPECT_FALSE(mapped.IsInMemory(kBytes, 1));
  EXPECT_TRUE(absl::IsOutOfRange(mapped.LoadPages(kBytes - 1, 2)));
  EXPECT_TRUE(absl::IsOutOfRange(mapped.LoadPages(~uint64_t{0}, 1)));
}

TEST_F(MappedFiles, PagesThatTheFileHasLost_AreAnErrorWithoutASignal) {
  const MappedFile mapped = Map();
  ASSERT_EQ(truncate(path_.c_str(), 1'000'000), 0);
  EXPECT_TRUE(mapped.LoadPages(0, 1'000'000).ok());
  const absl::Status lost = mapped.LoadPages(0, kBytes);
  EXPECT_TRUE(absl::IsDataLoss(lost)) << lost;
  EXPECT_THAT(std::string(lost.message()), HasSubstr("the file has become shorter"));
}

TEST_F(MappedFiles, WriteIntoIt_EndsTheProcessAndLeavesTheFile) {
  const MappedFile mapped = Map();
  // By SIGSEGV, or by a sanitizer instead.
  EXPECT_DEATH(*const_cast<volatile char*>(mapped.data()) = 'x', "");
  std::ifstream file(path_);
  EXPECT_EQ(file.get(), 0);
}

TEST_F(MappedFiles, EmptyFile_HasNoPages) {
  const auto mapped = MappedFile::Of(-1, 0);
  ASSERT_TRUE(mapped.ok()) << mapped.status();
  EXPECT_EQ(mapped->data(), nullptr);
  EXPECT_TRUE(mapped->IsInMemory(0, 0));
  EXPECT_TRUE(mapped->LoadPages(0, 0).ok());
}

TEST_F(MappedFiles, ProcessWithoutAddresses_IsToldWhatToDo) {
  EXPECT_EXIT(
      {
        const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
        SetLimit(RLIMIT_AS, 0);
        const absl::Status status = MappedFile::Of(fd, uint64_t{1} << 30).status();
        SetLimit(RLIMIT_AS, RLIM_INFINITY);
        std::fprintf(stderr, "%s\n", status.ToString().c_str());
        _exit(absl::IsResourceExhausted(status) ? 0 : 1);
      },
      testing::ExitedWithCode(0), "1.00 GiB of addresses; raise the limit");
}

// No limit of a process's own memory counts memory that may only be read.
TEST_F(MappedFiles, LimitOfTheProcessesMemory_DoesNotCount) {
  EXPECT_EXIT(
      {
        const int fd = open(path_.c_str(), O_RDONLY | O_CLOEXEC);
        SetLimit(RLIMIT_DATA, 0);
        _exit(MappedFile::Of(fd, kBytes).ok() ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

}  // namespace
}  // namespace muster
