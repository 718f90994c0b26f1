#include "worker/checkpoint/model_folder_writer.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "base/file.h"
#include "base/test_folder.h"
#include "worker/checkpoint/test_synced_folders.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsSupersetOf;

class ModelFolderWriterTest : public testing::Test {
 protected:
  static SafetensorsEntry Bytes(const std::string& name, uint64_t size) {
    return {.name = name, .type = SafetensorsType::kU8, .shape = {size}};
  }
  std::unique_ptr<ModelFolderWriter> Begin(const std::vector<SafetensorsEntry>& tensors,
                                           int64_t max_shard_bytes = 1 << 20) {
    auto writer = ModelFolderWriter::Begin(dir_, tensors, max_shard_bytes);
    EXPECT_TRUE(writer.ok()) << writer.status();
    return *std::move(writer);
  }
  std::vector<std::string> Names() const { return *ListDirectory(dir_); }

  const TestFolder folder_;
  const std::string dir_ = folder_.Path("model");
};

TEST_F(ModelFolderWriterTest, FoldersAroundTheModel_AreSynced) {
  std::vector<std::string> paths;
  synced = &paths;
  const auto writer = ModelFolderWriter::Begin(folder_.Path("run/model"), {Bytes("a", 1)}, 1 << 20);
  synced = nullptr;
  ASSERT_TRUE(writer.ok()) << writer.status();
  EXPECT_THAT(paths, IsSupersetOf({folder_.Path("run"), folder_.path()}));
}

TEST_F(ModelFolderWriterTest, TensorsInAnyOrderAndInParts_AreTheFileOfTheReference) {
  const auto writer = Begin({Bytes("b", 3), Bytes("a", 2), Bytes("empty", 0)});
  ASSERT_TRUE(writer->Write("a", 1, "2").ok());
  ASSERT_TRUE(writer->Write("b", 0, "345").ok());
  ASSERT_TRUE(writer->Write("a", 0, "1").ok());
  ASSERT_TRUE(writer->Write("empty", 0, "").ok());
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_THAT(Names(), ElementsAre("model.safetensors"));
  EXPECT_EQ(*ReadFile(dir_ + "/model.safetensors"),
            *EncodeSafetensors({Bytes("b", 3), Bytes("a", 2), Bytes("empty", 0)}, {"345", "12", ""},
                               SafetensorsMetadata{{"format", "pt"}}));
}

TEST_F(ModelFolderWriterTest, Shards_ReplaceAnEarlierModel_AndLeaveOtherFiles) {
  ASSERT_TRUE(MakeDirectories(dir_).ok());
  ASSERT_TRUE(WriteFileAtomically(dir_ + "/config.json", "{}").ok());
  ASSERT_TRUE(WriteFileAtomically(dir_ + "/model.safetensors", "old").ok());
  const auto writer = Begin({Bytes("a", 2), Bytes("b", 2)}, 2);
  ASSERT_TRUE(writer->Write("b", 0, "34").ok());
  ASSERT_TRUE(writer->Write("a", 0, "12").ok());
  EXPECT_EQ(*ReadFile(dir_ + "/model.safetensors"), "old");
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_THAT(Names(),
              ElementsAre("config.json", "model-00001-of-00002.safetensors",
                          "model-00002-of-00002.safetensors", "model.safetensors.index.json"));
  EXPECT_THAT(writer->FileNames(),
              ElementsAre("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors",
                          "model.safetensors.index.json"));
}

TEST_F(ModelFolderWriterTest, PickleBesideANewSave_IsWarnedOf) {
  const auto save = [this](bool sharded = false) {
    testing::internal::CaptureStderr();
    const auto writer = sharded ? Begin({Bytes("a", 2), Bytes("b", 2)}, 2) : Begin({Bytes("a", 2)});
    EXPECT_TRUE(writer->Write("a", 0, "12").ok());
    if (sharded) {
      EXPECT_TRUE(writer->Write("b", 0, "34").ok());
    }
    EXPECT_TRUE(writer->Finish().ok());
    return testing::internal::GetCapturedStderr();
  };
  EXPECT_EQ(save(), "");
  // Of others, or not a whole model's.
  ASSERT_TRUE(WriteFileAtomically(dir_ + "/training_args.bin", "x").ok());
  EXPECT_EQ(save(), "");
  ASSERT_TRUE(WriteFileAtomically(dir_ + "/pytorch_model.bin", "old").ok());
  EXPECT_THAT(save(), HasSubstr(dir_ + " has pytorch_model.bin of another save"));
  EXPECT_EQ(*ReadFile(dir_ + "/pytorch_model.bin"), "old");
  ASSERT_TRUE(RemoveTree(dir_ + "/pytorch_model.bin").ok());
  ASSERT_TRUE(WriteFileAtomically(dir_ + "/pytorch_model-00001-of-00001.bin", "old").ok());
  ASSERT_TRUE(WriteFileAtomically(dir_ + "/pytorch_model.bin.index.json", "old").ok());
  EXPECT_EQ(save(), "");
  EXPECT_THAT(save(/*sharded=*/true), HasSubstr("has pytorch_model.bin.index.json of another"));
}

TEST_F(ModelFolderWriterTest, WithoutFinish_NothingHasChanged) {
  ASSERT_TRUE(MakeDirectories(dir_).ok());
  ASSERT_TRUE(WriteFileAtomically(dir_ + "/model.safetensors", "old").ok());
  ASSERT_TRUE(Begin({Bytes("a", 2)})->Write("a", 0, "12").ok());
  EXPECT_THAT(Names(), ElementsAre("model.safetensors"));
  EXPECT_EQ(*ReadFile(dir_ + "/model.safetensors"), "old");
}

TEST_F(ModelFolderWriterTest, DataThatIsMissingOrTooMuch_IsRefusedByName) {
  const auto writer = Begin({Bytes("a", 2), Bytes("b", 1)});
  EXPECT_THAT(std::string(writer->Write("c", 0, "1").message()), HasSubstr("\"c\" is not planned"));
  EXPECT_THAT(std::string(writer->Write("a", 1, "23").message()),
              HasSubstr("\"a\" has 2 bytes: 2 do not fit at byte 1"));
  EXPECT_FALSE(writer->Write("a", ~uint64_t{0}, "1").ok());
  ASSERT_TRUE(writer->Write("a", 0, "12").ok());
  EXPECT_THAT(std::string(writer->Finish().message()),
              HasSubstr("model.safetensors lacks 1 bytes"));
}

TEST_F(ModelFolderWriterTest, WhatKilledWritersLeft_IsRemovedAndWhatLiveOnesWriteStays) {
  const auto live = Begin({Bytes("a", 1)});
  ASSERT_TRUE(live->Write("a", 0, "1").ok());
  for (const char* const name : {".saving-0123456789abcdef", ".saving-notes"}) {
    ASSERT_TRUE(MakeDirectories(JoinPath(dir_, name)).ok());
    ASSERT_TRUE(WriteFileAtomically(JoinPath(dir_, name) + "/model.safetensors", "half").ok());
  }
  const auto writer = Begin({Bytes("a", 1)});
  EXPECT_FALSE(PathExists(dir_ + "/.saving-0123456789abcdef"));
  ASSERT_TRUE(writer->Write("a", 0, "2").ok());
  ASSERT_TRUE(writer->Finish().ok());
  EXPECT_EQ(Names().size(), 3u) << "the live one's and a user's";
  ASSERT_TRUE(live->Finish().ok());
  EXPECT_THAT(Names(), ElementsAre(".saving-notes", "model.safetensors"));
}

TEST_F(ModelFolderWriterTest, FolderOfACheckpoint_IsRefusedAndStaysAsItIs) {
  const auto has_manifest = [this] {
    ASSERT_TRUE(MakeDirectories(dir_).ok());
    ASSERT_TRUE(WriteFileAtomically(dir_ + "/manifest.json", "{}").ok());
    ASSERT_TRUE(WriteFileAtomically(dir_ + "/model.safetensors", "old").ok());
  };
  // A checkpoint that is saved beside training gets its name while the model is written.
  const auto writer = Begin({Bytes("a", 1)});
  ASSERT_TRUE(writer->Write("a", 0, "1").ok());
  has_manifest();
  const absl::Status late = writer->Finish();
  EXPECT_TRUE(absl::IsAlreadyExists(late)) << late;
  EXPECT_EQ(*ReadFile(dir_ + "/model.safetensors"), "old");

  ASSERT_TRUE(RemoveTree(dir_).ok());
  has_manifest();
  const absl::Status begun = ModelFolderWriter::Begin(dir_, {Bytes("a", 1)}, 100).status();
  EXPECT_TRUE(absl::IsAlreadyExists(begun)) << begun;
  EXPECT_THAT(std::string(begun.message()), HasSubstr("write to another folder"));
  EXPECT_THAT(Names(), ElementsAre("manifest.json", "model.safetensors"));
}

TEST_F(ModelFolderWriterTest, FolderThatIsAFile_IsRefused) {
  ASSERT_TRUE(WriteFileAtomically(dir_, "").ok());
  EXPECT_TRUE(
      absl::IsFailedPrecondition(ModelFolderWriter::Begin(dir_, {Bytes("a", 1)}, 100).status()));
}

}  // namespace
}  // namespace muster
