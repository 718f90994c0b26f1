#include "worker/checkpoint/node_part.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>

#include "base/file.h"
#include "base/test_folder.h"

namespace muster {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

class NodePartTest : public testing::Test {
 protected:
  void Write(const std::string& name) {
    ASSERT_TRUE(WriteFileAtomically(JoinPath(folder_.path(), name), "x").ok());
  }
  KeptElsewhere Find() const { return FindKeptElsewhere(folder_.path(), manifest_); }

  static Manifest OfTwoNodes() {
    Manifest manifest;
    manifest.files = {{.name = "model", .rank = 0, .digest = {}},
                      {.name = "random_0", .rank = 0, .digest = {}},
                      {.name = "random_1", .rank = 1, .digest = {}},
                      {.name = "random_2", .rank = 2, .digest = {}}};
    manifest.nodes = {{.host = "a", .ranks = {0}}, {.host = "b", .ranks = {1, 2}}};
    return manifest;
  }

  const TestFolder folder_;
  Manifest manifest_ = OfTwoNodes();
};

TEST_F(NodePartTest, FilesOfANodeThatHasNoneHere_AreElsewhere) {
  Write("model");
  Write("random_0");
  const KeptElsewhere elsewhere = Find();
  EXPECT_THAT(elsewhere.files, ElementsAre("random_1", "random_2"));
  EXPECT_EQ(elsewhere.nodes, "node b (ranks 1, 2)");
  EXPECT_TRUE(elsewhere.Has("random_2"));
  EXPECT_FALSE(elsewhere.Has("model"));
  EXPECT_EQ(DescribePart("DIR", elsewhere),
            "DIR is one node's part of a checkpoint: it lacks random_1 and 1 more, which node b "
            "(ranks 1, 2) wrote to a disk of its own");
}

TEST_F(NodePartTest, FileOfANodeThatHasOthersHere_IsMissing) {
  Write("random_0");  // without the model
  EXPECT_THAT(Find().files, ElementsAre("random_1", "random_2"));
  Write("random_1");  // without random_2
  EXPECT_THAT(Find().files, IsEmpty());
}

TEST_F(NodePartTest, FolderWithoutAnyFile_OrOfASharedDisk_IsNoPart) {
  EXPECT_THAT(Find().files, IsEmpty());
  Write("model");
  manifest_.nodes.clear();
  EXPECT_THAT(Find().files, IsEmpty());
}

}  // namespace
}  // namespace muster
