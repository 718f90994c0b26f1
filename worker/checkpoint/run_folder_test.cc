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

}  // namespace
}  // namespace muster
