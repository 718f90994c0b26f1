#include "coordinator/journal/backup_file.h"

#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "coordinator/journal/snapshot_file.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::coordinator {
namespace {

using ::testing::HasSubstr;

class BackupFileTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto writer = SnapshotWriter::Create(folder_.Path("snapshot"), 7, 3);
    ASSERT_TRUE(writer.ok());
    ASSERT_TRUE(writer->Append("first ").ok());
    ASSERT_TRUE(writer->Append("second").ok());
    ASSERT_TRUE(writer->Commit().ok());
    const BackupHeader header{.cluster_id = "abc123",
                              .term = 3,
                              .revision = 7,
                              .seq = 5,
                              .parts = writer->parts(),
                              .bytes = writer->bytes(),
                              .made = 1764057600};
    bytes_ = EncodeBackupHeader(header) + ReadFile(folder_.Path("snapshot")).value();
  }
  // Returns the whole state, or the error.
  std::string Read(const std::string& bytes) {
    const std::string path = folder_.Path("backup");
    EXPECT_TRUE(WriteFileAtomically(path, bytes).ok());
    const auto backup = OpenBackup(path);
    if (!backup.ok()) return std::string(backup.status().message());
    std::string state;
    const absl::Status status = ReadBackupState(path, *backup, [&](absl::string_view part) {
      state += std::string(part);
      return absl::OkStatus();
    });
    return status.ok() ? state : std::string(status.message());
  }

  TestFolder folder_;
  std::string bytes_;
};

TEST_F(BackupFileTest, Header_IsReadBack) {
  EXPECT_EQ(Read(bytes_), "first second");
  const auto backup = OpenBackup(folder_.Path("backup"));
  EXPECT_EQ(backup->header.cluster_id, "abc123");
  EXPECT_EQ(backup->header.term, 3u);
  EXPECT_EQ(backup->header.revision, 7u);
  EXPECT_EQ(backup->header.seq, 5u);
  EXPECT_EQ(backup->header.made, 1764057600);
}

TEST_F(BackupFileTest, EveryFlippedBit_IsNoticed) {
  for (size_t at = 0; at < bytes_.size(); ++at) {
    std::string flipped = bytes_;
    flipped[at] = static_cast<char>(flipped[at] ^ 4);
    EXPECT_THAT(Read(flipped), testing::Not(HasSubstr("first second"))) << at;
  }
}

TEST_F(BackupFileTest, EveryShorterOrLongerFile_IsNoticed) {
  for (size_t size = 0; size < bytes_.size(); ++size) {
    EXPECT_THAT(Read(bytes_.substr(0, size)), HasSubstr("backup")) << size;
  }
  EXPECT_THAT(Read(bytes_ + "x"), HasSubstr("bytes behind its header"));
}

TEST_F(BackupFileTest, AnotherFile_IsNoBackup) {
  EXPECT_THAT(Read("hello\n"), HasSubstr("is not a backup"));
  EXPECT_THAT(Read("muster-backup 2\n{}\n"), HasSubstr("newer version"));
  EXPECT_TRUE(absl::IsNotFound(OpenBackup(folder_.Path("none")).status()));
}

}  // namespace
}  // namespace muster::coordinator
