#include "worker/checkpoint/foreign_state.h"

#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

using testing::AllOf;
using testing::HasSubstr;

class ForeignStateTest : public testing::Test {
 protected:
  void Put(const std::string& name) {
    ASSERT_TRUE(MakeDirectories(ParentPath(folder_.Path(name))).ok());
    ASSERT_TRUE(WriteFileAtomically(folder_.Path(name), "x").ok());
  }
  // Of the folder itself, and of its numbered folders.
  absl::Status Named(const std::string& name = "state") const {
    return CheckNoStateOfAccelerate(folder_.Path(name), CheckpointFolder(folder_.path()));
  }
  absl::Status Newest() const {
    return CheckNoStateOfAccelerate("", CheckpointFolder(folder_.path()));
  }

  const TestFolder folder_;
};

TEST_F(ForeignStateTest, EveryFileOfAState_GivesItAway) {
  for (const std::string name :
       {"optimizer.bin", "optimizer_1.bin", "scheduler.bin", "sampler_12.bin", "scaler.pt",
        "dl_state_dict.bin", "random_states_0.pkl", "random_states_31.pkl",
        "custom_checkpoint_0.pkl", "pytorch_model_fsdp.bin", "pytorch_model_fsdp_0"}) {
    const TestFolder folder;
    ASSERT_TRUE(WriteFileAtomically(folder.Path("model.safetensors"), "x").ok());
    EXPECT_EQ(FileOfAccelerate(folder.path()), "");
    ASSERT_TRUE(WriteFileAtomically(folder.Path(name), "x").ok());
    EXPECT_EQ(FileOfAccelerate(folder.path()), name);
  }
}

TEST_F(ForeignStateTest, FilesOfOthers_AreNotAccelerates) {
  for (const char* const name :
       {"model.safetensors", "optimizer.safetensors", "random_states_0.safetensors",
        "scheduler.json", "optimizer_a.bin", "optimizer.binary", "my_optimizer.bin", "scaler_.pt",
        "pytorch_model.bin", "notes.txt"}) {
    Put(std::string("state/") + name);
  }
  EXPECT_EQ(FileOfAccelerate(folder_.Path("state")), "");
  EXPECT_EQ(FileOfAccelerate(folder_.Path("gone")), "");
  EXPECT_TRUE(Named().ok()) << Named();
  EXPECT_TRUE(Named("gone").ok());
  EXPECT_TRUE(Newest().ok()) << Newest();
}

TEST_F(ForeignStateTest, NamedState_IsRefusedWithTheWayToItsWeights) {
  Put("state/model.safetensors");
  Put("state/optimizer.bin");
  EXPECT_EQ(Named().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(Named().message()),
              AllOf(HasSubstr(folder_.Path("state") + " is a state of Accelerate's"),
                    HasSubstr("optimizer.bin"),
                    HasSubstr("accelerator.load_weights(\"" + folder_.Path("state") + "\")")));
  // A checkpoint with files of the user's beside its own.
  Put("state/manifest.json");
  EXPECT_TRUE(Named().ok()) << Named();
}

TEST_F(ForeignStateTest, WeightsOfAnotherName_AreNamedOnlyIfTheyAreReadHere) {
  Put("state/random_states_0.pkl");
  EXPECT_THAT(std::string(Named().message()), HasSubstr("save_model() in Python"));
  Put("state/pytorch_model_fsdp.bin");
  EXPECT_THAT(std::string(Named().message()),
              HasSubstr("load_weights(\"" + folder_.Path("state/pytorch_model_fsdp.bin") + "\")"));
}

TEST_F(ForeignStateTest, WeightsThatMustBeMergedFirst_AreSaidToBe) {
  Put("state/random_states_0.pkl");
  Put("state/zero_to_fp32.py");
  EXPECT_THAT(std::string(Named().message()), HasSubstr("`python " + folder_.Path("state")));
  Put("state/pytorch_model_fsdp_0/__0_0.distcp");
  EXPECT_THAT(std::string(Named().message()), HasSubstr("`accelerate merge-weights"));
}

TEST_F(ForeignStateTest, NumberedStates_AreRefusedUnlessOneIsACheckpoint) {
  Put("checkpoint_0/random_states_0.pkl");
  Put("checkpoint_2/optimizer.bin");
  Put("checkpoint_3/notes.txt");
  EXPECT_EQ(Newest().code(), absl::StatusCode::kFailedPrecondition);
  EXPECT_THAT(std::string(Newest().message()), HasSubstr(folder_.Path("checkpoint_2") + " is"));
  Put("checkpoint_1/manifest.json");
  EXPECT_TRUE(Newest().ok()) << Newest();
}

TEST_F(ForeignStateTest, WhatIsNotAnEmptyFolder_IsOccupied) {
  EXPECT_FALSE(IsOccupied(folder_.path()));
  EXPECT_FALSE(IsOccupied(folder_.Path("gone")));
  Put("file");
  EXPECT_TRUE(IsOccupied(folder_.path()));
  EXPECT_TRUE(IsOccupied(folder_.Path("file")));
}

}  // namespace
}  // namespace muster
