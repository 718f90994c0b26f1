// A file system of a network: calls that fail for a moment, and writers on other machines, whose
// locks are not seen here.
#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/magic.h>
#include <stdio.h>
#include <sys/stat.h>
#include <sys/vfs.h>
#include <unistd.h>

#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "worker/checkpoint/fake_registrar.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/staging_folder.h"

namespace {

constexpr char kDisk[] = "/network_disk";

// The calls of the system below, which this program has in place of the C library's.
struct Disk {
  long calls = 0;  // that read below a folder named kDisk
  long at = 0;     // the call that fails; 0: none
  int error = 0;
  bool fired = false;
  bool is_nfs = false;
  time_t ahead = 0;         // so much earlier everything on it has changed
  std::string hidden = "";  // a part of the paths that may not be examined; empty: none
  int read_only = 0;        // what changes fail with; 0: none
};
Disk disk;

template <class Where>
bool Fails(Where where) {
  if (disk.at == 0 || !muster::PathHas(where, kDisk) || ++disk.calls != disk.at) return false;
  disk.fired = true;
  errno = disk.error;
  return true;
}

bool RefusesToChange(const char* path) {
  if (disk.read_only == 0 || !muster::PathHas(path, kDisk)) return false;
  errno = disk.read_only;
  return true;
}

// A lock is none of the calls that read.
bool FailsToOpen(const char* path, int flags) {
  return (flags & O_CREAT) == 0 ? Fails(path) : RefusesToChange(path);
}

}  // namespace

MUSTER_REPLACE_OPEN(open, FailsToOpen)

extern "C" {

ssize_t read(int fd, void* to, size_t size) {
  if (fd > 2 && Fails(fd)) return -1;
  static const auto real = muster::RealCall<ssize_t (*)(int, void*, size_t)>("read");
  return real(fd, to, size);
}

ssize_t pread(int fd, void* to, size_t size, off_t at) {
  if (Fails(fd)) return -1;
  static const auto real = muster::RealCall<ssize_t (*)(int, void*, size_t, off_t)>("pread");
  return real(fd, to, size, at);
}

int stat(const char* path, struct stat* info) noexcept {
  if (Fails(path)) return -1;
  static const auto real = muster::RealCall<int (*)(const char*, struct stat*)>("stat");
  return real(path, info);
}

int lstat(const char* path, struct stat* info) noexcept {
  if (Fails(path)) return -1;
  if (!disk.hidden.empty() && muster::PathHas(path, disk.hidden.c_str())) {
    errno = EACCES;
    return -1;
  }
  static const auto real = muster::RealCall<int (*)(const char*, struct stat*)>("lstat");
  const int done = real(path, info);
  if (done == 0 && muster::PathHas(path, kDisk)) {
    info->st_mtim.tv_sec -= disk.ahead;
    info->st_ctim.tv_sec -= disk.ahead;
  }
  return done;
}

int fstat(int fd, struct stat* info) noexcept {
  if (fd > 2 && Fails(fd)) return -1;
  static const auto real = muster::RealCall<int (*)(int, struct stat*)>("fstat");
  return real(fd, info);
}

DIR* opendir(const char* path) {
  if (Fails(path)) return nullptr;
  static const auto real = muster::RealCall<DIR* (*)(const char*)>("opendir");
  return real(path);
}

struct dirent* readdir(DIR* folder) {
  if (Fails(dirfd(folder))) return nullptr;
  static const auto real = muster::RealCall<struct dirent* (*)(DIR*)>("readdir");
  return real(folder);
}

int rename(const char* from, const char* to) noexcept {
  if (RefusesToChange(from)) return -1;
  static const auto real = muster::RealCall<int (*)(const char*, const char*)>("rename");
  return real(from, to);
}

int unlink(const char* path) noexcept {
  if (RefusesToChange(path)) return -1;
  static const auto real = muster::RealCall<int (*)(const char*)>("unlink");
  return real(path);
}

int fstatfs(int fd, struct statfs* info) noexcept {
  static const auto real = muster::RealCall<int (*)(int, struct statfs*)>("fstatfs");
  const int done = real(fd, info);
  if (done == 0 && disk.is_nfs && muster::PathHas(fd, kDisk)) info->f_type = NFS_SUPER_MAGIC;
  return done;
}

}  // extern "C"

namespace muster {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::Not;

class NetworkDiskTest : public testing::Test {
 protected:
  NetworkDiskTest() { disk = Disk(); }
  ~NetworkDiskTest() override { disk = Disk(); }

  // With a record, as coordinators write it.
  void Save(int64_t number) {
    Staging staging = *Staging::Create(folder_.PathOf(number));
    Manifest manifest;
    manifest.info.step = 10 * number;
    for (const char* name : {"a", "b"}) {
      ASSERT_TRUE(WriteFileAtomically(JoinPath(staging.path(), name), name).ok());
      manifest.files.push_back({.name = name, .rank = 0, .digest = DigestBytes(name)});
    }
    RegisteredCheckpoint record;
    record.sha256 = std::string(64, 'a');
    record.promoted = true;
    ASSERT_TRUE(WriteSeal(staging.path(), record).ok());
    ASSERT_TRUE(staging.Publish(manifest).ok());
  }

  std::string Path(const std::string& name) const { return JoinPath(root_, name); }
  std::vector<std::string> Names() const { return *ListDirectory(root_); }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.Path(kDisk + 1);
  const CheckpointFolder folder_{root_};
};

// `find`: what looks for the newest checkpoint, number 2, whose path or step it returns.
class FailingReadsTest : public NetworkDiskTest {
 protected:
  template <class F>
  void ExpectNewestOrAnError(const F& find,
                             const std::vector<int>& errors = {EIO, ESTALE, EACCES}) {
    for (int64_t number = 0; number < 3; ++number) Save(number);
    for (const int error : errors) {
      long at = 1;
      for (; !HasFailure(); ++at) {
        SCOPED_TRACE(absl::StrFormat("%s in call %d", strerror(error), at));
        disk = {.at = at, .error = error};
        const absl::StatusOr<std::string> found = find();
        const bool fired = disk.fired;
        disk = Disk();
        if (found.ok()) {
          EXPECT_EQ(*found, "2");
        } else {
          EXPECT_FALSE(absl::IsNotFound(found.status()) || StaysUnreadable(found.status()))
              << found.status();
        }
        ASSERT_LT(at, 1000);
        if (!fired) break;
      }
      EXPECT_GT(at, 10);
      EXPECT_EQ(*find(), "2");
    }
  }

  std::string NumberOf(const std::string& path) const {
    return BaseName(path).substr(BaseName(path).rfind('_') + 1);
  }
  absl::StatusOr<std::string> NumberOf(const absl::StatusOr<std::string>& path) const {
    if (!path.ok()) return path.status();
    return NumberOf(*path);
  }
};

TEST_F(FailingReadsTest, Newest) {
  // The last two: the device is gone, and the server that a file system of a program asks.
  ExpectNewestOrAnError([&] { return NumberOf(folder_.Newest()); },
                        {EIO, ESTALE, EACCES, ENODEV, ENOTCONN});
}

TEST_F(FailingReadsTest, CheckpointToResume) {
  ExpectNewestOrAnError([&] { return NumberOf(FindCheckpointToResume(folder_, nullptr)); });
}

TEST_F(FailingReadsTest, SealedOneThatLacksItsName) {
  const std::string staging = Path("checkpoint_2.tmp-0123456789abcdef");
  ExpectNewestOrAnError([&] {
    const Disk armed = std::exchange(disk, Disk());
    if (PathExists(Path("checkpoint_2"))) {
      EXPECT_EQ(rename(Path("checkpoint_2").c_str(), staging.c_str()), 0);
    }
    disk = armed;
    return NumberOf(FindCheckpointToResume(folder_, nullptr));
  });
}

TEST_F(FailingReadsTest, OneThatIsToBePutBack) {
  const std::string replaced = Path("checkpoint_2.old-0123456789abcdef");
  ExpectNewestOrAnError([&] {
    const Disk armed = std::exchange(disk, Disk());
    if (PathExists(Path("checkpoint_2"))) {
      EXPECT_EQ(rename(Path("checkpoint_2").c_str(), replaced.c_str()), 0);
    }
    disk = armed;
    return NumberOf(FindCheckpointToResume(folder_, nullptr));
  });
}

TEST_F(FailingReadsTest, NewestStep) {
  ExpectNewestOrAnError([&]() -> absl::StatusOr<std::string> {
    const absl::StatusOr<int64_t> step = folder_.NewestStep();
    if (!step.ok()) return step.status();
    return absl::StrCat(*step / 10);
  });
}

// Who only reads loads it from where it is.
TEST_F(NetworkDiskTest, SealedOnAReadOnlyDisk_IsLoadedFromWhereItIs) {
  for (int64_t number = 0; number < 3; ++number) Save(number);
  const std::string staging = "checkpoint_2.tmp-0123456789abcdef";
  ASSERT_EQ(rename(Path("checkpoint_2").c_str(), Path(staging).c_str()), 0);
  const std::string leftover = Path(staging + "/seal.json.tmp-0123456789abcdef");
  ASSERT_TRUE(WriteFileAtomically(leftover, "{").ok());
  for (const bool registered : {false, true}) {
    FakeRegistrar registrar;
    RegisteredCheckpoint& record = registrar.records[1];
    record = *ReadSeal(Path(staging));
    record.id = 1;
    record.path = Path("checkpoint_2");
    record.staging = Path(staging);
    record.iteration = 2;
    for (const int error : {EACCES, EPERM, EROFS}) {
      SCOPED_TRACE(strerror(error));
      disk.read_only = error;
      const auto found = FindCheckpointToResume(folder_, registered ? &registrar : nullptr);
      ASSERT_TRUE(found.ok()) << found.status();
      EXPECT_EQ(*found, Path(staging));
      EXPECT_EQ(record.state, RegisteredCheckpoint::State::kSealed) << "its path has nothing";
    }
    disk.read_only = 0;
    // Another error may pass, so that the next load can give it its name.
    disk.read_only = EIO;
    const auto found = FindCheckpointToResume(folder_, registered ? &registrar : nullptr);
    EXPECT_THAT(std::string(found.status().message()), testing::HasSubstr(staging));
    disk.read_only = 0;
  }
  EXPECT_EQ(*FindCheckpointToResume(folder_, nullptr), Path("checkpoint_2"));
}

// A sealed one that lacks its name is never taken for rubbish.
TEST_F(FailingReadsTest, Create_RemovesNothingThatIsSealed) {
  Save(0);
  Save(1);
  const std::string staging = Path("checkpoint_1.tmp-0123456789abcdef");
  Save(2);
  ASSERT_EQ(rename(Path("checkpoint_2").c_str(), staging.c_str()), 0);
  for (long at = 1; !HasFailure(); ++at) {
    SCOPED_TRACE(at);
    disk = {.at = at, .error = EIO};
    (void)Staging::Create(Path("checkpoint_3"));
    const bool fired = disk.fired;
    disk = Disk();
    EXPECT_TRUE(PathExists(JoinPath(staging, kSealName)));
    if (!fired) break;
  }
}

// Nobody knows whether it is complete. What is may go nevertheless: else the disk fills.
TEST_F(NetworkDiskTest, CheckpointThatCannotBeSeen_StaysAndOlderOnesGo) {
  for (int64_t number = 0; number < 4; ++number) Save(number);
  disk.hidden = "/checkpoint_1/manifest.json";
  EXPECT_FALSE(folder_.Published().ok());
  const absl::Status rotated = folder_.Rotate(1);
  EXPECT_TRUE(rotated.ok()) << rotated;
  EXPECT_THAT(Names(), ElementsAre("checkpoint_1", "checkpoint_3"));
}

TEST_F(NetworkDiskTest, FolderThatNobodyHasLocked_MayBeOfAWriterOnAnotherMachine) {
  Save(0);
  const std::string staging = "checkpoint_1.tmp-0123456789abcdef";
  ASSERT_TRUE(MakeDirectories(Path(staging)).ok());
  ASSERT_TRUE(WriteFileAtomically(Path(staging + "/a"), "half").ok());
  const std::string replaced = "checkpoint_0.old-0123456789abcdef";
  ASSERT_TRUE(MakeDirectories(Path(replaced)).ok());
  // Nobody writes to what is being removed.
  ASSERT_TRUE(MakeDirectories(Path("checkpoint_1.tmp-dead456789abcdef")).ok());
  disk.is_nfs = true;
  Save(2);
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", replaced, staging, "checkpoint_2"));
  disk.ahead = absl::ToInt64Seconds(kQuietTime) - 60;
  Save(3);
  EXPECT_THAT(Names(), Contains(staging));
  // One that has changed nothing for a day is dead, unless it is here and has its lock.
  disk.ahead = absl::ToInt64Seconds(kQuietTime) + 60;
  {
    const OwnedFd lock(LockFolder(Path(staging)));
    ASSERT_TRUE(lock.open());
    Save(4);
    EXPECT_THAT(Names(), Contains(staging));
    EXPECT_THAT(Names(), Not(Contains(replaced)));
  }
  Save(5);
  EXPECT_THAT(Names(), Not(Contains(staging)));
}

// On a disk of this machine all writers have locks.
TEST_F(NetworkDiskTest, FolderThatNobodyHasLockedOnADiskOfThisMachine_IsRemoved) {
  const std::string staging = "checkpoint_1.tmp-0123456789abcdef";
  ASSERT_TRUE(MakeDirectories(Path(staging)).ok());
  Save(0);
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0"));
}

}  // namespace
}  // namespace muster
