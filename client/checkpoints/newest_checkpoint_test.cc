#include "client/checkpoints/newest_checkpoint.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <string>

#include "absl/strings/str_cat.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/folder.h"
#include "worker/checkpoint/manifest.h"
#include "worker/checkpoint/registrar.h"
#include "worker/checkpoint/seal.h"

namespace muster::client {
namespace {

TEST(NewestCheckpointTest, NewestThatIsReadable_AndNotHeldBack_IsTaken) {
  const TestFolder folder;
  const auto newest = [&] { return *NewestCheckpoint(folder.path()); };
  EXPECT_FALSE(newest().has_value());
  EXPECT_FALSE(NewestCheckpoint(folder.Path("missing"))->has_value());
  const auto save = [&](int number, const std::string& manifest) {
    const std::string path = folder.Path(absl::StrCat("checkpoint_", number));
    ASSERT_TRUE(MakeDirectories(path).ok());
    ASSERT_TRUE(WriteFileAtomically(path + "/manifest.json", manifest).ok());
  };
  for (const int number : {2, 10, 11}) {
    Manifest manifest;
    manifest.info.step = 100 * number;
    save(number, *EncodeManifest(manifest));
  }
  save(12, "{}");
  ASSERT_TRUE(MakeDirectories(folder.Path("checkpoint_13")).ok());
  ASSERT_EQ(newest()->path, folder.Path("checkpoint_11"));
  RegisteredCheckpoint held_back;
  held_back.sha256 = std::string(64, '0');
  ASSERT_TRUE(WriteSeal(folder.Path("checkpoint_11"), held_back).ok());
  EXPECT_EQ(newest()->path, folder.Path("checkpoint_10"));
  EXPECT_EQ(newest()->step, 1000);
  ASSERT_TRUE(WriteFileAtomically(folder.Path("checkpoint_10/seal.json"), "{").ok());
  EXPECT_EQ(newest()->path, folder.Path("checkpoint_2"));
  // A checkpoint that may be readable later is no reason to name an older one.
  const std::string seal = folder.Path("checkpoint_10/seal.json");
  ASSERT_EQ(unlink(seal.c_str()), 0);
  ASSERT_EQ(symlink("seal.json", seal.c_str()), 0);
  EXPECT_EQ(NewestCheckpoint(folder.path()).status(),
            ReadSeal(folder.Path("checkpoint_10")).status());
  ASSERT_EQ(unlink(seal.c_str()), 0);
  EXPECT_EQ(newest()->path, folder.Path("checkpoint_10"));
  const std::string manifest = folder.Path("checkpoint_10/manifest.json");
  ASSERT_EQ(unlink(manifest.c_str()), 0);
  ASSERT_EQ(symlink("manifest.json", manifest.c_str()), 0);
  EXPECT_EQ(NewestCheckpoint(folder.path()).status(),
            ReadManifest(folder.Path("checkpoint_10")).status());
}

// Like a folder without read permission: its content is unknown.
TEST(NewestCheckpointTest, FolderThatCannotBeListed_IsAnError) {
  const TestFolder folder;
  ASSERT_TRUE(WriteFileAtomically(folder.Path("checkpoints"), "").ok());
  const auto found = NewestCheckpoint(folder.Path("checkpoints"));
  EXPECT_THAT(std::string(found.status().message()),
              ::testing::HasSubstr("checkpoints: Not a directory"));
}

}  // namespace
}  // namespace muster::client
