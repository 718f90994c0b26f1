#include "worker/checkpoint/staging_folder.h"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/file.h>
#include <sys/wait.h>
#include <unistd.h>

#include <atomic>
#include <string>
#include <thread>

#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"

namespace {
std::atomic<int> locks_asked_for{0};
}  // namespace

extern "C" int flock(int fd, int operation) {
  static const auto call = muster::RealCall<int (*)(int, int)>("flock");
  ++locks_asked_for;
  locks_asked_for.notify_all();
  return call(fd, operation);
}

namespace muster {
namespace {

TEST(StagingFolder, Names_TellWhatTheFolderIsFor) {
  for (int i = 0; i < 100; ++i) {
    const std::string staging = NewStagingPath("/a/checkpoint_3");
    EXPECT_TRUE(HasMark(staging, "/a/checkpoint_3", kStagingMark)) << staging;
    EXPECT_FALSE(IsDoomed(staging)) << staging;
  }
  const std::string doomed = NewDoomedPath("/a/checkpoint_3");
  EXPECT_TRUE(HasMark(doomed, "/a/checkpoint_3", kStagingMark)) << doomed;
  EXPECT_TRUE(IsDoomed(doomed)) << doomed;
  EXPECT_NE(doomed, NewDoomedPath("/a/checkpoint_3"));
  EXPECT_FALSE(IsDoomed("/a/dead"));
  EXPECT_FALSE(HasMark("checkpoint_3.tmp-0123", "checkpoint_3", kStagingMark));
  EXPECT_EQ(StemOf("checkpoint_3.tmp-0123", kStagingMark), "checkpoint_3");
  EXPECT_EQ(StemOf("checkpoint_3", kStagingMark), "checkpoint_3");
}

TEST(StagingFolder, Writer_IsAliveWhileItHoldsTheLock) {
  const TestFolder folder;
  EXPECT_EQ(WriterOf(folder.path()), FolderWriter::kGone);
  {
    const OwnedFd lock(LockFolder(folder.path()));
    ASSERT_TRUE(lock.open());
    EXPECT_EQ(WriterOf(folder.path()), FolderWriter::kAlive);
    EXPECT_EQ(LockFolder(folder.path()), -1);
  }
  EXPECT_EQ(WriterOf(folder.path()), FolderWriter::kGone);
  EXPECT_EQ(WriterOf(folder.Path("missing")), FolderWriter::kUnknown);
  EXPECT_EQ(LockFolder(folder.Path("missing")), -1);
}

// Locks of other machines are not visible on a file system that they could share.
TEST(StagingFolder, WriterOnAFileSystemThatMayBeShared_IsUnknown) {
  EXPECT_EQ(WriterOf("/proc/self"), FolderWriter::kUnknown);
}

TEST(StagingFolder, ThoseWhoAsk_KeepNobodyFromItsLock) {
  const TestFolder folder;
  std::atomic<bool> end{false};
  std::thread asks([&] {
    while (!end) WriterOf(folder.path());
  });
  for (int i = 0; i < 2000; ++i) {
    const OwnedFd lock(LockFolder(folder.path()));
    EXPECT_TRUE(lock.open()) << i;
  }
  end = true;
  asks.join();
}

TEST(StagingFolder, OneWhoAsksAndIsInterrupted_IsWaitedFor) {
  const TestFolder folder;
  OwnedFd asks(open(folder.path().c_str(), O_RDONLY | O_DIRECTORY));
  ASSERT_EQ(flock(asks.get(), LOCK_SH), 0);
  // More attempts than a thread can make in the time for which one may be interrupted.
  constexpr int kMany = 2100;
  const int many = locks_asked_for + kMany;
  std::atomic<int> lock{-2};
  std::thread writer([&] {
    lock = LockFolder(folder.path());
    locks_asked_for += kMany;
    locks_asked_for.notify_all();
  });
  for (int asked = locks_asked_for; asked < many; asked = locks_asked_for) {
    locks_asked_for.wait(asked);
  }
  EXPECT_EQ(lock, -2) << "does not wait";
  asks.Close();
  writer.join();
  const OwnedFd locked(lock);
  EXPECT_TRUE(locked.open());
}

TEST(StagingFolder, LockFolderPatiently_TellsReadersFromWriters) {
  const absl::Duration patience = SetLockPatience(absl::ZeroDuration());
  const TestFolder folder;
  {
    const OwnedFd writer(LockFolder(folder.path()));
    ASSERT_TRUE(writer.open());
    const absl::Status status = LockFolderPatiently(folder.path()).status();
    EXPECT_TRUE(absl::IsAborted(status)) << status;
    // A person who has to end it must know which process it is.
    EXPECT_EQ(LockHolderOf(folder.path()).find("process " + std::to_string(getpid()) + " ("), 0u)
        << LockHolderOf(folder.path());
    EXPECT_NE(status.message().find(LockHolderOf(folder.path()) + " has it locked"),
              absl::string_view::npos)
        << status;
    EXPECT_FALSE(HoldInPlace(folder.path()));
  }
  EXPECT_TRUE(absl::IsNotFound(LockFolderPatiently(folder.Path("missing")).status()));
  ASSERT_TRUE(HoldInPlace(folder.path()));
  EXPECT_EQ(LockHolderOf(folder.path()), "a process that loads from there");
  ASSERT_TRUE(HoldInPlace(folder.path()));
  EXPECT_EQ(LockFolderPatiently(folder.path()).value(), -1);
  ReleaseInPlace();
  const absl::StatusOr<int> lock = LockFolderPatiently(folder.path());
  ASSERT_TRUE(lock.ok()) << lock.status();
  const OwnedFd mine(*lock);
  ASSERT_TRUE(mine.open());
  ShareLock(mine.get());
  EXPECT_TRUE(HoldInPlace(folder.path()));
  EXPECT_FALSE(UnshareLock(mine.get()));
  ReleaseInPlace();
  EXPECT_TRUE(UnshareLock(mine.get()));
  EXPECT_EQ(WriterOf(folder.path()), FolderWriter::kAlive);
  SetLockPatience(patience);
}

// The kernel's table names the process that took the lock, even after it has ended.
TEST(StagingFolder, LockHolderOf_ThatHasLeftItsLockToAChild_SaysSo) {
  const TestFolder folder;
  int ready[2], end[2];
  ASSERT_EQ(pipe(ready), 0);
  ASSERT_EQ(pipe(end), 0);
  const pid_t parent = fork();
  if (parent == 0) {
    const int lock = open(folder.path().c_str(), O_RDONLY | O_DIRECTORY);
    if (flock(lock, LOCK_EX) != 0) _exit(1);
    const pid_t child = fork();
    if (child == 0) {
      close(end[1]);
      char byte = 'r';
      (void)!write(ready[1], &byte, 1);
      (void)!read(end[0], &byte, 1);  // until the test closes it
      _exit(0);
    }
    _exit(0);
  }
  int status = 0;
  ASSERT_EQ(waitpid(parent, &status, 0), parent);
  ASSERT_EQ(status, 0);
  char byte = 0;
  ASSERT_EQ(read(ready[0], &byte, 1), 1);
  EXPECT_EQ(LockHolderOf(folder.path()),
            "a child of process " + std::to_string(parent) + ", which has ended");
  for (const int fd : {ready[0], ready[1], end[0], end[1]}) close(fd);
}

}  // namespace
}  // namespace muster
