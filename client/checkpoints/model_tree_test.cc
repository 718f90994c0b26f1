#include "client/checkpoints/model_tree.h"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

namespace muster::client {
namespace {

using ::testing::ElementsAre;

std::vector<std::string> Names(const PlannedModule& module) {
  std::vector<std::string> names;
  for (const PlannedModule& child : module.children) names.push_back(child.name);
  return names;
}

PlannedModel Llama(absl::string_view type) {
  std::vector<PlannedTensor> tensors;
  for (const char* const name :
       {"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.mlp.up_proj.weight",
        "model.layers.10.mlp.up_proj.weight", "model.layers.2.mlp.experts.0.w1.weight",
        "model.norm.weight"}) {
    tensors.push_back({name, "BF16", {2, 3}});
  }
  return TreeOf(tensors, type);
}

TEST(TreeOf, Modules_AreInTheOrderInWhichTheyRun) {
  const PlannedModel model = Llama("llama");
  EXPECT_THAT(Names(model.root), ElementsAre("model", "lm_head"));
  const PlannedModule& inner = model.root.children[0];
  EXPECT_THAT(Names(inner), ElementsAre("embed_tokens", "layers", "norm"));
  EXPECT_THAT(Names(inner.children[1]), ElementsAre("0", "2", "10"));
  EXPECT_EQ(inner.children[1].children[0].class_name, "LlamaDecoderLayer");
  EXPECT_EQ(inner.children[1].children[0].children[0].class_name, "model.layers.*.mlp");
  EXPECT_THAT(BlockClasses(model), ElementsAre("LlamaDecoderLayer"));
}

TEST(TreeOf, UnknownFamily_HasPathsAsClasses) {
  EXPECT_THAT(BlockClasses(Llama("")), ElementsAre("model.layers.*"));
}

TEST(Shortened, NeighboursOfAList_AreARange) {
  EXPECT_THAT(Shortened({"a", "h.0", "h.1", "h.2", "h.4", "g.5", "g.6"}),
              ElementsAre("a", "h.0-2", "h.4", "g.5-6"));
}

}  // namespace
}  // namespace muster::client
