#include "worker/checkpoint/run_folder.h"

#include <string>

#include "base/file.h"
#include "base/test_folder.h"
#include "gtest/gtest.h"

namespace muster {
namespace {

TEST(CheckpointsInPlaceOfWeights, FolderOfARun_NamesTheNewestWholeOne) {
  const TestFolder folder;
  const std::string run = folder.path();
  EXPECT_EQ(CheckpointsInPlaceOfWeights(run), "");
  EXPECT_EQ(CheckpointsInPlaceOfWeights(JoinPath(run, "gone")), "");
  for (const char* name : {"checkpoint_9", "checkpoint_10", "checkpoint_11"}) {
    ASSERT_TRUE(MakeDirectories(JoinPath(JoinPath(run, "checkpoints"), name)).ok());
  }
  const std::string checkpoints = JoinPath(run, "checkpoints");
  EXPECT_EQ(CheckpointsInPlaceOfWeights(run),
            "; it holds checkpoints: name one, such as " + checkpoints +
                "/checkpoint_11 (`muster checkpoints list " + run + "` shows all)");
  ASSERT_TRUE(WriteFileAtomically(JoinPath(checkpoints, "checkpoint_10/manifest.json"), "{}").ok());
  for (const std::string& root : {run, checkpoints}) {
    EXPECT_EQ(CheckpointsInPlaceOfWeights(root),
              "; it holds checkpoints: name one, such as " + checkpoints +
                  "/checkpoint_10 (`muster checkpoints list " + root + "` shows all)");
  }
}

TEST(CheckpointsInPlaceOfWeights, DistributedCheckpointOfTorch_IsNamed) {
  const TestFolder folder;
  const std::string state = JoinPath(folder.path(), "state");
  const std::string model = JoinPath(state, "pytorch_model_fsdp_0");
  for (const std::string& part : {JoinPath(state, "optimizer_0"), model}) {
    ASSERT_TRUE(MakeDirectories(part).ok());
    ASSERT_TRUE(WriteFileAtomically(JoinPath(part, "__0_0.distcp"), "x").ok());
    ASSERT_TRUE(WriteFileAtomically(JoinPath(part, ".metadata"), "x").ok());
  }
  const std::string remedy =
      " a distributed checkpoint of torch (*.distcp): `accelerate "
      "merge-weights " +
      model +
      " OUT` in Python makes a file of its weights, which load_weights() and load_model() take";
  EXPECT_EQ(CheckpointsInPlaceOfWeights(model), "; it is" + remedy);
  EXPECT_EQ(CheckpointsInPlaceOfWeights(state), "; it holds " + model + "," + remedy);
  ASSERT_TRUE(RemoveTree(JoinPath(model, ".metadata")).ok());
  EXPECT_EQ(CheckpointsInPlaceOfWeights(model), "; it is" + remedy);
  ASSERT_TRUE(RemoveTree(model).ok());
  EXPECT_EQ(CheckpointsInPlaceOfWeights(state), "") << "the optimizer has no weights";
}

}  // namespace
}  // namespace muster
