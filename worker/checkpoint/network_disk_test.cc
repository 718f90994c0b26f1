// A network file system: calls that fail temporarily, and writers on other machines, whose locks
// are not visible here.
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

#include <atomic>
#include <cstring>
#include <functional>
#include <string>
#include <utility>
#include <vector>

#include "ATen/ops/full.h"
#include "ATen/ops/zeros.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "base/file.h"
#include "base/owned_fd.h"
#include "base/status_macros.h"
#include "base/test_folder.h"
#include "base/test_system_calls.h"
#include "worker/checkpoint/fake_registrar.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/publication.h"
#include "worker/checkpoint/seal.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/thread_comm.h"

namespace {

constexpr char kDisk[] = "/network_disk";

// The calls of the system below, with which this program replaces the C library's.
struct Disk {
  long at = 0;  // the call that reads below a folder named kDisk and fails; 0: none
  int error = 0;
  bool is_nfs = false;
  time_t ahead = 0;         // by so much, everything on it was changed earlier
  std::string hidden = "";  // a part of the paths that may not be examined; empty: none
  int read_only = 0;        // the error of changes; 0: none
  // Not null: folders cannot be exchanged, and this is called after the first rename.
  std::function<void()> renamed = nullptr;
};
Disk disk;
std::atomic<long> reads = 0;  // made by several threads

// Puts the disk into the state `next`. Returns whether a read has failed since the last call.
bool Set(Disk next) {
  const bool fired = disk.at > 0 && reads >= disk.at;
  disk = std::move(next);
  reads = 0;
  return fired;
}

template <class Where>
bool Fails(Where where) {
  if (disk.at == 0 || !muster::PathHas(where, kDisk) || ++reads != disk.at) return false;
  errno = disk.error;
  return true;
}

bool RefusesToChange(const char* path) {
  if (disk.read_only == 0 || !muster::PathHas(path, kDisk)) return false;
  errno = disk.read_only;
  return true;
}

// Locking is not one of the calls that read.
bool FailsToOpen(const char* path, int flags) {
  return (flags & O_CREAT) == 0 ? Fails(path) : RefusesToChange(path);
}

// Excludes the standard streams.
bool FailsToRead(int fd) { return fd > 2 && Fails(fd); }

}  // namespace

MUSTER_REPLACE_OPEN(open, FailsToOpen)
MUSTER_REPLACE_READS(FailsToRead)

extern "C" {

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
  const int done = real(from, to);
  if (done != 0 || disk.renamed == nullptr || strstr(to, ".old-") == nullptr) return done;
  std::exchange(disk.renamed, nullptr)();
  return 0;
}

int renameat2(int from_dir, const char* from, int to_dir, const char* to,
              unsigned int flags) noexcept {
  if (disk.renamed != nullptr && muster::PathHas(from, kDisk)) {
    errno = EINVAL;
    return -1;
  }
  static const auto real =
      muster::RealCall<int (*)(int, const char*, int, const char*, unsigned int)>("renameat2");
  return real(from_dir, from, to_dir, to, flags);
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
  NetworkDiskTest() { Set({}); }
  ~NetworkDiskTest() override { Set({}); }

  // Saves a checkpoint with a record, as coordinators write it.
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

// The device is gone, or the server of a user-space file system, or it refuses a call.
const std::vector<int> kErrors = {EIO, ESTALE, EACCES, ENODEV, ENXIO, ENOTCONN, EOPNOTSUPP, EINVAL};

// `find`: looks for the newest checkpoint, number 2, and returns its path or step.
class FailingReadsTest : public NetworkDiskTest {
 protected:
  template <class F>
  void ExpectNewestOrAnError(const F& find,
                             const std::vector<int>& errors = {EIO, ESTALE, EACCES}) {
    for (int64_t number = 0; number < 3; ++number) Save(number);
    ExpectTheSavedOrAnError(find, errors);
  }

  template <class F>
  void ExpectTheSavedOrAnError(const F& find, const std::vector<int>& errors) {
    for (const int error : errors) {
      long at = 1;
      for (; !HasFailure(); ++at) {
        SCOPED_TRACE(absl::StrFormat("%s in call %d", strerror(error), at));
        Set({.at = at, .error = error});
        const absl::StatusOr<std::string> found = find();
        const bool fired = Set({});
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
  ExpectNewestOrAnError([&] { return NumberOf(folder_.Newest()); }, kErrors);
}

// The contents are read: text, files of one block and of several, by one rank and by two together.
TEST_F(FailingReadsTest, Contents) {
  const auto save = [&](int64_t number, int64_t elements) {
    RunRanks(1, [&](Comm& comm) {
      const absl::Status saved = SaveNumberedCheckpoint(
          comm, folder_, {.iteration = number, .step = 10 * number}, PublishOptions(),
          [&](StateWriter& writer) -> absl::Status {
            StateDict state;
            state.SetInt("step", number);
            MUSTER_RETURN_IF_ERROR(writer.Write(SchedulerFileName(0), state));
            state.SetTensor("w", at::full({3}, 1.0));
            MUSTER_RETURN_IF_ERROR(writer.Write(RandomStatesFileName(0), state));
            return writer.WriteModel(ModelFileName(0), {{"w", at::zeros({elements}, at::kByte)}});
          });
      ASSERT_TRUE(saved.ok()) << saved;
    });
  };
  save(1, 3);
  save(2, (8 << 20) + 1);
  ASSERT_FALSE(ReadManifest(Path("checkpoint_2"))->Find(ModelFileName(0))->blocks.empty());
  for (const int ranks : {1, 2}) {
    SCOPED_TRACE(ranks);
    ExpectTheSavedOrAnError(
        [&]() -> absl::StatusOr<std::string> {
          std::vector<absl::Status> statuses(ranks);
          std::string dir;
          RunRanks(ranks, [&](Comm& comm) {
            statuses[comm.rank()] = [&]() -> absl::Status {
              MUSTER_ASSIGN_OR_RETURN(StateReader reader,
                                      OpenCheckpoint(comm, "", folder_, nullptr, {}));
              if (comm.rank() == 0) dir = reader.dir();
              std::vector<std::string> names;
              for (const ManifestFile& file : reader.manifest().files) names.push_back(file.name);
              MUSTER_RETURN_IF_ERROR(reader.ReadTogether(comm, names));
              for (const std::string& name : names) {
                MUSTER_RETURN_IF_ERROR(reader.Read(name).status());
              }
              return absl::OkStatus();
            }();
          });
          for (const absl::Status& status : statuses) MUSTER_RETURN_IF_ERROR(status);
          return NumberOf(dir);
        },
        {ENODEV, EOPNOTSUPP, EINVAL});
  }
}

TEST_F(FailingReadsTest, CheckpointToResume) {
  ExpectNewestOrAnError([&] { return NumberOf(FindCheckpointToResume(folder_, nullptr)); },
                        kErrors);
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

TEST_F(NetworkDiskTest, ReaderBetweenTheTwoRenamesOfASave_PutsNothingBack) {
  const auto save = [&](int64_t step) -> absl::Status {
    MUSTER_ASSIGN_OR_RETURN(Staging staging, Staging::Create(Path("best")));
    Manifest manifest;
    manifest.info.step = step;
    return staging.Publish(manifest);
  };
  ASSERT_TRUE(save(1).ok());
  const absl::Duration patience = SetLockPatience(absl::ZeroDuration());
  absl::Status read;
  disk.renamed = [&] { read = VerifyCheckpoint(Path("best"), VerifyLevel::kSizes).status(); };
  const absl::Status saved = save(2);
  SetLockPatience(patience);
  EXPECT_TRUE(saved.ok()) << saved;
  EXPECT_TRUE(absl::IsAborted(read)) << read;
  const absl::StatusOr<Manifest> best = VerifyCheckpoint(Path("best"), VerifyLevel::kSizes);
  ASSERT_TRUE(best.ok()) << best.status();
  EXPECT_EQ(best->info.step, 2);
  EXPECT_THAT(Names(), ElementsAre("best"));
}

// A process that only reads loads it from where it is.
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
    // Another error may be transient, so that the next load can rename it.
    disk.read_only = EIO;
    const auto found = FindCheckpointToResume(folder_, registered ? &registrar : nullptr);
    EXPECT_THAT(std::string(found.status().message()), testing::HasSubstr(staging));
    disk.read_only = 0;
  }
  EXPECT_EQ(*FindCheckpointToResume(folder_, nullptr), Path("checkpoint_2"));
}

// A sealed one that lacks its name is never treated as abandoned.
TEST_F(FailingReadsTest, Create_RemovesNothingThatIsSealed) {
  Save(0);
  Save(1);
  const std::string staging = Path("checkpoint_1.tmp-0123456789abcdef");
  Save(2);
  ASSERT_EQ(rename(Path("checkpoint_2").c_str(), staging.c_str()), 0);
  for (long at = 1; !HasFailure(); ++at) {
    SCOPED_TRACE(at);
    Set({.at = at, .error = EIO});
    (void)Staging::Create(Path("checkpoint_3"));
    const bool fired = Set({});
    EXPECT_TRUE(PathExists(JoinPath(staging, kSealName)));
    if (!fired) break;
  }
}

// A file that a rank wrote is not missing because it cannot be examined.
TEST_F(FailingReadsTest, Complete_TakesNoErrorForDamage) {
  for (const int error : kErrors) {
    for (long at = 1; !HasFailure(); ++at) {
      SCOPED_TRACE(absl::StrFormat("%s in call %d", strerror(error), at));
      absl::StatusOr<Staging> staging = Staging::Create(Path("checkpoint_0"));
      ASSERT_TRUE(staging.ok()) << staging.status();
      ASSERT_TRUE(WriteFileAtomically(JoinPath(staging->path(), "a"), "a").ok());
      Manifest manifest;
      manifest.files.push_back({.name = "a", .rank = 0, .digest = DigestBytes("a")});
      Set({.at = at, .error = error});
      const absl::Status completed = staging->Complete(manifest);
      const bool fired = Set({});
      EXPECT_FALSE(StaysUnreadable(completed)) << completed;
      if (!fired) break;
    }
  }
}

// It is unknown whether it is complete. Complete ones may be removed nevertheless, or the disk
// fills up.
TEST_F(NetworkDiskTest, CheckpointThatCannotBeSeen_StaysAndOlderOnesGo) {
  for (int64_t number = 0; number < 4; ++number) Save(number);
  disk.hidden = "/checkpoint_1/manifest.json";
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
  // No process writes to a folder that is being removed.
  ASSERT_TRUE(MakeDirectories(Path("checkpoint_1.tmp-dead456789abcdef")).ok());
  disk.is_nfs = true;
  Save(2);
  EXPECT_THAT(Names(), ElementsAre("checkpoint_0", replaced, staging, "checkpoint_2"));
  disk.ahead = absl::ToInt64Seconds(kQuietTime) - 60;
  Save(3);
  EXPECT_THAT(Names(), Contains(staging));
  // A folder without changes for a day is abandoned, unless its writer is here and has it locked.
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
