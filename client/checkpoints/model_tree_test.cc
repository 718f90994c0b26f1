#include "client/checkpoints/model_tree.h"

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace muster::client {
namespace {

using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::vector<std::string> Children(const PlannedModule& module) {
  std::vector<std::string> names;
  for (const PlannedModule& child : module.children) names.push_back(child.name);
  return names;
}

PlannedModel Tree(const std::vector<std::string>& names) {
  std::vector<TreeTensor> tensors;
  for (const std::string& name : names) tensors.push_back({name, "F32", {2, 2}});
  return *TreeOf(tensors);
}

std::string ErrorOf(const std::vector<TreeTensor>& tensors) {
  return std::string(TreeOf(tensors).status().message());
}

TEST(ModelTree, NamesOfTransformers_AreInTheOrderOfTheModel) {
  const PlannedModel model =
      Tree({"lm_head.weight", "model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.weight",
            "model.layers.0.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight",
            "model.layers.10.mlp.up_proj.weight", "model.layers.9.mlp.up_proj.weight",
            "model.norm.weight"});
  EXPECT_THAT(Children(model.root), ElementsAre("model", "lm_head"));
  const PlannedModule& body = model.root.children[0];
  EXPECT_THAT(Children(body), ElementsAre("embed_tokens", "layers", "norm"));
  const PlannedModule& layers = body.children[1];
  EXPECT_EQ(layers.class_name, "ModuleList");
  EXPECT_THAT(Children(layers), ElementsAre("0", "9", "10"));
  EXPECT_EQ(layers.children[0].class_name, "layers");
  EXPECT_THAT(Children(layers.children[0]), ElementsAre("self_attn", "mlp", "input_layernorm"));
  EXPECT_THAT(LayerClasses(model), ElementsAre("layers"));
}

TEST(ModelTree, UnknownNames_AreInTheOrderOfTheFiles) {
  const PlannedModel model = *TreeOf(
      {{"zeta.weight", "F32", {2}, 0}, {"alpha.weight", "F32", {2}, 1}, {"beta.w", "F32", {2}, 1}});
  EXPECT_THAT(Children(model.root), ElementsAre("zeta", "alpha", "beta"));
}

TEST(ModelTree, ListsInLists_AndAListAlone_HaveTheirEntriesForLayers) {
  EXPECT_THAT(LayerClasses(Tree({"blocks.0.0.weight", "blocks.0.1.weight", "blocks.1.0.weight"})),
              ElementsAre("blocks"));
  EXPECT_THAT(LayerClasses(Tree({"0.weight", "2.weight"})), ElementsAre("Model"));
  EXPECT_THAT(LayerClasses(Tree({"layers.0.experts.0.w", "layers.0.experts.1.w"})),
              ElementsAre("layers"));
}

TEST(ModelTree, StatisticsAndIntegers_AreBuffers) {
  const PlannedModel model = *TreeOf({{"norm.running_mean", "F32", {4}},
                                      {"norm.num_batches_tracked", "I64", {}},
                                      {"norm.weight", "F32", {4}}});
  EXPECT_EQ(model.root.children[0].parameters.size(), 1u);
  EXPECT_EQ(model.root.children[0].buffers.size(), 2u);
}

TEST(ModelTree, TiedHead_CountsOnce) {
  PlannedModel model = Tree({"model.embed_tokens.weight", "model.norm.weight"});
  ASSERT_TRUE(TieHead(&model));
  EXPECT_EQ(ModuleSizes(model, {})->at(""), 32);
  EXPECT_THAT(Children(model.root), ElementsAre("model", "lm_head"));
  ASSERT_TRUE(TieHead(&model)) << "it has one";
  EXPECT_EQ(model.tied.size(), 1u);
  PlannedModel other = Tree({"w"});
  EXPECT_FALSE(TieHead(&other));
}

TEST(ModelTree, TiedHeadOfBert_IsBelowCls) {
  PlannedModel model = Tree({"bert.embeddings.word_embeddings.weight", "cls.predictions.bias",
                             "cls.predictions.transform.dense.weight"});
  ASSERT_TRUE(TieHead(&model));
  EXPECT_EQ(ModuleSizes(model, {})->at(""), 48);
  EXPECT_THAT(Children(model.root.children[1].children[0]), ElementsAre("transform", "decoder"));
  EXPECT_THAT(LayerClasses(model), ElementsAre("embeddings"));
}

TEST(ModelTree, OneStorageUnderTwoNames_IsTied) {
  const PlannedModel model =
      *TreeOf({{"a.weight", "F32", {2}, 0, "0:8"}, {"b.weight", "F32", {2}, 0, "0:8"}});
  ASSERT_EQ(model.tied.size(), 1u);
  EXPECT_EQ(ModuleSizes(model, {})->at(""), 8);
}

TEST(ModelTree, NamesThatNoModelHas_AreRefused) {
  EXPECT_THAT(ErrorOf({{"a..b", "F32", {}}}), HasSubstr("\"a..b\""));
  EXPECT_THAT(ErrorOf({{"", "F32", {}}}), HasSubstr("empty"));
  std::string deep = "a";
  for (int i = 0; i < 1000; ++i) deep += ".a";
  EXPECT_THAT(ErrorOf({{deep, "F32", {}}}), HasSubstr("more than 64 parts"));
  EXPECT_THAT(ErrorOf({{"a", "F32", {}}, {"a.b", "F32", {}}}),
              HasSubstr("\"a\" is both a tensor and a module"));
}

TEST(ModelTree, ClassesOfTransformers_AreTheListsOfTheirModels) {
  EXPECT_EQ(TreeClass("LlamaDecoderLayer"), "layers");
  EXPECT_EQ(TreeClass("GPT2Block"), "h");
  EXPECT_EQ(TreeClass("BertEmbeddings"), "embeddings");
  EXPECT_EQ(TreeClass("model.layers.*"), "layers");
  EXPECT_EQ(TreeClass("experts"), "experts");
}

}  // namespace
}  // namespace muster::client
