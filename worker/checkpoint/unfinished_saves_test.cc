#include "worker/checkpoint/unfinished_saves.h"

#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/stat.h>
#include <unistd.h>

#include <csignal>
#include <filesystem>
#include <string>
#include <vector>

#include "base/failpoint.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/digest.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/sealing.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::Field;
using ::testing::IsEmpty;

class UnfinishedSavesTest : public testing::Test {
 protected:
  std::string Path(const std::string& name) const { return JoinPath(root_, name); }

  absl::StatusOr<Manifest> WriteFiles(const std::string& folder) {
    Manifest manifest;
    manifest.files = {{.name = "a", .rank = 0, .digest = DigestBytes("abc")}};
    const absl::Status written = WriteFileAtomically(JoinPath(folder, "a"), "abc");
    if (!written.ok()) return written;
    return manifest;
  }
  void Save(const std::string& dir) {
    auto staging = Staging::Create(dir);
    ASSERT_TRUE(staging.ok()) << staging.status();
    ASSERT_TRUE(staging->Publish(*WriteFiles(staging->path())).ok());
  }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.path();
};

TEST_F(UnfinishedSavesTest, RunningSave_IsThereUntilItIsACheckpoint) {
  EXPECT_THAT(*UnfinishedSavesIn(Path("missing")), IsEmpty());
  Save(Path("checkpoint_0"));
  EXPECT_THAT(*UnfinishedSavesIn(root_), IsEmpty());
  auto staging = Staging::Create(Path("checkpoint_1"));
  ASSERT_TRUE(staging.ok()) << staging.status();
  const Manifest manifest = *WriteFiles(staging->path());
  const std::vector<UnfinishedSave> saves = *UnfinishedSavesIn(root_);
  ASSERT_EQ(saves.size(), 1u);
  EXPECT_EQ(saves[0].path, staging->path());
  EXPECT_EQ(saves[0].checkpoint, Path("checkpoint_1"));
  EXPECT_EQ(saves[0].writer, FolderWriter::kAlive);
  EXPECT_FALSE(saves[0].sealed);
  EXPECT_EQ(UnfinishedSavesOf(Path("checkpoint_1"))->size(), 1u);
  EXPECT_THAT(*UnfinishedSavesOf(Path("checkpoint_0")), IsEmpty());
  EXPECT_THAT(*CheckpointFolder(root_).Numbers(), ElementsAre(0));
  ASSERT_TRUE(staging->Publish(manifest).ok());
  EXPECT_THAT(*UnfinishedSavesIn(root_), IsEmpty());
}

TEST_F(UnfinishedSavesTest, SaveOfANamedCheckpoint_IsAmongThoseOfItsFolder) {
  const std::string left = Path("best.tmp-0123456789abcdef");
  ASSERT_TRUE(MakeDirectories(left).ok());
  ASSERT_TRUE(BeginSealing(left, {.job = "night", .registry = "r", .id = 1}, 100).ok());
  ASSERT_TRUE(MakeDirectories(Path("runs")).ok());
  ASSERT_TRUE(WriteFileAtomically(Path("notes.tmp-0123456789abcdef"), "").ok());
  const std::vector<UnfinishedSave> saves = *UnfinishedSavesIn(root_);
  ASSERT_EQ(saves.size(), 1u);
  EXPECT_EQ(saves[0].path, left);
  EXPECT_EQ(saves[0].checkpoint, Path("best"));
  EXPECT_TRUE(saves[0].asked);
}

TEST_F(UnfinishedSavesTest, SaveOfAKilledWriter_IsAbandoned_WithItsAge) {
  Save(Path("checkpoint_0"));
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoints("worker.checkpoint_publish=kill", "", "").ok());
        Save(Path("checkpoint_1"));
      },
      testing::KilledBySignal(SIGKILL), "");
  std::vector<UnfinishedSave> saves = *UnfinishedSavesIn(root_);
  ASSERT_EQ(saves.size(), 1u);
  EXPECT_EQ(saves[0].writer, FolderWriter::kGone);
  EXPECT_GT(saves[0].bytes, 0u);
  const timespec long_ago[2] = {{.tv_sec = 1'000'000'000, .tv_nsec = 0},
                                {.tv_sec = 1'000'000'000, .tv_nsec = 0}};
  for (const std::string& name : {std::string("a"), std::string(kManifestName)}) {
    ASSERT_EQ(utimensat(AT_FDCWD, JoinPath(saves[0].path, name).c_str(), long_ago, 0), 0);
  }
  ASSERT_EQ(utimensat(AT_FDCWD, saves[0].path.c_str(), long_ago, 0), 0);
  EXPECT_EQ((*UnfinishedSavesIn(root_))[0].changed, absl::FromUnixSeconds(1'000'000'000));
  // A sealed one is kept until it gets its name.
  ASSERT_TRUE(WriteFileAtomically(JoinPath(saves[0].path, kSealName), "{}").ok());
  EXPECT_TRUE((*UnfinishedSavesIn(root_))[0].sealed);
}

TEST_F(UnfinishedSavesTest, EmptyFolder_MayBeOfAWriterThatHasJustMadeIt) {
  ASSERT_TRUE(MakeDirectories(Path("checkpoint_1.tmp-0123456789abcdef")).ok());
  EXPECT_EQ(UnfinishedSavesIn(root_)->at(0).writer, FolderWriter::kUnknown);
}

TEST_F(UnfinishedSavesTest, RemovedAndReplacedCheckpoints_AreNoSaves) {
  Save(Path("checkpoint_0"));
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoints("worker.checkpoint_doomed=kill", "", "").ok());
        RemoveCheckpoint(Path("checkpoint_0")).IgnoreError();
      },
      testing::KilledBySignal(SIGKILL), "");
  EXPECT_EQ(ListDirectory(root_)->size(), 1u);
  EXPECT_THAT(*UnfinishedSavesIn(root_), IsEmpty());
  Save(Path("checkpoint_1"));
  EXPECT_THAT(*ListDirectory(root_), ElementsAre("checkpoint_1"));
  EXPECT_EXIT(
      {
        ASSERT_TRUE(ArmFailpoints("worker.checkpoint_replaced=kill", "", "").ok());
        Save(Path("checkpoint_1"));
      },
      testing::KilledBySignal(SIGKILL), "");
  EXPECT_EQ(ListDirectory(root_)->size(), 2u);
  EXPECT_THAT(*UnfinishedSavesIn(root_), IsEmpty());
}

TEST_F(UnfinishedSavesTest, NamesOfOthers_AreLeftOut) {
  for (const char* name : {"mine.tmp-0123456789abcdef", "checkpoint_1.tmp-0123",
                           "checkpoint_x.tmp-0123456789abcdef", "ckpt.tmp-0123456789abcdef"}) {
    ASSERT_TRUE(MakeDirectories(Path(name)).ok());
  }
  ASSERT_TRUE(WriteFileAtomically(Path("checkpoint_2.tmp-0123456789abcdef"), "a file").ok());
  EXPECT_THAT(*UnfinishedSavesIn(root_), IsEmpty());
  EXPECT_THAT(*UnfinishedSavesOf(Path("ckpt/")),
              ElementsAre(Field(&UnfinishedSave::path, Path("ckpt.tmp-0123456789abcdef"))));
}

TEST_F(UnfinishedSavesTest, SaveOfALink_IsBesideItsFolder) {
  Save(Path("disk/ckpt"));
  ASSERT_EQ(symlink(Path("disk/ckpt").c_str(), Path("link").c_str()), 0);
  auto staging = Staging::Create(Path("link"));
  ASSERT_TRUE(staging.ok()) << staging.status();
  for (const std::string name : {"link", "link/", "link//"}) {
    EXPECT_THAT(*UnfinishedSavesOf(Path(name)),
                ElementsAre(Field(&UnfinishedSave::path, staging->path())))
        << name;
  }
}

TEST_F(UnfinishedSavesTest, SaveOfTheFolderOneIsIn_IsBesideIt) {
  Save(Path("ckpt"));
  ASSERT_TRUE(MakeDirectories(Path("ckpt/below")).ok());
  auto staging = Staging::Create(Path("ckpt"));
  ASSERT_TRUE(staging.ok()) << staging.status();
  const std::filesystem::path before = std::filesystem::current_path();
  std::filesystem::current_path(Path("ckpt"));
  for (const std::string name : {".", "./", "below/.."}) {
    const auto saves = UnfinishedSavesOf(name);
    ASSERT_TRUE(saves.ok()) << saves.status();
    ASSERT_EQ(saves->size(), 1u) << name;
    EXPECT_EQ(BaseName(saves->front().path), BaseName(staging->path()));
  }
  std::filesystem::current_path(before);
}

TEST_F(UnfinishedSavesTest, ParentThatMayNotBeListed_HasNone) {
  Save(Path("ckpt"));
  EXPECT_EXIT(
      {
        ASSERT_EQ(chmod(root_.c_str(), 0311), 0);
        // Root may list every folder.
        if (geteuid() == 0) {
          ASSERT_EQ(seteuid(65534), 0);
        }
        const bool refused = absl::IsPermissionDenied(ListDirectory(root_).status());
        const auto saves = UnfinishedSavesOf(Path("ckpt"));
        const bool empty = saves.ok() && saves->empty();
        const bool in_itself = absl::IsPermissionDenied(UnfinishedSavesIn(root_).status());
        _exit(refused && empty && in_itself ? 0 : 1);
      },
      testing::ExitedWithCode(0), "");
  ASSERT_EQ(chmod(root_.c_str(), 0755), 0);
}

}  // namespace
}  // namespace muster
