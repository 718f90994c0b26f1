#include "worker/checkpoint/folder.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/capability.h>
#include <sys/file.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <iostream>
#include <string>
#include <thread>
#include <vector>

#include "absl/strings/str_cat.h"
#include "base/failpoint.h"
#include "base/file.h"
#include "base/mutex.h"
#include "base/owned_fd.h"
#include "base/test_folder.h"
#include "base/test_hidden_path.h"
#include "base/test_system_calls.h"
#include "worker/checkpoint/disposal.h"
#include "worker/checkpoint/sealing.h"
#include "worker/checkpoint/staging_folder.h"
#include "worker/checkpoint/test_mounted.h"
#include "worker/checkpoint/test_synced_folders.h"

namespace muster {
namespace {

using ::testing::Contains;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

class FolderTest : public testing::Test {
 protected:
  // Saves a checkpoint with the given files, each holding its own name and `salt`.
  absl::Status Save(const std::string& dir, const std::vector<std::string>& names,
                    const std::string& salt = "") {
    auto staging = Staging::Create(dir);
    if (!staging.ok()) return staging.status();
    Manifest manifest;
    for (const std::string& name : names) {
      const std::string contents = name + salt;
      const auto written = WriteFileAtomically(JoinPath(staging->path(), name), contents);
      if (!written.ok()) return written;
      manifest.files.push_back({.name = name, .rank = 0, .digest = DigestBytes(contents)});
    }
    return staging->Publish(manifest);
  }

  std::string Path(const std::string& name) { return JoinPath(root_, name); }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.path();
};

TEST_F(FolderTest, Publish_AppearsWholeAndLeavesNoStaging) {
  ASSERT_TRUE(Save(Path("deep/er/ckpt"), {"a", "b"}).ok());
  EXPECT_THAT(*ListDirectory(Path("deep/er")), ElementsAre("ckpt"));
  EXPECT_THAT(*ListDirectory(Path("deep/er/ckpt")), ElementsAre("a", "b", "manifest.json"));
  EXPECT_TRUE(VerifyCheckpoint(Path("deep/er/ckpt"), VerifyLevel::kContents).ok());
}

// A power failure after the first save must not lose its parent folders, which may be new, too.
TEST_F(FolderTest, FirstSaveInAFolder_SyncsThoseAroundIt) {
  std::vector<std::string> paths;
  // Another process has created this one.
  ASSERT_TRUE(MakeDirectories(Path("run")).ok());
  for (const bool first : {true, false}) {
    paths.clear();
    synced = &paths;
    const absl::Status saved = Save(Path("run/checkpoints/checkpoint_0"), {"a"});
    synced = nullptr;
    ASSERT_TRUE(saved.ok()) << saved;
    EXPECT_THAT(paths, Contains(Path("run/checkpoints")));
    for (const std::string& path : {Path("run"), root_}) {
      EXPECT_EQ(std::count(paths.begin(), paths.end(), path), first ? 1 : 0) << path;
    }
  }
}

// A process that ends while it removes a failed save leaves a part of it, which must not wait for a
// name, nor for a registry that says whether it is sealed.
TEST_F(FolderTest, SaveThatFails_LosesItsRecordsFirst) {
  const OwnedFd events(inotify_init1(IN_NONBLOCK | IN_CLOEXEC));
  ASSERT_TRUE(events.open());
  {
    auto staging = Staging::Create(Path("checkpoint_0"));
    ASSERT_TRUE(staging.ok()) << staging.status();
    std::vector<std::string> names = {kSealName, kSealingName};
    for (int i = 0; i < 20; ++i) names.insert(names.begin() + i % 2, absl::StrCat("file_", i));
    for (const std::string& name : names) {
      ASSERT_TRUE(WriteFileAtomically(JoinPath(staging->path(), name), "x").ok());
    }
    ASSERT_GE(inotify_add_watch(events.get(), staging->path().c_str(), IN_DELETE), 0);
  }
  EXPECT_THAT(*ListDirectory(root_), ElementsAre());
  alignas(inotify_event) char buffer[8192];
  const ssize_t size = read(events.get(), buffer, sizeof(buffer));
  std::vector<std::string> removed;
  for (ssize_t at = 0; at < size;) {
    const auto* const event = reinterpret_cast<const inotify_event*>(buffer + at);
    if (event->len > 0) removed.push_back(event->name);
    at += static_cast<ssize_t>(sizeof(inotify_event) + event->len);
  }
  ASSERT_EQ(removed.size(), 22u);
  removed.resize(2);
  EXPECT_THAT(removed, ElementsAre(kSealName, kSealingName));
}

// Its writer was killed between the steps of WriteFileAtomically.
TEST_F(FolderTest, TakeOver_LeavesOutWhatItsWriterWasAboutToRename) {
  const std::string staging = Path("checkpoint_0.tmp-0123456789abcdef");
  ASSERT_TRUE(Save(staging, {"a"}).ok());
  const std::string left = absl::StrCat(kSealName, ".tmp-0123456789abcdef");
  ASSERT_TRUE(WriteFileAtomically(JoinPath(staging, left), "{").ok());
  auto taken = Staging::TakeOver(Path("checkpoint_0"), staging);
  ASSERT_TRUE(taken.ok()) << taken.status();
  ASSERT_TRUE(taken->has_value());
  ASSERT_TRUE((*taken)->Rename().ok());
  EXPECT_THAT(*ListDirectory(Path("checkpoint_0")), ElementsAre("a", "manifest.json"));
}

// A hook may have given its file such a name.
TEST_F(FolderTest, FilesThatTheManifestLists_AreNoLeftovers) {
  const std::string name = "cache.tmp-0123456789abcdef";
  const std::string staging = Path("best.tmp-0123456789abcdef"),
                    sealed = Path("checkpoint_3.tmp-0123456789abcdef");
  for (const std::string& path : {staging, sealed}) {
    ASSERT_TRUE(Save(path, {"a", name}).ok());
    ASSERT_TRUE(WriteFileAtomically(JoinPath(path, kSealName), "{}").ok());
  }
  auto taken = Staging::TakeOver(Path("best"), staging);
  ASSERT_TRUE(taken.ok()) << taken.status();
  ASSERT_TRUE((*taken)->Rename().ok());
  ASSERT_TRUE(Save(Path("checkpoint_4"), {"a"}).ok());
  for (const char* dir : {"best", "checkpoint_3"}) {
    EXPECT_TRUE(VerifyCheckpoint(Path(dir), VerifyLevel::kContents).ok()) << dir;
  }
}

TEST_F(FolderTest, Create_GivesNumberedOnesThatAreSealedTheirName) {
  const std::string sealed = Path("checkpoint_3.tmp-0123456789abcdef");
  ASSERT_TRUE(Save(sealed, {"a"}).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(sealed, kSealName), "{}").ok());
  // Its writer ended while it noted the seal.
  ASSERT_TRUE(WriteFileAtomically(JoinPath(sealed, "seal.json.tmp-0123456789abcdef"), "{").ok());
  ASSERT_TRUE(Save(Path("checkpoint_1.tmp-0123456789abcdef"), {"a"}).ok());
  // A resume from another folder continues with another name.
  ASSERT_TRUE(Save(Path("checkpoint_2"), {"a"}).ok());
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_2", "checkpoint_3"));
  EXPECT_THAT(*ListDirectory(Path("checkpoint_3")), ElementsAre("a", "manifest.json", "seal.json"));
}

// Nothing sealed is lost, and no other process is disturbed.
TEST_F(FolderTest, Create_LeavesSealedOnesThatCannotHaveTheirName) {
  const auto sealed = [&](const std::string& name) {
    const std::string path = Path(name + ".tmp-0123456789abcdef");
    EXPECT_TRUE(Save(path, {"a"}).ok());
    EXPECT_TRUE(WriteFileAtomically(JoinPath(path, kSealName), "{}").ok());
    return path;
  };
  const auto create = [&] { ASSERT_TRUE(Staging::Create(Path("checkpoint_9")).ok()); };
  const std::string written = sealed("checkpoint_3");
  OwnedFd lock(LockFolder(written));
  ASSERT_TRUE(lock.open());
  const std::string read = sealed("checkpoint_4");
  ASSERT_TRUE(HoldInPlace(read));
  const std::string taken = sealed("checkpoint_5");
  ASSERT_TRUE(MakeDirectories(Path("checkpoint_5")).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("checkpoint_5/notes"), "of a user").ok());
  const std::string damaged = sealed("checkpoint_6");
  ASSERT_TRUE(WriteFileAtomically(JoinPath(damaged, "a"), "of another size").ok());
  // The previous one is aside, as on file systems that cannot exchange folders.
  ASSERT_TRUE(Save(Path("aside"), {"a"}).ok());
  const std::string newer = sealed("checkpoint_7");
  const std::string aside = Path("checkpoint_7.old-0123456789abcdef");
  ASSERT_EQ(rename(Path("aside").c_str(), aside.c_str()), 0);
  // The name that the save itself is to get.
  const std::string own = sealed("checkpoint_9");
  create();
  for (const std::string& path : {written, read, taken, damaged, own, newer}) {
    EXPECT_TRUE(PathExists(JoinPath(path, kSealName))) << path;
  }
  EXPECT_EQ(ListDirectory(root_)->size(), 8u);
  // After nothing is in the way any more:
  lock.Close();
  ReleaseInPlace();
  ASSERT_TRUE(RemoveTree(Path("checkpoint_5")).ok());
  ASSERT_TRUE(RemoveTree(aside).ok());
  create();
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_3", "checkpoint_4", "checkpoint_5",
                                                 BaseName(damaged), "checkpoint_7", BaseName(own)));
}

// Two runs in one project folder have chosen one number.
TEST_F(FolderTest, CheckpointThatAnotherProgramHasSavedMeanwhile_IsNotReplaced) {
  {
    auto staging = Staging::Create(Path("checkpoint_0"), /*replaces=*/false);
    ASSERT_TRUE(staging.ok()) << staging.status();
    ASSERT_TRUE(Save(Path("checkpoint_0"), {"other"}).ok());
    const absl::Status published = staging->Publish({});
    EXPECT_TRUE(absl::IsAlreadyExists(published)) << published;
    EXPECT_THAT(std::string(published.message()), HasSubstr("another program has saved"));
  }
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_0"));
  EXPECT_THAT(*ListDirectory(Path("checkpoint_0")), ElementsAre("manifest.json", "other"));
}

TEST_F(FolderTest, SealedWithoutItsName_ReplacesNoOtherProgramsCheckpoint_AndKeepsItsNumber) {
  const std::string sealed = Path("checkpoint_3.tmp-0123456789abcdef");
  ASSERT_TRUE(Save(sealed, {"a"}).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(sealed, kSealName), "{}").ok());
  EXPECT_EQ(*CheckpointFolder(root_).NextNumber(), 4);
  ASSERT_TRUE(Save(Path("checkpoint_3"), {"other"}).ok());
  EXPECT_EQ(*NameStaging(Path("checkpoint_3"), sealed, [] { return absl::OkStatus(); }), sealed);
  EXPECT_THAT(*ListDirectory(Path("checkpoint_3")), ElementsAre("manifest.json", "other"));
  EXPECT_TRUE(VerifyCheckpoint(sealed, VerifyLevel::kContents).ok());
}

// Its disk may not be mounted.
TEST_F(FolderTest, LinkToNothing_IsAnError_AndKeepsItsNumber) {
  ASSERT_TRUE(Save(Path("checkpoint_1"), {"a"}).ok());
  ASSERT_EQ(symlink("/missing/checkpoint_4", Path("checkpoint_4").c_str()), 0);
  const CheckpointFolder folder(root_);
  const absl::Status newest = folder.Newest().status();
  EXPECT_TRUE(absl::IsUnavailable(newest)) << newest;
  EXPECT_THAT(std::string(newest.message()),
              HasSubstr("checkpoint_4 is a symbolic link to nothing"));
  EXPECT_TRUE(absl::IsUnavailable(folder.NewestStep().status()));
  EXPECT_EQ(*folder.NextNumber(), 5);
  ASSERT_TRUE(folder.Rotate(1).ok());
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_1", "checkpoint_4"));
}

TEST_F(FolderTest, HintAtUnnamed_SaysWhichOneLacksOnlyThatName) {
  const std::string sealed = Path("best.tmp-0123456789abcdef");
  ASSERT_TRUE(Save(sealed, {"a"}).ok());
  EXPECT_EQ(HintAtUnnamed(Path("best")), "") << "nobody has sealed what is being written";
  ASSERT_TRUE(WriteFileAtomically(JoinPath(sealed, kSealName), "{}").ok());
  EXPECT_THAT(HintAtUnnamed(Path("best")),
              HasSubstr(sealed + " is complete and lacks only that name"));
  {
    const OwnedFd lock(LockFolder(sealed));
    ASSERT_TRUE(lock.open());
    EXPECT_EQ(HintAtUnnamed(Path("best")), "") << "it gets its name now";
  }
  ASSERT_EQ(unlink(JoinPath(sealed, "a").c_str()), 0);
  EXPECT_EQ(HintAtUnnamed(Path("best")), "") << "it is being removed";
}

TEST_F(FolderTest, Newest_OfTwoThatLackTheSameName_IsTheOneSavedLater) {
  const std::vector<std::string> unnamed = {Path("checkpoint_1.tmp-0000000000000000"),
                                            Path("checkpoint_1.tmp-ffffffffffffffff")};
  // Saves remove folders that lack a seal.
  for (const char* name : {"0", "1"}) ASSERT_TRUE(Save(Path(name), {"a"}).ok());
  for (const std::string& path : unnamed) {
    ASSERT_EQ(rename(Path(path == unnamed[0] ? "0" : "1").c_str(), path.c_str()), 0);
    Manifest manifest = *ReadManifest(path);
    manifest.created =
        path == unnamed[0] ? "2002-01-01T00:00:00+00:00" : "2001-01-01T00:00:00+00:00";
    ASSERT_TRUE(WriteFileAtomically(JoinPath(path, kManifestName), *EncodeManifest(manifest)).ok());
  }
  const CheckpointFolder folder(root_);
  EXPECT_EQ(*folder.Newest(VerifyLevel::kSizes, {}, unnamed), unnamed[0]);
}

// It may have been renamed since the others were listed.
TEST_F(FolderTest, Newest_WithoutANameAndGone_IsSearchedForAgain) {
  ASSERT_TRUE(Save(Path("checkpoint_0"), {"a"}).ok());
  const absl::Status newest =
      CheckpointFolder(root_)
          .Newest(VerifyLevel::kSizes, {}, {Path("checkpoint_1.tmp-0123456789abcdef")})
          .status();
  EXPECT_TRUE(absl::IsAborted(newest)) << newest;
}

TEST_F(FolderTest, Create_RemovesWhatWasReplaced) {
  ASSERT_TRUE(Save(Path("checkpoint_1"), {"a"}).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(Path("checkpoint_1"), "foreign"), "").ok());
  const std::string exchanged = Path("checkpoint_1.tmp-0123456789abcdef");
  const std::string aside = Path("checkpoint_1.old-0123456789abcdef");
  // The only copy with that number.
  ASSERT_TRUE(Save(Path("checkpoint_7.old-0123456789abcdef"), {"a"}).ok());
  ASSERT_TRUE(Save(aside, {"a"}).ok());
  ASSERT_EQ(rename(Path("checkpoint_1").c_str(), exchanged.c_str()), 0);
  ASSERT_TRUE(WriteFileAtomically(JoinPath(exchanged, kSealName), "{}").ok());
  Manifest newer = *ReadManifest(aside);
  newer.info.step = 10;
  ASSERT_TRUE(MakeDirectories(Path("checkpoint_1")).ok());
  ASSERT_TRUE(
      WriteFileAtomically(JoinPath(Path("checkpoint_1"), kManifestName), *EncodeManifest(newer))
          .ok());
  ASSERT_TRUE(Save(Path("checkpoint_2"), {"a"}).ok());
  EXPECT_THAT(*ListDirectory(root_),
              ElementsAre("checkpoint_1", "checkpoint_2", "checkpoint_7.old-0123456789abcdef"));
  EXPECT_TRUE(PathExists(JoinPath(Path("checkpoint_1"), "foreign")));
}

TEST_F(FolderTest, SymbolicLink_StandsForItsFolder) {
  ASSERT_TRUE(Save(Path("disk/ckpt"), {"a"}, "old").ok());
  ASSERT_EQ(symlink(Path("disk/ckpt").c_str(), Path("checkpoint_0").c_str()), 0);
  ASSERT_TRUE(Save(Path("checkpoint_0"), {"b"}, "new").ok());
  EXPECT_EQ(*ReadFile(Path("disk/ckpt/b")), "bnew");
  EXPECT_THAT(*ListDirectory(Path("disk")), ElementsAre("ckpt"));
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_0", "disk"));
  EXPECT_TRUE(VerifyCheckpoint(Path("checkpoint_0"), VerifyLevel::kContents).ok());
  // Retention removes the link, not the folder that the user has put elsewhere.
  ASSERT_TRUE(RemoveCheckpoint(Path("checkpoint_0")).ok());
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("disk"));
  EXPECT_TRUE(VerifyCheckpoint(Path("disk/ckpt"), VerifyLevel::kContents).ok());

  ASSERT_EQ(symlink(Path("nowhere").c_str(), Path("dangling").c_str()), 0);
  const absl::Status refused = Save(Path("dangling"), {"a"});
  EXPECT_TRUE(absl::IsFailedPrecondition(refused)) << refused;
  EXPECT_THAT(std::string(refused.message()), HasSubstr("is a symbolic link to nothing"));
}

// The exchange is done, and the older one is still aside.
TEST_F(FolderTest, KilledWhileReplacing_NewCheckpointIsWhole) {
  ASSERT_TRUE(Save(Path("ckpt"), {"a"}, "old").ok());
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoints("worker.checkpoint_replaced=kill", "", "").ok());
        Save(Path("ckpt"), {"a"}, "new").IgnoreError();
      },
      testing::KilledBySignal(SIGKILL), "");
  EXPECT_EQ(*ReadFile(Path("ckpt/a")), "anew");
  EXPECT_TRUE(VerifyCheckpoint(Path("ckpt"), VerifyLevel::kContents).ok());
  ASSERT_TRUE(Save(Path("ckpt"), {"a"}, "newer").ok());
  EXPECT_EQ(*ReadFile(Path("ckpt/a")), "anewer");
}

TEST_F(FolderTest, AbandonedStaging_IsRemovedAndOldCheckpointStays) {
  ASSERT_TRUE(Save(Path("ckpt"), {"a"}).ok());
  {
    auto staging = Staging::Create(Path("ckpt"));
    ASSERT_TRUE(staging.ok());
    ASSERT_TRUE(WriteFileAtomically(JoinPath(staging->path(), "a"), "half").ok());
  }
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
  EXPECT_EQ(*ReadFile(Path("ckpt/a")), "a");
}

TEST_F(FolderTest, StagingOfADeadWriter_IsSweptButNotOfALiveOne) {
  ASSERT_TRUE(MakeDirectories(Path("ckpt.tmp-0123456789abcdef/x")).ok());
  ASSERT_TRUE(MakeDirectories(Path("checkpoint_7.tmp-0123456789abcdef")).ok());
  ASSERT_TRUE(MakeDirectories(Path("mine.tmp-0123456789abcdef")).ok());
  auto live = Staging::Create(Path("ckpt"));
  ASSERT_TRUE(live.ok());
  auto second = Staging::Create(Path("ckpt"));
  ASSERT_TRUE(second.ok());
  EXPECT_TRUE(PathExists(live->path()));
  EXPECT_FALSE(PathExists(Path("ckpt.tmp-0123456789abcdef")));
  EXPECT_FALSE(PathExists(Path("checkpoint_7.tmp-0123456789abcdef")));
  EXPECT_TRUE(PathExists(Path("mine.tmp-0123456789abcdef")));
}

TEST_F(FolderTest, WritersThatBeginTogether_KeepTheirFolders) {
  std::vector<std::thread> writers;
  for (int writer = 0; writer < 4; ++writer) {
    writers.emplace_back([this] {
      for (int i = 0; i < 200; ++i) {
        auto staging = Staging::Create(Path("ckpt"));
        ASSERT_TRUE(staging.ok()) << staging.status();
        std::this_thread::yield();
        EXPECT_TRUE(PathExists(staging->path())) << i;
      }
    });
  }
  for (std::thread& writer : writers) writer.join();
  EXPECT_THAT(*ListDirectory(root_), ElementsAre());
}

TEST_F(FolderTest, D17_StaleFilesOfAnEarlierSave_DoNotSurvive) {
  ASSERT_TRUE(Save(Path("ckpt"), {"model-00001-of-00002", "model-00002-of-00002", "same"}).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("ckpt/notes.txt"), "the user's").ok());
  ASSERT_TRUE(Save(Path("ckpt"), {"model", "same"}, "new").ok());
  EXPECT_THAT(*ListDirectory(Path("ckpt")),
              ElementsAre("manifest.json", "model", "notes.txt", "same"));
  EXPECT_EQ(*ReadFile(Path("ckpt/same")), "samenew");
  EXPECT_EQ(*ReadFile(Path("ckpt/notes.txt")), "the user's");
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("ckpt"));
}

TEST_F(FolderTest, FolderOfOtherThings_IsNotReplaced) {
  ASSERT_TRUE(MakeDirectories(Path("home")).ok());
  EXPECT_TRUE(Save(Path("home"), {"a"}).ok()) << "an empty folder may be used";
  ASSERT_TRUE(MakeDirectories(Path("work")).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("work/thesis.tex"), "x").ok());
  const absl::Status status = Save(Path("work"), {"a"});
  EXPECT_EQ(status.code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(status.message()), HasSubstr("holds other files"));
  EXPECT_EQ(*ReadFile(Path("work/thesis.tex")), "x");
}

TEST_F(FolderTest, CrashBetweenTheTwoRenames_IsUndone) {
  ASSERT_TRUE(Save(Path("ckpt"), {"a"}).ok());
  ASSERT_EQ(rename(Path("ckpt").c_str(), Path("ckpt.old-0123456789abcdef").c_str()), 0);
  EXPECT_TRUE(VerifyCheckpoint(Path("ckpt"), VerifyLevel::kContents).ok());
}

TEST_F(FolderTest, CrashesBetweenTheTwoRenames_LeaveTheNewest) {
  for (const char* const digits : {"0123456789abcdef", "1123456789abcdef", "2123456789abcdef"}) {
    ASSERT_TRUE(Save(Path("ckpt"), {"a"}).ok());
    Manifest manifest = *ReadManifest(Path("ckpt"));
    manifest.info.step = digits[0] == '1' ? 9 : 8;
    manifest.created = "2026-01-01T00:00:00+00:00";
    ASSERT_TRUE(
        WriteFileAtomically(JoinPath(Path("ckpt"), kManifestName), *EncodeManifest(manifest)).ok());
    ASSERT_EQ(rename(Path("ckpt").c_str(), (Path("aside") + digits).c_str()), 0);
  }
  for (const char* const digits : {"0123456789abcdef", "1123456789abcdef", "2123456789abcdef"}) {
    ASSERT_EQ(rename((Path("aside") + digits).c_str(), (Path("ckpt.old-") + digits).c_str()), 0);
  }
  const absl::StatusOr<Manifest> found = VerifyCheckpoint(Path("ckpt"), VerifyLevel::kContents);
  ASSERT_TRUE(found.ok()) << found.status();
  EXPECT_EQ(found->info.step, 9);
}

TEST_F(FolderTest, Damage_IsNamed) {
  const auto why = [&](VerifyLevel level) {
    return std::string(VerifyCheckpoint(Path("c"), level).status().message());
  };
  EXPECT_EQ(why(VerifyLevel::kSizes), Path("c") + " does not exist");
  ASSERT_TRUE(Save(Path("c"), {"a", "b"}).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("c/a"), "x").ok());
  EXPECT_EQ(why(VerifyLevel::kSizes), "");
  EXPECT_THAT(why(VerifyLevel::kContents), HasSubstr("c/a: is damaged"));
  ASSERT_TRUE(WriteFileAtomically(Path("c/a"), "xyz").ok());
  EXPECT_THAT(why(VerifyLevel::kSizes), HasSubstr("c/a: has 3 bytes, but the manifest says 1"));
  ASSERT_TRUE(RemoveTree(Path("c/a")).ok());
  EXPECT_THAT(why(VerifyLevel::kSizes), HasSubstr("c/a: is missing"));
  ASSERT_TRUE(RemoveTree(Path("c/manifest.json")).ok());
  EXPECT_THAT(why(VerifyLevel::kSizes), HasSubstr("no manifest.json"));
}

TEST_F(FolderTest, Numbers_IgnoreOtherNames) {
  const CheckpointFolder folder(root_);
  EXPECT_EQ(*folder.NextNumber(), 0);
  for (const char* name :
       {"tmp", "checkpoint_", "checkpoint_x", "checkpoint_03", "checkpoint_-1",
        "checkpoint_99999999999999999999", "checkpoint_4.tmp-0123456789abcdef"}) {
    ASSERT_TRUE(MakeDirectories(Path(name)).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(Path("checkpoint_9"), "a file").ok());
  ASSERT_TRUE(Save(folder.PathOf(2), {"a"}).ok());
  ASSERT_TRUE(Save(folder.PathOf(10), {"a"}).ok());
  EXPECT_THAT(*folder.Numbers(), ElementsAre(2, 10));
  EXPECT_EQ(*folder.NextNumber(), 11);
  // The number after it would be negative.
  ASSERT_TRUE(MakeDirectories(JoinPath(root_, "checkpoint_9223372036854775807")).ok());
  EXPECT_EQ(*folder.NextNumber(), 11);
}

TEST_F(FolderTest, Newest_PassesOverDamagedAndIncompleteOnes) {
  const CheckpointFolder folder(root_);
  EXPECT_EQ(folder.Newest().status().code(), absl::StatusCode::kNotFound);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Save(folder.PathOf(i), {"a"}).ok());
  ASSERT_TRUE(MakeDirectories(folder.PathOf(12)).ok());
  EXPECT_EQ(*folder.Newest(), folder.PathOf(3));
  ASSERT_TRUE(WriteFileAtomically(JoinPath(folder.PathOf(3), "a"), "b").ok());
  EXPECT_EQ(*folder.Newest(), folder.PathOf(2));
  EXPECT_EQ(*folder.Newest(VerifyLevel::kSizes), folder.PathOf(3));
  ASSERT_TRUE(RemoveTree(JoinPath(folder.PathOf(2), "manifest.json")).ok());
  EXPECT_EQ(*folder.Newest(), folder.PathOf(1));
}

// The newest may be whole.
TEST_F(FolderTest, WhatCannotBeExaminedNow_IsAnError_NoOlderOneIsTaken) {
  const CheckpointFolder folder(root_);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Save(folder.PathOf(i), {"a"}).ok());
  const auto expect_error = [&](const std::string& path) {
    for (const absl::Status& status :
         {folder.Newest().status(), folder.Newest(VerifyLevel::kSizes).status()}) {
      EXPECT_FALSE(status.ok() || absl::IsNotFound(status) || StaysUnreadable(status)) << status;
      EXPECT_THAT(std::string(status.message()), HasSubstr(path));
    }
    EXPECT_EQ(*folder.Newest(VerifyLevel::kContents, {folder.PathOf(2)}), folder.PathOf(1));
  };
  for (const char* name : {"checkpoint_2/manifest.json", "checkpoint_2/a", "checkpoint_2"}) {
    SCOPED_TRACE(name);
    const HiddenPath hidden(Path(name));
    expect_error(Path(name));
    EXPECT_EQ(folder.NewestStep().ok(), std::string(name) == "checkpoint_2/a");
  }
  EXPECT_EQ(*folder.Newest(), folder.PathOf(2));
  const HiddenPath hidden(Path("checkpoint_2/manifest.json"));
  const auto is_newer = IsNewerCheckpoint(folder.PathOf(2), folder.PathOf(1));
  EXPECT_FALSE(is_newer.ok() || StaysUnreadable(is_newer.status())) << is_newer.status();
  EXPECT_FALSE(IsNewerCheckpoint(folder.PathOf(1), folder.PathOf(2)).ok());
  EXPECT_FALSE(*IsNewerCheckpoint(folder.PathOf(3), folder.PathOf(1)));
}

TEST_F(FolderTest, WithoutANameAndOutOfSightNow_IsNotCalledGone) {
  const std::string unnamed = Path("away/checkpoint_3.tmp-0123456789abcdef");
  ASSERT_TRUE(Save(unnamed, {"a"}).ok());
  const HiddenPath hidden(Path("away"));
  const absl::Status status =
      CheckpointFolder(root_).Newest(VerifyLevel::kSizes, {}, {unnamed}).status();
  EXPECT_FALSE(status.ok() || absl::IsAborted(status) || absl::IsNotFound(status)) << status;
  EXPECT_THAT(std::string(status.message()), HasSubstr("cannot examine " + unnamed));
}

TEST_F(FolderTest, NewestStep_IsThatOfTheNewestManifestThatIsWhole) {
  const CheckpointFolder folder(root_);
  EXPECT_EQ(*folder.NewestStep(), -1);
  for (int i = 0; i < 3; ++i) {
    Staging staging = *Staging::Create(folder.PathOf(i));
    Manifest manifest;
    manifest.info.step = 10 * i;
    ASSERT_TRUE(staging.Publish(manifest).ok());
  }
  EXPECT_EQ(*folder.NewestStep(), 20);
  ASSERT_TRUE(WriteFileAtomically(Path("checkpoint_2/manifest.json"), "{}").ok());
  EXPECT_EQ(*folder.NewestStep(), 10);
}

TEST_F(FolderTest, Rotate_CountsCompleteOnesOnly) {
  const CheckpointFolder folder(root_);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Save(folder.PathOf(i), {"a"}).ok());
  ASSERT_TRUE(MakeDirectories(folder.PathOf(7)).ok());
  ASSERT_TRUE(MakeDirectories(Path("tmp")).ok());
  ASSERT_TRUE(folder.Rotate(2).ok());
  EXPECT_THAT(*ListDirectory(root_),
              ElementsAre("checkpoint_2", "checkpoint_3", "checkpoint_7", "tmp"));
  EXPECT_FALSE(folder.Rotate(0).ok());
}

TEST_F(FolderTest, Rotate_OneThatFails_KeepsNoOther) {
  const CheckpointFolder folder(root_);
  for (int i = 0; i < 4; ++i) ASSERT_TRUE(Save(folder.PathOf(i), {"a"}).ok());
  ASSERT_TRUE(ArmFailpoints("worker.checkpoint_doomed=error:UNAVAILABLE", "", "").ok());
  const absl::Status status = folder.Rotate(1);
  ASSERT_TRUE(ArmFailpoints("", "", "").ok());
  EXPECT_TRUE(absl::IsUnavailable(status)) << status;
  EXPECT_THAT(*folder.Numbers(), ElementsAre(3));
}

// Makes permissions apply to this thread, because root may do everything.
bool ObeyPermissions() {
  __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3, .pid = 0};
  __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];
  if (syscall(SYS_capget, &header, data) != 0) return false;
  data[0].effective &= ~(1u << CAP_DAC_OVERRIDE);
  return syscall(SYS_capset, &header, data) == 0;
}

// The way people protect a checkpoint.
TEST_F(FolderTest, ProtectedCheckpoint_StaysWithItsRecord_AndTheOthersGo) {
  const std::vector<int64_t> left = {0, 3};
  EXPECT_EXIT(
      {
        if (!ObeyPermissions()) _exit(2);
        const CheckpointFolder folder(root_);
        for (int i = 0; i < 4; ++i) {
          if (!Save(folder.PathOf(i), {"a"}).ok()) _exit(3);
          const std::string seal = JoinPath(folder.PathOf(i), kSealName);
          if (!WriteFileAtomically(seal, "{}").ok()) _exit(4);
        }
        if (chmod(folder.PathOf(0).c_str(), 0555) != 0) _exit(5);
        const absl::Status status = folder.Rotate(1);
        std::cerr << status << "\n";
        const bool right = absl::IsPermissionDenied(status) && *folder.Numbers() == left &&
                           PathExists(JoinPath(folder.PathOf(0), kSealName));
        chmod(folder.PathOf(0).c_str(), 0755);
        _exit(right ? 0 : 1);
      },
      testing::ExitedWithCode(0), "cannot remove .*checkpoint_0");
}

// Nothing of the checkpoint is removed if something below it would stop the removal.
TEST_F(FolderTest, CheckpointWithAProtectedFolderInIt_StaysWhole_AndTheErrorNamesThatFolder) {
  EXPECT_EXIT(
      {
        if (!ObeyPermissions()) _exit(2);
        const std::string dir = Path("checkpoint_0");
        const std::string notes = JoinPath(dir, "notes/of/mine");
        if (!Save(dir, {"a"}).ok() || !MakeDirectories(notes).ok()) _exit(3);
        if (!WriteFileAtomically(JoinPath(notes, "file"), "text").ok()) _exit(4);
        if (chmod(notes.c_str(), 0555) != 0) _exit(5);
        const absl::Status status = RemoveCheckpoint(dir);
        std::cerr << status << "\n";
        const bool right = absl::IsPermissionDenied(status) &&
                           VerifyCheckpoint(dir, VerifyLevel::kContents).ok() &&
                           PathExists(JoinPath(notes, "file"));
        chmod(notes.c_str(), 0755);
        _exit(right && RemoveCheckpoint(dir).ok() && !PathExists(dir) ? 0 : 1);
      },
      testing::ExitedWithCode(0), "cannot remove .*checkpoint_0: .*notes/of/mine");
}

// What is mounted there belongs to the user, and may be the only copy of it.
TEST_F(FolderTest, CheckpointWithAMountPointInIt_StaysWhole_AndTheErrorNamesIt) {
  const std::string dir = Path("checkpoint_0"), data = JoinPath(dir, "notes/data");
  ASSERT_TRUE(Save(dir, {"a"}).ok());
  ASSERT_TRUE(MakeDirectories(data).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(data, "file"), "text").ok());
  for (const bool tells : {true, false}) {
    mounted = {.end = "/notes/data", .kernel_tells = tells, .refuses_statx = false};
    const absl::Status status = RemoveCheckpoint(dir);
    EXPECT_TRUE(absl::IsFailedPrecondition(status)) << status;
    EXPECT_THAT(std::string(status.message()),
                HasSubstr("checkpoint_0: " + data + " is a mount point"));
    EXPECT_TRUE(VerifyCheckpoint(dir, VerifyLevel::kContents).ok());
    EXPECT_TRUE(PathExists(JoinPath(data, "file")));
  }
  mounted = {};
  EXPECT_TRUE(RemoveCheckpoint(dir).ok());
  EXPECT_FALSE(PathExists(dir));
}

// The mount point cannot move to the new checkpoint, and the former checkpoint blocks no save.
TEST_F(FolderTest, ReplacedCheckpointWithAMountPointInIt_StaysAsideForAsLongAsThatIs) {
  const std::string dir = Path("best"), data = JoinPath(dir, "data");
  ASSERT_TRUE(Save(dir, {"a"}).ok());
  ASSERT_TRUE(MakeDirectories(data).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(data, "file"), "text").ok());
  const auto aside = [&] {
    std::vector<std::string> names = *ListDirectory(root_);
    names.erase(std::remove(names.begin(), names.end(), "best"), names.end());
    return names;
  };
  mounted = {.end = "/data", .kernel_tells = true, .refuses_statx = false};
  for (const char* const salt : {"1", "2", "3"}) {
    ASSERT_TRUE(Save(dir, {"a"}, salt).ok());
    EXPECT_TRUE(VerifyCheckpoint(dir, VerifyLevel::kContents).ok());
    const std::vector<std::string> left = aside();
    ASSERT_EQ(left.size(), 1u) << salt;
    EXPECT_TRUE(PathExists(Path(left[0] + "/data/file")));
    EXPECT_TRUE(PathExists(Path(left[0] + "/a")));
  }
  mounted = {};
  ASSERT_TRUE(Save(dir, {"a"}, "4").ok());
  EXPECT_THAT(aside(), testing::IsEmpty());
  EXPECT_TRUE(PathExists(JoinPath(data, "file")));
}

// Nothing in it may be renamed.
TEST_F(FolderTest, CheckpointInAReadOnlyFolder_KeepsItsRecord) {
  EXPECT_EXIT(
      {
        if (!ObeyPermissions()) _exit(2);
        const std::string dir = Path("own/checkpoint_0");
        if (!Save(dir, {"a"}).ok()) _exit(3);
        if (!WriteFileAtomically(JoinPath(dir, kSealName), "{}").ok()) _exit(4);
        if (chmod(Path("own").c_str(), 0555) != 0) _exit(5);
        const absl::Status status = RemoveCheckpoint(dir);
        const bool right = absl::IsPermissionDenied(status) && PathExists(JoinPath(dir, kSealName));
        chmod(Path("own").c_str(), 0755);
        _exit(right ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
}

// Its process ended after it had lost its name: it is not taken for one that is to get it.
TEST_F(FolderTest, SealedOneOnItsWayOut_GoesWithTheNextSave) {
  const CheckpointFolder folder(root_);
  ASSERT_TRUE(Save(folder.PathOf(0), {"a"}).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(folder.PathOf(0), kSealName), "{}").ok());
  ASSERT_TRUE(ArmFailpoints("worker.checkpoint_doomed=error:UNAVAILABLE", "", "").ok());
  EXPECT_FALSE(RemoveCheckpoint(folder.PathOf(0)).ok());
  ASSERT_TRUE(ArmFailpoints("", "", "").ok());
  EXPECT_THAT(*folder.PublishSealed(), ElementsAre());
  ASSERT_TRUE(Save(folder.PathOf(1), {"a"}).ok());
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_1"));
}

// Which files were its own is unknown: those with names of the layout would pass for the new one's.
TEST_F(FolderTest, ReplacedOneWithoutAReadableManifest_GivesNoFilesOfTheLayoutAway) {
  ASSERT_TRUE(Save(Path("best"), {"model.safetensors", "optimizer_1.safetensors",
                                  "model-00001-of-00002.safetensors", "scheduler.json",
                                  "model.safetensors.index.json", "random_states_7.safetensors"})
                  .ok());
  for (const char* name : {"notes.txt", "modelling.json", "model_best.safetensors", "model.json",
                           "random_states.safetensors"}) {
    ASSERT_TRUE(WriteFileAtomically(JoinPath(Path("best"), name), name).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(Path("best/manifest.json"), "damaged").ok());
  ASSERT_TRUE(Save(Path("best"), {"model-00001-of-00001.safetensors"}).ok());
  EXPECT_THAT(*ListDirectory(Path("best")),
              ElementsAre("manifest.json", "model-00001-of-00001.safetensors", "model.json",
                          "model_best.safetensors", "modelling.json", "notes.txt",
                          "random_states.safetensors"));
}

TEST_F(FolderTest, RemovedLater_HasNoNameAtOnce) {
  std::vector<std::string> left;
  Disposal disposal([&](const std::string& path) {
    left.push_back(path);
    return absl::OkStatus();
  });
  const CheckpointFolder folder(root_);
  for (int i = 0; i < 3; ++i) ASSERT_TRUE(Save(folder.PathOf(i), {"a"}).ok());
  ASSERT_TRUE(folder.Rotate(1, 0, {}, &disposal).ok());
  EXPECT_THAT(*folder.Numbers(), ElementsAre(2));
  disposal.Wait();
  ASSERT_EQ(left.size(), 2u);
  // The next save removes what a killed process has left of it.
  EXPECT_TRUE(PathExists(left[0]));
  ASSERT_TRUE(Save(folder.PathOf(3), {"a"}).ok());
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_2", "checkpoint_3"));
}

TEST_F(FolderTest, ReplacedAndRemovedLater_IsNotPutBack) {
  Disposal disposal([](const std::string& path) { return RemoveTree(JoinPath(path, "a")); });
  const std::string dir = Path("latest");
  ASSERT_TRUE(Save(dir, {"a", "b"}).ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(dir, kSealName), "{}").ok());
  ASSERT_TRUE(WriteFileAtomically(JoinPath(dir, "notes.txt"), "the user's").ok());
  {
    auto staging = Staging::Create(dir);
    ASSERT_TRUE(staging.ok()) << staging.status();
    ASSERT_TRUE(staging->Complete(Manifest()).ok());
    ASSERT_TRUE(staging->Rename(&disposal).ok());
  }
  disposal.Wait();
  EXPECT_TRUE(PathExists(JoinPath(dir, "notes.txt")));
  ASSERT_TRUE(RemoveTree(dir).ok());
  EXPECT_TRUE(absl::IsNotFound(VerifyCheckpoint(dir, VerifyLevel::kSizes).status()));
  EXPECT_EQ(HintAtUnnamed(dir), "");
  // For nodes with disks of their own.
  EXPECT_THAT(*CopiesOf(dir), ElementsAre());
  // A save of any name removes what a killed process has left of it.
  ASSERT_TRUE(Save(Path("other"), {"a"}).ok());
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("other"));
}

TEST_F(FolderTest, WhatAThreadRemoves_IsNotSweptByAnotherSave) {
  Notification go;
  Disposal disposal([&](const std::string& path) {
    go.WaitForNotification();
    EXPECT_TRUE(PathExists(JoinPath(path, "a")));
    return RemoveTree(path);
  });
  ASSERT_TRUE(Save(Path("checkpoint_0"), {"a"}).ok());
  ASSERT_TRUE(RemoveCheckpoint(Path("checkpoint_0"), &disposal).ok());
  ASSERT_TRUE(Save(Path("checkpoint_1"), {"a"}).ok());
  EXPECT_EQ(ListDirectory(root_)->size(), 2u);
  go.Notify();
  disposal.Wait();
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_1"));
}

// A writer may be killed after the record has replaced its request, before it has its final name.
TEST_F(FolderTest, AskedForASealLongAgo_GoesUnlessItsRecordIsThere) {
  const CheckpointFolder folder(root_);
  const std::string asked = Path("checkpoint_0.tmp-0123456789abcdef"),
                    sealed = Path("checkpoint_1.tmp-0123456789abcdef");
  for (const std::string& path : {asked, sealed}) {
    ASSERT_TRUE(MakeDirectories(path).ok());
    ASSERT_TRUE(BeginSealing(path, {.job = "j", .id = 7}, 1000).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(JoinPath(sealed, kSealingName),
                                  R"({"format": "muster-seal", "job": "j", "id": 7})")
                  .ok());
  EXPECT_THAT(folder.AskedToSeal(), ElementsAre(asked, sealed)) << "by what files there are";
  ASSERT_TRUE(folder.RemoveAsked({2, 3}, 3).ok());
  EXPECT_TRUE(PathExists(asked)) << "there are not so many newer ones";
  ASSERT_TRUE(folder.RemoveAsked({2, 3}, 2).ok());
  EXPECT_FALSE(PathExists(asked));
  EXPECT_TRUE(PathExists(sealed)) << "it is sealed, and gets its name";
}

// Its writer's clock may have been behind, and nothing else may remove it before a coordinator has
// said whether it is sealed.
TEST_F(FolderTest, AskedForASealAndNamed_StaysWhateverTheClocksSay) {
  const std::string asked = Path("best.tmp-0123456789abcdef");
  ASSERT_TRUE(Save(asked, {"a"}).ok());
  ASSERT_TRUE(BeginSealing(asked, {.job = "j", .id = 7}, 1000).ok());
  ASSERT_TRUE(Save(Path("best"), {"a"}).ok());
  Manifest manifest = *ReadManifest(Path("best"));
  EXPECT_EQ(manifest.created, "");
  manifest.created = "2001-01-01T00:00:00+00:00";
  ASSERT_TRUE(WriteFileAtomically(Path("best/manifest.json"), *EncodeManifest(manifest)).ok());
  ASSERT_TRUE(Save(Path("best"), {"a"}).ok());
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("best", BaseName(asked)));
  // It is not sealed: the coordinator has said so.
  ASSERT_TRUE(ForgetSealing(asked).ok());
  ASSERT_TRUE(Save(Path("best"), {"a"}).ok());
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("best"));
}

TEST(FileNames, FirstOfSeveral_HasNoNumber) {
  EXPECT_EQ(ModelFileName(0), "model.safetensors");
  EXPECT_EQ(ModelFileName(2), "model_2.safetensors");
  EXPECT_EQ(SchedulerFileName(1), "scheduler_1.json");
  EXPECT_EQ(RandomStatesFileName(0), "random_states_0.safetensors");
  EXPECT_EQ(CustomFileName(0), "custom_checkpoint_0.safetensors");
}

TEST(FileNames, D21_PerRankFiles_CarryTheRank) {
  EXPECT_NE(RandomStatesFileName(0), RandomStatesFileName(1));
}

}  // namespace
}  // namespace muster
