#include "agent/attempt_log.h"

#include <gtest/gtest.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "agent/log_file.h"
#include "base/fake_clock.h"
#include "base/file.h"
#include "base/test_folder.h"

namespace {
std::function<void()> before_pread;  // called once
}  // namespace

// Replaces the C library's.
extern "C" ssize_t pread(int fd, void* data, size_t bytes, off_t offset) {
  if (before_pread != nullptr) std::exchange(before_pread, nullptr)();
  return syscall(SYS_pread64, fd, data, bytes, offset);
}
// Replaces the checked variant.
extern "C" ssize_t __pread_chk(int fd, void* data, size_t bytes, off_t offset, size_t /*room*/) {
  return pread(fd, data, bytes, offset);
}

namespace muster::agent {
namespace {

class AttemptLogTest : public testing::Test {
 protected:
  void Open(int64_t max_bytes, int files) {
    log_ = *LogFile::Open(path_, {.max_bytes = max_bytes, .files = files});
  }
  // Reads from `offset` to the end, in pieces of this size.
  std::string ReadAll(int64_t offset, size_t piece) {
    std::string all;
    while (true) {
      const absl::StatusOr<LogPiece> read = ReadLogPiece(path_, offset, 0, piece);
      EXPECT_TRUE(read.ok()) << read.status();
      if (!read.ok() || read->data.empty()) return all;
      if (all.empty()) first_ = read->offset;
      all += read->data;
      offset = read->next_offset;
    }
  }

  const TestFolder folder_;
  const std::string path_ = JoinPath(folder_.path(), "rank_0.log");
  std::unique_ptr<LogFile> log_;
  int64_t first_ = -1;
};

TEST_F(AttemptLogTest, RotatedLog_IsReadAsOne_AndOffsetsStay) {
  Open(/*max_bytes=*/30, /*files=*/3);
  std::string all;
  for (int i = 0; i < 8; ++i) {
    const std::string line = absl::StrCat("line number ", i);
    log_->Append(line);
    all += line + "\n";
    // A reader that follows the log misses nothing.
    const absl::StatusOr<LogPiece> read =
        ReadLogPiece(path_, static_cast<int64_t>(all.size() - line.size() - 1), 0, 100);
    ASSERT_TRUE(read.ok());
    EXPECT_EQ(read->data, line + "\n");
  }
  const std::string kept = ReadAll(0, 20);
  EXPECT_EQ(kept, all.substr(first_));
  EXPECT_GT(first_, 0);
  EXPECT_EQ(ReadAll(first_, 1000), kept);
}

TEST_F(AttemptLogTest, EveryStepOfARotation_IsReadAsTheEndOfIt) {
  Open(/*max_bytes=*/10, /*files=*/3);
  for (const char* line : {"number 1", "number 2", "number 3", "number 4"}) log_->Append(line);
  const auto keep = [&](const std::string& name, const std::string& as) {
    ASSERT_EQ(link(name.c_str(), folder_.Path(as).c_str()), 0);
  };
  keep(path_ + ".2", "2");
  keep(path_ + ".1", "3");
  keep(path_, "4");
  log_->Append("number 5");
  keep(path_, "5");
  // The newest file first, by its line; 0: it does not exist.
  for (const std::vector<int>& step :
       std::vector<std::vector<int>>{{4, 3, 2}, {4, 0, 3}, {0, 4, 3}, {5, 4, 3}}) {
    std::string lines;
    for (int i = 0; i < 3; ++i) {
      const std::string name = i == 0 ? path_ : absl::StrCat(path_, ".", i);
      unlink(name.c_str());
      if (step[i] == 0) continue;
      ASSERT_EQ(link(folder_.Path(absl::StrCat(step[i])).c_str(), name.c_str()), 0);
      if (step[i] > 2) lines = absl::StrCat("number ", step[i], "\n", lines);
    }
    SCOPED_TRACE(absl::StrCat(step[0], step[1], step[2]));
    for (const int64_t offset : {0, 18}) {
      const absl::StatusOr<LogPiece> read = ReadLogPiece(path_, offset, 0, 100);
      ASSERT_TRUE(read.ok()) << read.status();
      EXPECT_EQ(read->offset, 18);
      EXPECT_EQ(read->data, lines);
    }
    // A reader that has read everything waits.
    EXPECT_EQ(ReadLogPiece(path_, 45, 0, 100)->data, "");
  }
}

// With a single file, a rotation empties it.
TEST_F(AttemptLogTest, OnlyFileThatIsEmptiedAndWrittenBeforeItIsRead_IsReadAsItIsThen) {
  Open(/*max_bytes=*/20, /*files=*/1);
  log_->Append("number 1");
  log_->Append("number 2");
  before_pread = [&] {
    log_->Append("line 3");
    log_->Append("line 4");
  };
  const absl::StatusOr<LogPiece> read = ReadLogPiece(path_, 9, 0, 100);
  ASSERT_TRUE(read.ok()) << read.status();
  EXPECT_EQ(before_pread, nullptr);
  EXPECT_EQ(read->offset, 18);
  EXPECT_EQ(read->data, "line 3\nline 4\n");
}

// For example if too many files are open. The remaining parts would look complete, at other
// offsets.
TEST_F(AttemptLogTest, PartThatCannotBeOpened_IsAnErrorNotAShorterLog) {
  Open(/*max_bytes=*/10, /*files=*/3);
  for (const char* line : {"number 1", "number 2", "number 3", "number 4"}) log_->Append(line);
  for (const std::string& name : {LogGonePath(path_), path_ + ".1", path_}) {
    const std::string kept = folder_.Path("kept");
    ASSERT_EQ(rename(name.c_str(), kept.c_str()), 0);
    ASSERT_EQ(symlink(name.c_str(), name.c_str()), 0);
    const absl::StatusOr<LogPiece> read = ReadLogPiece(path_, 0, 0, 100);
    EXPECT_FALSE(read.ok()) << name << ": " << read->data;
    EXPECT_FALSE(absl::IsNotFound(read.status())) << read.status();
    ASSERT_EQ(rename(kept.c_str(), name.c_str()), 0);
  }
  EXPECT_EQ(ReadLogPiece(path_, 0, 0, 100)->data, "number 2\nnumber 3\nnumber 4\n");
}

TEST_F(AttemptLogTest, Tail_IsWholeLines) {
  Open(0, 1);
  for (int i = 0; i < 5; ++i) log_->Append(absl::StrCat("line ", i));
  EXPECT_EQ(ReadLogPiece(path_, -1, 2, 100)->data, "line 3\nline 4\n");
  EXPECT_EQ(ReadLogPiece(path_, -1, 100, 1000)->data.size(), 35u);
  EXPECT_EQ(ReadLogPiece(path_, -1, 0, 1000)->data, "");
  EXPECT_EQ(ReadLogPiece(path_, -1, 0, 1000)->next_offset, 35);
}

TEST_F(AttemptLogTest, Tail_LongerThanAnAnswer_BeginsAtTheRightLine) {
  // Larger than a block that the search reads, in several parts, of which some are gone.
  Open(/*max_bytes=*/300 << 10, /*files=*/4);
  constexpr int kLines = 20000;
  const std::string filling(80, 'x');
  for (int i = 0; i < kLines; ++i) log_->Append(absl::StrFormat("%06d %s", i, filling));
  const int64_t begin = ReadLogPiece(path_, 0, 0, 100)->offset;
  const int kept = kLines - static_cast<int>(begin / 88);
  ASSERT_GT(begin, 0);
  ASSERT_GT(kept, 10000);
  for (const int lines : {1, 2979, 10000, kept - 1, kept}) {
    const absl::StatusOr<LogPiece> read = ReadLogPiece(path_, -1, lines, 1000);
    ASSERT_TRUE(read.ok()) << read.status();
    EXPECT_EQ(read->offset, (kLines - lines) * int64_t{88}) << lines;
    EXPECT_EQ(read->data.substr(0, 6), absl::StrFormat("%06d", kLines - lines));
    EXPECT_EQ(read->data.size(), std::min(lines, 11) * 88u);
  }
  EXPECT_EQ(ReadLogPiece(path_, -1, kept + 1, 1000)->offset, begin);
}

TEST_F(AttemptLogTest, LogThatIsNotThere_IsNamed) {
  EXPECT_EQ(ReadLogPiece(path_, 0, 0, 10).status().code(), absl::StatusCode::kNotFound);
  Open(0, 1);
  EXPECT_EQ(ReadLogPiece(path_, 0, 0, 10)->data, "");
  EXPECT_EQ(ReadLogPiece(path_, 500, 0, 10)->data, "");
}

TEST_F(AttemptLogTest, LogOffsetAt_IsTheFirstLineOfThatSecond_AlsoAfterRotations) {
  FakeClock clock;
  log_ = *LogFile::Open(path_, {.max_bytes = 30, .files = 3}, nullptr, &clock);
  const absl::Time start = clock.Now();
  std::vector<int64_t> begins;
  for (int second = 0; second < 10; ++second) {
    begins.push_back(second * 18);
    log_->Append(absl::StrCat("second ", second));  // 9 bytes
    clock.Advance(absl::Milliseconds(400));
    log_->Append("the same");  // 9 bytes
    clock.Advance(absl::Milliseconds(600));
  }
  // The lost part ends where the rest begins.
  const int64_t gone = ReadLogPiece(path_, 0, 0, 10)->offset;
  ASSERT_GT(gone, 18);
  const auto from = [&](absl::Time time) {
    return ReadLogPiece(path_, *LogOffsetAt(path_, time), 0, 10)->offset;
  };
  for (int second = 0; second < 10; ++second) {
    const absl::Time time = start + absl::Seconds(second);
    EXPECT_EQ(from(time), std::max(gone, begins[second]));
    EXPECT_EQ(from(time + absl::Milliseconds(999)), std::max(gone, begins[second]));
  }
  EXPECT_EQ(from(start - absl::Hours(1)), gone);
  // No line is that late: the offset of the next one.
  EXPECT_EQ(*LogOffsetAt(path_, start + absl::Hours(1)), 180);
  EXPECT_EQ(*LogOffsetAt(path_, absl::InfiniteFuture()), 180);
  EXPECT_EQ(ReadAll(*LogOffsetAt(path_, start + absl::Seconds(9)), 100), "second 9\nthe same\n");
  // An older agent wrote no times.
  unlink(LogTimesPath(path_).c_str());
  EXPECT_EQ(*LogOffsetAt(path_, start + absl::Seconds(9)), 0);
  EXPECT_TRUE(absl::IsNotFound(LogOffsetAt(path_ + "x", start).status()));
}

// In that case a reader gets more lines than requested, but not fewer.
TEST_F(AttemptLogTest, LogOffsetAt_AfterTimesThatCouldNotBeWritten_LeavesNoLineOut) {
  FakeClock clock;
  const absl::Time start = clock.Now();
  ASSERT_EQ(symlink("/dev/full", LogTimesPath(path_).c_str()), 0);
  log_ = *LogFile::Open(path_, {}, nullptr, &clock);
  log_->Append("one");
  EXPECT_EQ(*LogOffsetAt(path_, start), 0);
  clock.Advance(absl::Seconds(1));
  log_->Append("two");
  clock.Advance(absl::Seconds(1));
  log_->Append("three");
  for (const int late : {0, 1}) {
    EXPECT_EQ(*LogOffsetAt(path_, start + absl::Seconds(late)), 0) << late;
  }
  EXPECT_EQ(*LogOffsetAt(path_, start + absl::Seconds(2)), 8);
  EXPECT_EQ(*LogOffsetAt(path_, start + absl::Hours(1)), 14);
}

}  // namespace
}  // namespace muster::agent
