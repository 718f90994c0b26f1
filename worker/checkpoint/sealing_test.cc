#include "worker/checkpoint/sealing.h"

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/manifest.h"

namespace muster {
namespace {

using State = Sealing::State;

uint64_t InodeOf(const std::string& path) {
  struct stat info = {};
  EXPECT_EQ(stat(path.c_str(), &info), 0) << path;
  return info.st_ino;
}

TEST(SealingFile, RecordTakesTheRoomThatIsThere) {
  const TestFolder folder;
  const std::string dir = folder.path();
  EXPECT_EQ(ReadSealing(dir)->state, State::kNone);
  ASSERT_TRUE(BeginSealing(dir, {.job = "a job", .registry = "r", .id = 7}, 1000).ok());
  const Sealing asked = *ReadSealing(dir);
  EXPECT_EQ(asked.state, State::kAsked);
  EXPECT_EQ(asked.job, "a job");
  EXPECT_EQ(asked.registry, "r");
  EXPECT_EQ(asked.id, 7u);
  // A full disk has no block for another file.
  const uint64_t inode = InodeOf(folder.Path(kSealingName));
  ASSERT_TRUE(FinishSealing(dir, "{\"format\": \"muster-seal\"}").ok());
  EXPECT_EQ(InodeOf(folder.Path(kSealName)), inode);
  EXPECT_EQ(ReadSealing(dir)->state, State::kNone);
}

TEST(SealingFile, WithoutRoom_IsNotFinished) {
  const TestFolder folder;
  EXPECT_TRUE(absl::IsNotFound(FinishSealing(folder.path(), "{}")));
  ASSERT_TRUE(BeginSealing(folder.path(), {.job = "j", .id = 7}, 10).ok());
  EXPECT_TRUE(absl::IsNotFound(FinishSealing(folder.path(), std::string(2000, ' '))));
  EXPECT_EQ(ReadSealing(folder.path())->state, State::kAsked);
}

TEST(SealingFile, KilledBeforeTheRename_GetsItsName) {
  const TestFolder folder;
  const std::string text = "{\"format\": \"muster-seal\", \"job\": \"j\", \"id\": 3}   ";
  ASSERT_TRUE(WriteFileAtomically(folder.Path(kSealingName), text).ok());
  EXPECT_EQ(ReadSealing(folder.path())->state, State::kSealed);
  ASSERT_TRUE(NameSealing(folder.path()).ok());
  EXPECT_EQ(*ReadFile(folder.Path(kSealName)), text);
}

TEST(SealingFile, OfAWriterThatDidNotNameTheRegistry_IsRead) {
  const TestFolder folder;
  const std::string text =
      "{\"format\": \"muster-sealing\", \"version\": 1, \"job\": \"j\", \"id\": 3}";
  ASSERT_TRUE(WriteFileAtomically(folder.Path(kSealingName), text).ok());
  const Sealing asked = *ReadSealing(folder.path());
  EXPECT_EQ(asked.state, State::kAsked);
  EXPECT_EQ(asked.job, "j");
  EXPECT_EQ(asked.registry, "");
  EXPECT_EQ(asked.id, 3u);
}

// A machine lost its power while the file was written.
TEST(SealingFile, Damaged_CountsAsAsked) {
  for (const std::string text :
       {"", "{", "[]", "{\"format\": \"muster-seal\"", "{\"id\": -1}",
        "{\"format\": 3, \"job\": 4}", "{\"format\": \"\", \"job\": \"\", \"registry\": 4}"}) {
    const TestFolder folder;
    ASSERT_TRUE(WriteFileAtomically(folder.Path(kSealingName), text).ok());
    EXPECT_EQ(ReadSealing(folder.path())->state, State::kAsked) << text;
    ASSERT_TRUE(NameSealing(folder.path()).ok());
    EXPECT_FALSE(PathExists(folder.Path(kSealName)));
    ASSERT_TRUE(ForgetSealing(folder.path()).ok());
    ASSERT_TRUE(ForgetSealing(folder.path()).ok());
    EXPECT_EQ(ReadSealing(folder.path())->state, State::kNone);
  }
}

}  // namespace
}  // namespace muster
