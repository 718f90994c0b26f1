// One flipped bit anywhere in a checkpoint is found, the file is named, and the previous checkpoint
// is taken.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <algorithm>
#include <string>
#include <vector>

#include "ATen/ops/arange.h"
#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/direct_file.h"
#include "worker/checkpoint/state.h"
#include "worker/collective/local_comm.h"

namespace muster {
namespace {

using ::testing::HasSubstr;

class DamageTest : public testing::Test {
 protected:
  CheckpointFolder folder() const { return CheckpointFolder(root_); }

  // Saves two checkpoints of small files, one of tensors and one of scalars, and of a model that is
  // large (three blocks) or absent.
  void SaveTwo(bool large) {
    LocalComm comm;
    for (int64_t number = 0; number < 2; ++number) {
      const absl::Status saved = SaveNumberedCheckpoint(
          comm, folder(), {.iteration = number, .step = number, .cursor = {{"samples", 7}}}, 0,
          [large](StateWriter& writer) {
            StateDict optimizer, scheduler;
            optimizer.SetTensor("m", at::arange(40, at::kFloat));
            optimizer.SetInt("steps", 3);
            absl::Status status = writer.Write(OptimizerFileName(0), optimizer);
            scheduler.SetDouble("lr", 0.5);
            status.Update(writer.Write(SchedulerFileName(0), scheduler));
            if (!large) return status;
            status.Update(
                writer.WriteModel(ModelFileName(0), {{"w", at::arange(5'000'000, at::kFloat)}}));
            return status;
          });
      ASSERT_TRUE(saved.ok()) << saved;
    }
  }

  void Flip(const std::string& path, uint64_t position) {
    const int fd = open(path.c_str(), O_RDWR | O_CLOEXEC);
    ASSERT_GE(fd, 0);
    char byte = 0;
    ASSERT_EQ(pread(fd, &byte, 1, static_cast<off_t>(position)), 1);
    byte = static_cast<char>(byte ^ (1 << (position % 8)));
    ASSERT_EQ(pwrite(fd, &byte, 1, static_cast<off_t>(position)), 1);
    close(fd);
  }

  // Flips a bit at each position in turn, and back. Expects the damage to be found and the older
  // checkpoint to be taken, with the file's name in the log.
  void ExpectFound(const std::string& name, const std::vector<uint64_t>& positions) {
    const std::string path = JoinPath(newest_, name);
    for (const uint64_t position : positions) {
      SCOPED_TRACE(name + " at " + std::to_string(position));
      Flip(path, position);
      const absl::Status verified = VerifyCheckpoint(newest_, VerifyLevel::kContents).status();
      EXPECT_FALSE(verified.ok());
      EXPECT_THAT(std::string(verified.message()), HasSubstr(path));
      testing::internal::CaptureStderr();
      const auto taken = folder().Newest();
      const std::string log = testing::internal::GetCapturedStderr();
      EXPECT_TRUE(taken.ok() && *taken == folder().PathOf(0)) << taken.status();
      EXPECT_THAT(log, HasSubstr("passing over " + newest_ + ": " + path));
      // Also with a check of sizes only.
      if (name != kManifestName) {
        const auto reader = StateReader::Open(newest_);
        ASSERT_TRUE(reader.ok()) << reader.status();
        const absl::Status read = reader->Read(name).status();
        EXPECT_EQ(read.code(), absl::StatusCode::kDataLoss) << read;
        EXPECT_THAT(std::string(read.message()), HasSubstr(path));
      }
      if (HasFailure()) return;
      Flip(path, position);
    }
    EXPECT_EQ(*folder().Newest(), newest_);
  }

  static std::vector<uint64_t> Every(uint64_t step, uint64_t end) {
    std::vector<uint64_t> positions;
    for (uint64_t at = 0; at < end; at += step) positions.push_back(at);
    positions.push_back(end - 1);
    return positions;
  }
  uint64_t SizeOf(const std::string& name) {
    return StateReader::Open(newest_)->manifest().Find(name)->digest.bytes;
  }

  const TestFolder test_folder_;
  const std::string root_ = test_folder_.Path("checkpoints");
  const std::string newest_ = folder().PathOf(1);
};

TEST_F(DamageTest, AnyByteOfTheManifest_IsFound) {
  SaveTwo(/*large=*/false);
  ExpectFound(kManifestName, Every(1, ReadFile(JoinPath(newest_, kManifestName))->size()));
}

TEST_F(DamageTest, AnyByteOfASmallFile_IsFound) {
  SaveTwo(/*large=*/false);
  ExpectFound(OptimizerFileName(0), Every(3, SizeOf(OptimizerFileName(0))));
  ExpectFound(SchedulerFileName(0), Every(1, SizeOf(SchedulerFileName(0))));
}

TEST_F(DamageTest, AnyBlockOfALargeFile_IsFound) {
  SaveTwo(/*large=*/true);
  const uint64_t bytes = SizeOf(ModelFileName(0));
  ASSERT_GT(bytes, 2 * kDirectBlockBytes);
  std::vector<uint64_t> positions = Every(bytes / 12, bytes);
  // The header, and both sides of the blocks' borders.
  for (const uint64_t at : {uint64_t{1}, uint64_t{9}, uint64_t{100}, uint64_t{4095}, uint64_t{4096},
                            kDirectBlockBytes - 1, uint64_t{kDirectBlockBytes},
                            2 * kDirectBlockBytes - 1, 2 * kDirectBlockBytes}) {
    positions.push_back(at);
  }
  ExpectFound(ModelFileName(0), positions);
}

}  // namespace
}  // namespace muster
