#include "agent/log_file.h"

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <string>

#include "absl/strings/str_cat.h"
#include "base/fake_clock.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::agent {
namespace {

using ::testing::AllOf;
using ::testing::HasSubstr;

// The bytes that the disk has room for; below 0: any number.
int64_t g_room = -1;
ssize_t WriteToDisk(int fd, const void* data, size_t size) {
  if (g_room < 0) return write(fd, data, size);
  if (g_room == 0) {
    errno = ENOSPC;
    return -1;
  }
  const ssize_t n = write(fd, data, std::min<size_t>(size, g_room));
  g_room -= n;
  return n;
}

class LogFileTest : public ::testing::Test {
 protected:
  void SetUp() override { g_room = -1; }
  const TestFolder test_folder_;
  const std::string folder_ = test_folder_.path();
  const std::string path_ = test_folder_.Path("rank_0.log");
};

TEST_F(LogFileTest, FullDisk_SaysSoGoesOnAndTheFileSaysWhatIsMissing) {
  auto log = *LogFile::Open(path_, {}, WriteToDisk);
  EXPECT_EQ(log->Append("one"), "");
  g_room = 2;
  EXPECT_THAT(log->Append("torn"), AllOf(HasSubstr(path_), HasSubstr("No space left on device")));
  EXPECT_EQ(log->Append("lost"), "") << "reported once";
  g_room = -1;
  EXPECT_THAT(log->Append("four"), HasSubstr("is written again; 2 lines are missing in it"));
  EXPECT_EQ(log->Append("five"), "");
  EXPECT_EQ(*ReadFile(path_),
            "one\nto\n[muster: 2 lines are missing here: No space left on device]\nfour\nfive\n");
  g_room = 0;
  EXPECT_NE(log->Append("six"), "") << "another time is reported again";
}

TEST_F(LogFileTest, Limit_SplitsAtLinesAndKeepsTheNewest) {
  auto log = *LogFile::Open(path_, {.max_bytes = 8, .files = 3});
  for (const char* line : {"aaa", "bbb", "ccc", "ddd", "a long line alone", "eee", "fff", "ggg"}) {
    EXPECT_EQ(log->Append(line), "");
  }
  EXPECT_EQ(*ReadFile(path_), "ggg\n");
  EXPECT_EQ(*ReadFile(path_ + ".1"), "eee\nfff\n");
  EXPECT_EQ(*ReadFile(path_ + ".2"), "a long line alone\n");
  EXPECT_FALSE(PathExists(path_ + ".3"));
  // The parts of an earlier job are not kept beside a new one.
  log = *LogFile::Open(path_, {.max_bytes = 8, .files = 3});
  EXPECT_EQ(*ReadFile(path_), "");
  EXPECT_FALSE(PathExists(path_ + ".1"));
  EXPECT_FALSE(PathExists(path_ + ".2"));
}

TEST_F(LogFileTest, OneFile_BeginsAgain) {
  auto log = *LogFile::Open(path_, {.max_bytes = 4, .files = 1});
  log->Append("aaa");
  log->Append("bbb");
  EXPECT_EQ(*ReadFile(path_), "bbb\n");
  EXPECT_FALSE(PathExists(path_ + ".1"));
}

TEST_F(LogFileTest, FileThatCannotBeRenamed_GrowsOn) {
  ASSERT_TRUE(MakeDirectories(path_ + ".1/full").ok());
  auto log = *LogFile::Open(path_, {.max_bytes = 8, .files = 2});
  for (const char* line : {"aaa", "bbb", "ccc", "ddd"}) EXPECT_EQ(log->Append(line), "");
  EXPECT_EQ(*ReadFile(path_), "aaa\nbbb\nccc\nddd\n");
  EXPECT_EQ(ReadFile(LogGonePath(path_))->substr(0, 20), std::string(20, '0')) << "nothing is gone";
  ASSERT_TRUE(RemoveTree(path_ + ".1").ok());
  log->Append("eee");
  EXPECT_EQ(*ReadFile(path_), "eee\n");
  EXPECT_EQ(*ReadFile(path_ + ".1"), "aaa\nbbb\nccc\nddd\n");
  // Removed by another process.
  ASSERT_EQ(unlink(path_.c_str()), 0);
  for (const char* line : {"fff", "ggg"}) log->Append(line);
  EXPECT_EQ(*ReadFile(path_), "ggg\n");
}

TEST_F(LogFileTest, TimesOfLinesThatAreGone_GoWithThem) {
  FakeClock clock;
  auto log = *LogFile::Open(path_, {.max_bytes = 40, .files = 3}, nullptr, &clock);
  size_t most = 0;
  for (int second = 0; second < 1000; ++second) {
    log->Append("a line");
    clock.Advance(absl::Seconds(1));
    most = std::max(most, ReadFile(LogTimesPath(path_))->size() / sizeof(LogTime));
  }
  EXPECT_LT(most, 25u);  // 120 bytes are at most 17 lines
  EXPECT_GT(most, 10u);
  EXPECT_FALSE(PathExists(LogTimesPath(path_) + ".new"));
}

TEST_F(LogFileTest, NoLimit_IsOneFile) {
  auto log = *LogFile::Open(path_, {.max_bytes = 0});
  for (int i = 0; i < 100; ++i) log->Append("line");
  EXPECT_EQ(ReadFile(path_)->size(), 500u);
}

TEST_F(LogFileTest, CannotBeOpened_NamesThePath) {
  EXPECT_THAT(std::string(LogFile::Open("/nowhere/x.log").status().message()),
              HasSubstr("/nowhere/x.log"));
}

}  // namespace
}  // namespace muster::agent
